"""Parse pasted command lines of DeepSpeed-Chat into `Command`s: the program, its flags, and shell variables.

The text may hold several commands, line continuations, the launcher, redirections, assignments, or a whole script.
Values are not checked here; a shell variable without a value stays `$NAME`. The fork's example scripts are expanded
into the command that they would start.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from rlhf.contrib.deepspeed_chat.tables import (
    STEPS,
    Flag,
    Script,
    find_flag,
    load_flags,
    load_scripts,
    load_variables,
    suggest,
)
from rlhf.contrib.deepspeed_chat.variables import output_folder, read_variables
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

_SHELL = {"if", "then", "else", "elif", "fi", "for", "do", "done", "mkdir", "set", "exit", "echo", "export", "#"}
_REDIRECTION = re.compile(r"^(?:\d*|&)>|^<$|^\||^&$")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_VALUE = re.compile(r"^-(?!-)[\d.]")  # a negative number, not a flag


@dataclass(frozen=True)
class Command:
    """One command of DeepSpeed-Chat.

    Attributes:
        stage: the program's stage, a key of `STEPS`.
        given: the texts after each flag, by the flag's current name.
        written: each flag as it was written, by its current name.
        guess: other stages that accept the same flags, if no path names the stage.
        script: the fork's script that builds the flags from variables; empty for other commands.
        variables: the shell's variables.
    """

    stage: str
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    guess: tuple[str, ...] = ()
    script: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def parse_commands(texts: Sequence[str]) -> tuple[list[Command], dict[str, str]]:
    """Return (the commands in the texts, the variables assigned in them).

    A text of assignments alone sets variables for all texts after it, and overrides a script's own assignments, like
    variables that a script's caller sets.

    Raises:
        ConfigError: a text is not a command of DeepSpeed-Chat, or a flag does not belong to the program.
    """
    variables: dict[str, str] = {}
    given: dict[str, str] = {}
    commands: list[Command] = []
    for text in texts:
        lines, folder, assigned = [*_lines(text)], "", dict(variables)
        if not any(_store_assignments(words, assigned) for words in lines):
            given |= {name: value for name, value in assigned.items() if variables.get(name) != value}
            variables = assigned
            continue
        for words in lines:
            assigned = dict(variables)
            if not (rest := _store_assignments(words, assigned)):
                variables = assigned | given
            elif rest[0] == "cd":
                folder = " ".join(rest[1:])
            elif rest[0] not in _SHELL and rest[0] != "[":
                commands.append(replace(_parse_command([*_expand_words(rest, variables)], folder), variables=assigned))
    return commands, variables


def find_shell_variable(text: str) -> str:
    """Return the first shell variable in a text, as it is written; empty if there is none."""
    match = re.search(r"\$(?:\w+|\{[^}]*\}|[@*#])|`", text)
    return match.group() if match else ""


def _lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without comments and redirections."""
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError as error:
            raise ConfigError(f"{_short(line)}: not a valid shell command ({error}); correct its quotes") from error
        part: list[str] = []
        for word in [*words, ";"]:
            if word not in (";", "&&", ";;"):
                part.append(word)
                continue
            yield [*itertools.takewhile(lambda word: not _REDIRECTION.match(word), part)]
            part = []


def _store_assignments(words: list[str], variables: dict[str, str]) -> list[str]:
    """Store the assignments at the start of a command, and return the words after them; `$1` is not stored."""
    rest = words[1:] if words[:1] == ["export"] else words
    for position, word in enumerate(rest):
        if not (match := _ASSIGNMENT.match(word)):
            return rest[position:] if position else words
        value = _expand(match.group(2), variables)
        if not _VARIABLE.fullmatch(value):
            variables[match.group(1)] = value
    return []


