"""Parse pasted command lines and scripts of DeepSpeed-Chat into `Command`s: the program, its flags, and variables.

The text may hold several commands, line continuations, the launcher, redirections and assignments, or start a script,
which is then read as `shell.py` describes. Values are not checked here; a shell variable without a value stays `$NAME`.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf.contrib.deepspeed_chat.shell import UNKNOWN, LoopError, Shell, shorten
from rlhf.contrib.deepspeed_chat.tables import (
    STEPS,
    Flag,
    find_flag,
    load_flags,
    load_variables,
    suggest,
)
from rlhf.contrib.deepspeed_chat.variables import PREFIX, read_variables
from rlhf.errors import ConfigError

_PROGRAMS = {
    "step1_": "sft",
    "step2_dpo": "dpo",
    "step2_": "reward",
    "step3_": "ppo",
}
"""The stage by a part of the path of main.py, or of its working directory; the first match counts."""

_STARTER = (
    "starts the scripts of training_scripts; use a recipe of example_scripts/opt, or paste the deepspeed command from "
    "one of those scripts"
)
_OTHERS = {
    "e2e_rlhf.py": _STARTER,
    "train.py": _STARTER,
    "chat.py": "needs no recipe; use `rlhf chat`",
    "chatbot.py": "needs no recipe; use `rlhf chat`",
    "rw_eval.py": "needs no recipe; use `rlhf evaluate`",
    "prompt_eval.py": "needs no recipe; use `rlhf compare`",
}
"""Programs without a recipe, and what to use instead."""

_GRIDS = {"sft": "step1.yaml", "reward": "step2.yaml", "dpo": "dpo.yaml", "ppo": "step3.yaml"}
"""The grids in example_scripts/sweeps, by the stage that a loop trains."""

_HARMLESS = {"echo", "mkdir", "pkill", "set", "sleep", "source", "."}
"""Commands in pasted text that start no training; other commands than DeepSpeed-Chat's are refused there."""

_TORCH_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_TORCH_FLAGS = {"--nproc_per_node": "--num_gpus", "--nnodes": "--num_nodes"}
"""Options of PyTorch's launcher by those of DeepSpeed's; its others say how ranks meet."""

_VALUE = re.compile(r"^-(?!-)[\d.]")  # a negative number, not a flag
_MOST_NESTED = 8  # scripts that start one another


@dataclass(frozen=True)
class Command:
    """One command of DeepSpeed-Chat.

    Attributes:
        stage: the program's stage, a key of `STEPS`.
        given: the texts after each flag, by the flag's current name.
        written: each flag as it was written, by its current name.
        guess: other stages that accept the same flags, if no path names the stage.
        variables: the shell's variables; empty for commands of scripts, whose flags contain their values.
        defaults: the defaults of the main.py that the command would run, by flag, and the numbers that its trainer
            sets, by name; None if that file is not here.
    """

    stage: str
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    guess: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] | None = None


def parse_commands(texts: Sequence[str], environment: Mapping[str, str]) -> tuple[list[Command], dict[str, str]]:
    """Return (the commands in the texts, the variables assigned in them).

    A text is a command line, several of them, or the path of a script. A text of assignments alone sets variables for
    all texts after it, and overrides the assignments of scripts.

    Args:
        texts: the texts.
        environment: variables; scripts see those named HL_*, the fork's.

    Raises:
        ConfigError: a text is not a command of DeepSpeed-Chat, a script cannot be read, or a flag does not belong to
            the program.
    """
    parser = _Parser({name: value for name, value in environment.items() if name.startswith(PREFIX)})
    for text in texts:
        parser.parse(text)
    parser.check_variables()
    return parser.commands, parser.shell.variables


