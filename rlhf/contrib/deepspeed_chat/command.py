"""A command line as it was pasted, taken apart: which program, which flags with which values, which variables.

Text flows in - one command or several, with line continuations, the launcher, redirections, assignments, or a whole
script around them - and `Command`s flow out. No value is judged here; a shell's variable without a value stays `$NAME`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from rlhf.contrib.deepspeed_chat.tables import STEPS, Flag, flag_of, flags, nearest, scripts
from rlhf.errors import ConfigError

_PROGRAMS = {
    "step1_": "sft",
    "step2_dpo": "dpo",
    "step2_": "reward",
    "step3_": "ppo",
}
"""Part of the path of a main.py, or of the folder that it is started in -> whose it is; the first that fits."""

_OTHERS = {
    "e2e_rlhf.py": "it starts the scripts of training_scripts: take a recipe of example_scripts/opt, or give the "
    "deepspeed command in one of those scripts",
    "train.py": "it starts the scripts of training_scripts: take a recipe of example_scripts/opt, or give the "
    "deepspeed command in one of those scripts",
    "chat.py": "`rlhf chat` does that, without a recipe",
    "chatbot.py": "`rlhf chat` does that, without a recipe",
    "rw_eval.py": "`rlhf evaluate` does that, without a recipe",
    "prompt_eval.py": "`rlhf compare` does that, without a recipe",
}
"""Programs that have no recipe."""

_SHELL = {"if", "then", "else", "elif", "fi", "for", "do", "done", "mkdir", "set", "exit", "echo", "export", "#"}
_REDIRECTION = re.compile(r"^(?:\d*|&)>|^<$|^\||^&$")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_VALUE = re.compile(r"^-(?!-)[\d.]")  # -1, though it begins as a flag does


@dataclass(frozen=True)
class Command:
    """One command: flags by their name today, each with the texts after it; `written` has them as they were.

    `stage` is the program's, a key of `STEPS`. `guess` are other steps that the flags fit as well, where no path said
    which. `script` is one of the fork's, which takes its flags from variables; `variables` are those of the shell.
    """

    stage: str
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    guess: tuple[str, ...] = ()
    script: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def parsed(texts: Sequence[str]) -> tuple[list[Command], dict[str, str]]:
    """(the commands of texts, the variables that were assigned in them, for all that follows).

    What a text of assignments alone gives is what the caller of a script gives it: the script's own stand below.

    Raises:
        ConfigError: something is no command of DeepSpeed-Chat, or a flag is none of the program's.
    """
    variables: dict[str, str] = {}
    given: dict[str, str] = {}
    commands: list[Command] = []
    for text in texts:
        lines, folder, here = [*_lines(text)], "", dict(variables)
        if not any(_assigned(words, here) for words in lines):
            given |= {name: value for name, value in here.items() if variables.get(name) != value}
            variables = here
            continue
        for words in lines:
            here = dict(variables)
            if not (rest := _assigned(words, here)):
                variables = here | given
            elif rest[0] == "cd":
                folder = " ".join(rest[1:])
            elif rest[0] not in _SHELL and rest[0] != "[":
                commands.append(replace(_command([*_words(rest, variables)], folder), variables=here))
    return commands, variables


def unknown_variable(text: str) -> str:
    """The first variable of a shell in a text, as it is written; empty: there is none."""
    found = re.search(r"\$(?:\w+|\{[^}]*\}|[@*#])|`", text)
    return found.group() if found else ""


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each command, without comments and redirections."""
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError as error:
            raise ConfigError(
                f"{_short(line)}: cannot be read as a shell would ({error}); correct its quotes"
            ) from error
        part: list[str] = []
        for word in [*words, ";"]:
            if word not in (";", "&&", ";;"):
                part.append(word)
                continue
            yield _before_redirection(part)
            part = []


def _before_redirection(words: list[str]) -> list[str]:
    for position, word in enumerate(words):
        if _REDIRECTION.match(word):
            return words[:position]
    return words