def _expand(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        default = match.group() if match.group(3) is None else match.group(3)
        return variables.get(match.group(1) or match.group(2)) or default

    return _VARIABLE.sub(value, word)


def _expand_words(words: Iterable[str], variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the words with variables expanded, each to one word or several: `ZERO="--zero_stage 2"`."""
    for word in words:
        yield from _expand(word, variables).split() if "$" in word else [word]


def _parse_command(words: list[str], folder: str) -> Command:
    program = next((word for word in words if word.endswith((".py", ".sh"))), "")
    name = PurePosixPath(program).name
    if name in _OTHERS:
        raise ConfigError(f"{name}: {_OTHERS[name]}; see docs/deepspeed-chat.md")
    if name.endswith(".sh"):
        return _find_script(program)
    flags_given = _split_flags(words, program)
    if not program and not flags_given:
        raise ConfigError(
            f"{_short(' '.join(words))}: not a command of DeepSpeed-Chat; paste a `deepspeed main.py --...`"
        )
    stage = next((stage for path in (program, folder) for part, stage in _PROGRAMS.items() if part in path), "")
    if stage:
        return _check_flags(stage, flags_given)
    known = {step: sum(_find_flag(step, flag) is not None for flag, _ in flags_given) for step in STEPS}
    fitting = [step for step in STEPS if known[step] == len(flags_given)]
    return _check_flags(fitting[0] if fitting else max(STEPS, key=known.__getitem__), flags_given, tuple(fitting[1:]))


def _find_script(path: str) -> Command:
    """Return the command of one of the fork's scripts, by its name."""
    name = PurePosixPath(path).name
    for script in load_scripts().values():
        if PurePosixPath(script.name).name == name:
            return Command(script.stage, script=script.name)
    raise ConfigError(
        f"{path}: neither a file nor a known script; give the path of the script, or paste the deepspeed command in it"
    )


def _split_flags(words: list[str], program: str) -> list[tuple[str, list[str]]]:
    """Return each flag with the words after it; words before the first flag are programs."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("-") and len(word) > 1 and not _VALUE.match(word):
            name, equals, value = word.partition("=")
            flags.append((name, [value] if equals else []))
        elif flags and word != program:
            flags[-1][1].append(word)
    return flags


def _find_flag(stage: str, name: str) -> Flag | None:
    return find_flag(stage, name) or find_flag("deepspeed", name)


def _check_flags(stage: str, flags_given: list[tuple[str, list[str]]], guess: tuple[str, ...] = ()) -> Command:
    given: dict[str, tuple[str, ...]] = {}
    written: dict[str, str] = {}
    for name, values in flags_given:
        row = _find_flag(stage, name)
        if row is None:
            raise ConfigError(_describe_unknown_flag(stage, name))
        if row.reader != "names":  # an unset variable after the value is empty, as in a shell
            takes = 1 if row.reader else 0
            values = values[:takes] + [value for value in values[takes:] if not _VARIABLE.fullmatch(value)]
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


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


_BY_HAND = {"HL_GBS", "HL_MBS", "HL_RUN_STEPS", "HL_PRINT_ANSWERS_INTERVAL", "HL_ONLY_OPTIMIZE_LORA", "HL_LORA_DIM"}
_BY_HAND |= {"HL_LORA_LEARNING_RATE", "HL_LORA_ACTOR_LR", "HL_LORA_CRITIC_LR", "HL_CHECKPOINT_PATH"}
"""Variables from which the scripts build several flags, or one only together with another."""


def expand_script(command: Command, environment: Mapping[str, str], others: Sequence[Command] = ()) -> Command:
    """Return the command that one of the fork's scripts starts.

    Args:
        command: the command that names the script.
        environment: the variables of the caller.
        others: the other commands of the same recipe; their scripts may read variables that this one does not, and
            train the models that this one starts from.

    Raises:
        ConfigError: a variable is unknown or invalid, is read by no script, or is unset and has no default.
    """
    script = load_scripts()[command.script]
    environment = {**environment, **command.variables}
    values = {name: environment[name].strip() for name in read_variables(environment)}
    scripts = [load_scripts()[other.script] for other in (command, *others) if other.script]
    known = {name for other in scripts for name in other.defaults}
    if unread := [name for name in values if name not in known]:
        raise ConfigError(f"{unread[0]}: not read by {script.name}; unset it")
    values = {name: value for name, value in values.items() if name in script.defaults}
    stages = {other.stage for other in others}
    trained = {
        f"{name}{suffix}"
        for name, stage in (("HL_ACTOR_MODEL", "sft"), ("HL_CRITIC_MODEL", "reward"))
        for suffix in ("", "_PATH")
        if stage in stages
    }
    texts: dict[str, tuple[str, ...]] = {}
    written: dict[str, str] = {}
    for flag, value, why in _script_flags(script, values, trained):
        texts[flag] = tuple(shlex.split(value)) if flag == "--data_path" else (value,) if value else ()
        written[flag] = " ".join(filter(None, [flag, value])) + f" ({why})"
    return Command(script.stage, texts, written, script=script.name)


def _script_flags(script: Script, given: Mapping[str, str], trained: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (flag, value, source of the value); `trained` models of an earlier step need no value."""
    values = {name: str(value) for name, value in script.defaults.items() if value is not None}
    values |= given
    is_ppo = script.stage == "ppo"

    def take(flag: str, name: str, value: str | None = None) -> tuple[str, str, str]:
        return flag, values[name] if value is None else value, name if name in given else f"{name}'s default"

    fixed = script.fixed.split()
    for word, after in zip(fixed, [*fixed[1:], "--"]):
        if word.startswith("--"):
            yield word, "" if after.startswith("--") else after, "set by the script"
    for name in script.defaults:
        row = load_variables()[name]
        flag = row.flags.get(script.stage)
        if not flag or name in _BY_HAND:
            continue
        if name not in values:
            if row.keys and name not in trained:
                raise ConfigError(f"{name}: unset, and {script.name} has no default for it; set it")
        elif row.reader not in ("switch", "capture"):
            yield take(flag, name)
        elif values[name] == "1":
            yield take(flag, name, "")
    yield take("--num_nodes", "HL_NUM_NODES")
    yield take("--num_gpus", "HL_DEVICES_PER_NODE")

    size, micro = int(values["HL_GBS"]), int(values["HL_MBS"])
    devices = int(values["HL_NUM_NODES"]) * int(values["HL_DEVICES_PER_NODE"])
    if not micro or not devices or size % (micro * devices) or not size:
        raise ConfigError(
            f"HL_GBS: {size} is not a multiple of HL_MBS {micro} x {devices} devices; change one of them (the script "
            "would round)"
        )
    for part in ("generation", "training") if is_ppo else ("train",):
        yield take(f"--per_device_{part}_batch_size", "HL_MBS")
    yield take("--gradient_accumulation_steps", "HL_GBS", str(size // devices // micro))

    rates = {"actor_": "HL_LORA_ACTOR_LR", "critic_": "HL_LORA_CRITIC_LR"} if is_ppo else {"": "HL_LORA_LEARNING_RATE"}
    if int(values["HL_LORA_DIM"]):
        for prefix, rate in rates.items():
            yield take(f"--{prefix}lora_dim", "HL_LORA_DIM")
            yield take(f"--{prefix}lora_learning_rate", rate)
            yield f"--{prefix}lora_module_name", script.lora_scope, "set by the script"
        if script.only_adapters:
            yield "--only_optimize_lora", "", "set by the script"
        elif values.get("HL_ONLY_OPTIMIZE_LORA") == "1":
            yield take("--only_optimize_lora", "HL_ONLY_OPTIMIZE_LORA", "")

    if output := output_folder(given):
        names = "HL_CHECKPOINT_PATH" if "HL_CHECKPOINT_PATH" in given else "HL_BASE_OUT_PATH, HL_TAG"
        yield "--output_dir", output, names
    for name, switch, flag in (
        ("HL_RUN_STEPS", "--enable_test_mode", "--test_stop_step"),
        ("HL_PRINT_ANSWERS_INTERVAL", "--print_answers", "--print_answers_interval"),
    ):
        if int(values.get(name, 0)):
            yield take(switch, name, "")
            yield take(flag, name)