class _Parser:
    """Collects the commands of texts, and of the scripts that they start."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.commands: list[Command] = []
        self.shell = Shell()
        self._environment = environment
        self._scripts: dict[str, str] = {}  # path -> text
        self._variables: dict[str, str] = {}  # HL_* variables that scripts see

    def parse(self, text: str) -> None:
        """Add the commands of a text."""
        if "\n" not in text and os.path.isfile(text.strip()):
            self._parse_script([text.strip()], self.shell, {}, "", 0)
            return
        before = dict(self.shell.variables)
        try:
            has_commands = self._parse_text(text, self.shell, "", 0)
        except LoopError as error:
            raise ConfigError(f"{error}{_describe_sweep(text)}") from error
        if not has_commands:
            assigned = {name: value for name, value in self.shell.variables.items() if before.get(name) != value}
            self.shell.fixed = {**self.shell.fixed, **assigned}

    def check_variables(self) -> None:
        """Check the HL_* variables that scripts see: each is read by one of them, and has a valid value."""
        if not self._scripts:
            return
        read_variables({name: value for name, value in self._variables.items() if not self._is_own(name)})
        for name, value in self._variables.items():
            if value.strip() and not any(name in text for text in self._scripts.values()):
                raise ConfigError(f"{name}: not read by {' or '.join(self._scripts)}; unset it")

    def _is_own(self, name: str) -> bool:
        """Return whether a variable is unknown, but read by an edited script."""
        return name not in load_variables() and any(name in text for text in self._scripts.values())

    def _parse_text(self, text: str, shell: Shell, folder: str, depth: int) -> bool:
        """Add the commands of a text, which is a script's if `depth` is not 0; return whether it has commands."""
        has_commands = False
        for words, prefix in shell.run(text):
            has_commands = True
            program = next((word for word in words if word.endswith((".py", ".sh"))), "")
            if words[0] == "cd":
                folder = os.path.join(folder, " ".join(words[1:]))
            elif program.endswith(".sh") and words[0] not in _HARMLESS:
                self._parse_script(words[words.index(program) :], shell, prefix, folder, depth)
            elif words[0] not in _HARMLESS and (depth == 0 or program):
                command = _parse_command(words, program, folder, is_pasted=depth == 0)
                variables = {} if depth else {**shell.variables, **prefix}
                self.commands += [replace(command, variables=variables)] if command else []
        return has_commands

    def _parse_script(self, words: list[str], shell: Shell, prefix: Mapping[str, str], folder: str, depth: int) -> None:
        """Add the commands of a script, started with arguments, by a shell with variables."""
        path = next((path for path in (Path(words[0]), Path(folder, words[0])) if os.path.isfile(path)), None)
        if path is None:
            if sweep := _describe_sweep(words[0]):
                raise ConfigError(f"{words[0]}: starts several trainings{sweep}")
            raise ConfigError(
                f"{words[0]}: no such file; give the path of the script, or paste the deepspeed command in it"
            )
        if depth == _MOST_NESTED:
            raise ConfigError(f"{words[0]}: scripts start one another without end; paste the deepspeed command")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as text; name a script, or give the command itself") from error
        exported = {name: value for name, value in shell.variables.items() if name in shell.exported}
        variables = {**self._environment, **exported, **prefix, **shell.fixed}
        self._scripts[words[0]] = text
        self._variables |= {name: value for name, value in variables.items() if name.startswith(PREFIX)}
        inner = Shell({**variables}, shell.fixed, words, {*variables})
        try:
            self._parse_text(text, inner, str(path.resolve().parent), depth + 1)
        except LoopError as error:
            raise ConfigError(f"{words[0]}: {error}{_describe_sweep(str(path.resolve()))}") from error


def _describe_sweep(text: str) -> str:
    """Return what replaces the loop of a sweep, by the step that a text names; empty if it names none."""
    stage = _find_stage(text)
    if not stage or ("sweep" not in text and "for " not in text):
        return ""
    return f"; for a sweep use `rlhf sweep example_scripts/sweeps/{_GRIDS[stage]}`"


def find_shell_variable(text: str) -> str:
    """Return the first shell variable in a text, as it is written; empty if there is none."""
    match = re.search(r"\$(?:\w+|\{[^}]*\}|\(\.\.\.\)|[@*#])|`", text)
    return match.group() if match else ""


def _parse_command(words: list[str], program: str, folder: str, *, is_pasted: bool) -> Command | None:
    """Return the command of DeepSpeed-Chat; None for another program in a script."""
    name = PurePosixPath(program).name
    if name in _OTHERS:
        raise ConfigError(f"{name}: {_OTHERS[name]}; see docs/deepspeed-chat.md")
    flags_given = _split_flags(words, program)
    stage = _find_stage(program, folder)
    if not is_pasted and not (name == "main.py" or stage):
        return None
    if not program and not flags_given:
        raise ConfigError(
            f"{shorten(' '.join(words))}: not a command of DeepSpeed-Chat; paste a `deepspeed main.py --...`"
        )
    if stage:
        return replace(_check_flags(stage, flags_given), defaults=_read_defaults(stage, program, folder))
    known = {step: sum(_find_flag(step, flag) is not None for flag, _ in flags_given) for step in STEPS}
    fitting = [step for step in STEPS if known[step] == len(flags_given)]
    return _check_flags(fitting[0] if fitting else max(STEPS, key=known.__getitem__), flags_given, tuple(fitting[1:]))