def _assigned(words: list[str], variables: dict[str, str]) -> list[str]:
    """The words after the assignments that a command begins with, which are remembered; `$1` is no value."""
    rest = words[1:] if words[:1] == ["export"] else words
    for position, word in enumerate(rest):
        if not (found := _ASSIGNMENT.match(word)):
            return words if rest[:position] == [] else rest[position:]
        value = _expanded(found.group(2), variables)
        if not _VARIABLE.fullmatch(value):
            variables[found.group(1)] = value
    return []


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found.group(1) or found.group(2)
        otherwise = found.group(3) if found.group(3) is not None else found.group()
        return variables.get(name) or otherwise

    return _VARIABLE.sub(value, word)


def _words(words: Iterable[str], variables: Mapping[str, str]) -> Iterator[str]:
    """Words with the values of their variables, which may be several: `ZERO="--zero_stage 2"`."""
    for word in words:
        yield from _expanded(word, variables).split() if "$" in word else [word]


def _command(words: list[str], folder: str) -> Command:
    program = next((word for word in words if word.endswith((".py", ".sh"))), "")
    name = PurePosixPath(program).name
    if name in _OTHERS:
        raise ConfigError(f"{name}: {_OTHERS[name]}; docs/deepspeed-chat.md has the rest")
    if name.endswith(".sh"):
        return _of_script(program)
    flags_given = _flags(words, program)
    if not program and not flags_given:
        raise ConfigError(f"{_short(' '.join(words))}: no command of DeepSpeed-Chat; give a `deepspeed main.py --...`")
    stage = next((stage for path in (program, folder) for part, stage in _PROGRAMS.items() if part in path), "")
    fitting = [one for one in STEPS if all(_known(one, flag) for flag, _ in flags_given)]
    if not stage and not fitting:
        stage = max(STEPS, key=lambda one: sum(_known(one, flag) is not None for flag, _ in flags_given))
    guess = tuple(fitting[1:]) if not stage else ()
    stage = stage or fitting[0]
    return _checked(stage, flags_given, guess)


def _of_script(path: str) -> Command:
    """The fork's script of this name; others are not known, for they hold a command that can be given itself."""
    name = PurePosixPath(path).name
    for script in scripts().values():
        if PurePosixPath(script.name).name == name:
            return Command(script.stage, script=script.name)
    raise ConfigError(
        f"{path}: no file here, and no script that is known by its name; give a file that is there, or the deepspeed "
        "command that stands in it"
    )


def _flags(words: list[str], program: str) -> list[tuple[str, list[str]]]:
    """Each flag with the words after it; before the first flag there are programs."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        begins = word.startswith("-") and len(word) > 1 and not _VALUE.match(word)
        if begins:
            name, equals, value = word.partition("=")
            found.append((name, [value] if equals else []))
        elif found and word != program:
            found[-1][1].append(word)
    return found


def _known(stage: str, name: str) -> Flag | None:
    return flag_of(stage, name) or flag_of("deepspeed", name)


def _checked(stage: str, flags_given: list[tuple[str, list[str]]], guess: tuple[str, ...]) -> Command:
    given: dict[str, tuple[str, ...]] = {}
    written: dict[str, str] = {}
    for name, values in flags_given:
        row = _known(stage, name)
        if row is None:
            raise ConfigError(_unknown(stage, name))
        if row.reader != "names":  # after its value a variable without one is nothing, as for a shell
            takes = 1 if row.reader else 0
            values = values[:takes] + [value for value in values[takes:] if not _VARIABLE.fullmatch(value)]
        if row.reader and not values and row.reader != "names":
            raise ConfigError(f"{name}: its value is missing; give it, or leave the flag out")
        if not row.reader and values:
            raise ConfigError(f"{name} {values[0]}: takes no value; leave {values[0]} out")
        if len(values) > 1 and row.reader != "names":
            raise ConfigError(f"{name} {' '.join(values)}: takes one value; leave {' '.join(values[1:])} out")
        given[row.name] = tuple(values)  # of a flag given twice, the last counts, as there
        written[row.name] = " ".join([name, *values])
    return Command(stage, given, written, guess)


def _unknown(stage: str, name: str) -> str:
    of = [STEPS[other] for other in STEPS if flag_of(other, name)]
    if of:
        return (
            f"{name}: a flag of {' and '.join(of)}, and the others here are of {STEPS[stage]}; give each step by itself"
        )
    known = [flag for flag, row in flags().items() if stage in row.of or "deepspeed" in row.of]
    return f"{name}: no flag of DeepSpeed-Chat's {STEPS[stage]}; {nearest(name, known, 'them')}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