def _read_defaults(stage: str, program: str, folder: str) -> dict[str, Any] | None:
    """Return the defaults of the main.py that a command would run, by flag; None if it is not here.

    Versions of DeepSpeed-Chat differ in their defaults, and the user may have changed them.
    """
    tail = Path(*PurePosixPath(program).parts[-2:])
    start = Path(folder).absolute()
    places = [start / program, *(parent / tail for parent in start.parents)]
    places += [parent / "training" / tail for parent in start.parents]
    for path in places if folder or program != "main.py" else ():
        if _find_stage(str(path)) != stage or not path.is_file():
            continue
        try:
            defaults = dict(_find_defaults(ast.parse(path.read_text(encoding="utf-8"))))
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if "--data_path" in defaults:
            return defaults | _read_constants(path.parent)
    return None


def _read_constants(step: Path) -> dict[str, Any]:
    """Return the numbers that the trainer of a step's folder sets, by the name of their attribute."""
    places = (step / "ppo_trainer.py", *step.parent.parent.glob("dschat/rlhf/ppo_trainer.py"))
    path = next((path for path in places if path.is_file()), None)
    text = path.read_text(encoding="utf-8", errors="replace") if path else ""
    return {name: float(value) for name, value in re.findall(r"self\.(\w+) = (\d[\d.e-]*)\s", text)}


def _find_stage(*paths: str) -> str:
    """Return the stage that a path names, the first path's if several do; empty if none does."""
    return next((stage for path in paths for part, stage in _PROGRAMS.items() if part in path), "")


def _find_defaults(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the flags that a program adds to its parser, with their defaults."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            names = [name.value for name in call.args if isinstance(name, ast.Constant)]
            default = next((keyword.value for keyword in call.keywords if keyword.arg == "default"), None)
            value = None if default is None else ast.literal_eval(default)
            yield from ((str(name), value) for name in names)


def _split_flags(words: list[str], program: str) -> list[tuple[str, list[str]]]:
    """Return each flag with the words after it; other words before the first flag are programs."""
    is_torch = any(PurePosixPath(word).name in _TORCH_LAUNCHERS for word in words)
    place = words.index(program) if is_torch and program else 0
    flags: list[tuple[str, list[str]]] = []
    for position, word in enumerate(words):
        if word.startswith("-") and len(word) > 1 and not _VALUE.match(word):
            name, equals, value = word.partition("=")
            if position < place:
                name = _TORCH_FLAGS.get(name.replace("-", "_").replace("__", "--", 1), "")
            flags.append((name, [value] if equals else []))
        elif flags and word != program:
            flags[-1][1].append(word)
    return [(name, values) for name, values in flags if name]


def _find_flag(stage: str, name: str) -> Flag | None:
    return find_flag(stage, name) or find_flag("deepspeed", name)


def _check_flags(stage: str, flags_given: list[tuple[str, list[str]]], guess: tuple[str, ...] = ()) -> Command:
    given: dict[str, tuple[str, ...]] = {}
    written: dict[str, str] = {}
    for name, values in flags_given:
        row = _find_flag(stage, name)
        if row is None:
            raise ConfigError(_describe_unknown_flag(stage, name))
        if row.reader == "names":
            values = [value for value in values if not _is_unset(value)] or values
        else:  # an unset variable after the value is empty, as in a shell
            takes = 1 if row.reader else 0
            values = values[:takes] + [value for value in values[takes:] if not _is_unset(value)]
            if len(values) < takes:
                raise ConfigError(f"{name}: its value is missing; add it, or remove the flag")
            if surplus := " ".join(values[takes:]):
                number = "one" if takes else "no"
                raise ConfigError(f"{name} {' '.join(values)}: takes {number} value; remove {surplus}")
        given[row.name] = tuple(values)  # the last of several counts, as in DeepSpeed-Chat
        written[row.name] = " ".join([name, *values])
    return Command(stage, given, written, guess)


def _describe_unknown_flag(stage: str, name: str) -> str:
    of = [STEPS[other] for other in STEPS if find_flag(other, name)]
    if of:
        return f"{name}: a flag of {' and '.join(of)}, but this command is {STEPS[stage]}; paste each step separately"
    known = [flag for flag, row in load_flags().items() if stage in row.of or "deepspeed" in row.of]
    return f"{name}: unknown flag of DeepSpeed-Chat's {STEPS[stage]}; {suggest(name, known, 'the flags')}"


def _is_unset(word: str) -> bool:
    """Return whether a word is nothing but a variable without a value."""
    return word == UNKNOWN or find_shell_variable(word) == word
