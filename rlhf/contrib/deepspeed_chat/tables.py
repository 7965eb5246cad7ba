"""Read the tables of flags and variables, and the values that users give to them."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.config.loader import parse_yaml
from rlhf.data.formats import find_known_dataset

STEPS: Mapping[str, str] = {"sft": "step 1", "reward": "step 2", "dpo": "step 2 (DPO)", "ppo": "step 3"}
"""DeepSpeed-Chat's names of the stages."""


@dataclass(frozen=True)
class Flag:
    """A flag of DeepSpeed-Chat; the head of flags.yaml explains the fields. `reader` is empty for a switch."""

    name: str
    of: Mapping[str, Any]
    reader: str = ""
    keys: Any = ()
    value: Any = True
    rule: str = ""
    option: str = ""
    command: str = ""
    automatic: str = ""
    nothing: str = ""
    was: Sequence[str] = ()
    since: str = ""
    until: str = ""
    fork: bool = False
    note: str = ""

    def keys_of(self, program: str) -> list[str]:
        """Return the keys that the flag sets in a command of `program`."""
        keys = self.keys.get(program, ()) if isinstance(self.keys, Mapping) else self.keys
        return [key.format(stage=program) for key in keys] if program in STEPS else []


@dataclass(frozen=True)
class Implied:
    """A setting that DeepSpeed-Chat always uses in `stages`; `constant` is its attribute in ppo_trainer.py, if any."""

    stages: Sequence[str]
    key: str
    value: Any
    why: str
    constant: str = ""


@dataclass(frozen=True)
class Variable:
    """A variable of the fork's scripts; the head of variables.yaml explains the fields."""

    name: str
    flags: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    reader: str = "text"
    earlier: Mapping[str, str] = field(default_factory=dict)
    option: str = ""
    automatic: str = ""
    nothing: str = ""
    note: str = ""


@functools.cache
def load_flags() -> dict[str, Flag]:
    """Return the flags, by name."""
    return {name: Flag(name, **row) for name, row in _read_table("flags.yaml")["flags"].items()}


@functools.cache
def load_implied() -> tuple[Implied, ...]:
    """Return the implied settings, in the order in which stages run."""
    return tuple(Implied(**row) for row in _read_table("flags.yaml")["implied"])


@functools.cache
def find_flag(program: str, name: str) -> Flag | None:
    """Return the flag of a program by its current or an earlier name; None if the program has no such flag."""
    for row in load_flags().values():
        if program in row.of and (row.name == name or name in row.was):
            return row
    return None


@functools.cache
def load_variables() -> dict[str, Variable]:
    """Return the variables, by name; a variable without other fields sets the keys of its flags."""
    variables = {}
    for name, row in _read_table("variables.yaml")["variables"].items():
        if not {"keys", "option", "automatic", "nothing"} & set(row):
            row["keys"] = {stage: load_flags()[flag].keys_of(stage) for stage, flag in row["flags"].items()}
        variables[name] = Variable(name, **row)
    return variables


def suggest(name: str, known: Iterable[str], what: str) -> str:
    """Return the remedy for an unknown name: the closest known name, or the page that lists all."""
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {close[0]}?" if close else f"docs/deepspeed-chat.md lists {what}"


def _read_table(name: str) -> Any:
    return parse_yaml(Path(__file__).with_name(name).read_text(encoding="utf-8"))


NOTHING = object()
"""Stands for a value with the same meaning as an unset flag or variable."""

SCHEDULES = {
    "linear": "linear",
    "polynomial": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
"""Schedules of rlhf by DeepSpeed-Chat's names; its polynomial has degree 1, and its restarts restart only once."""


def _read_whole(value: str) -> int:
    if not value.strip().isdecimal():
        raise ValueError("a whole number")
    return int(value)


def _read_number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("a number")
    return number


def _read_half(value: str) -> int:
    if _read_whole(value) < 2:
        raise ValueError("a whole number of at least 2")
    return _read_whole(value) // 2


def _read_choice(choices: Iterable[str], expected: str, value: str) -> str:
    if value not in choices:
        raise ValueError(expected)
    return value


def _read_switch(value: str) -> bool:
    return _read_choice(("0", "1"), "0 or 1", value) == "1"


def read_source(name: str) -> Any:
    """Return the source with a name in `--data_path`, with the split that DeepSpeed-Chat evaluates on."""
    if "local/jsonfile" in name:
        return {"path": "data/train.json", "heldout": "data/eval.json"}
    known = find_known_dataset(name)
    return {"path": name, "heldout_split": known.heldout_split} if known and known.heldout_split else name


def _read_sources(value: str) -> list[Any]:
    return [read_source(name) for name in value.split()]


def _read_shares(value: str) -> list[float]:
    parts = value.split(",")
    if len(parts) != 3:
        raise ValueError("three shares, for example 2,4,4")
    return [int(part) if part.isdecimal() else _read_number(part) for part in parts]


READERS: Mapping[str, Callable[[str], Any]] = {
    "text": str,
    "whole": _read_whole,
    "positive": lambda value: _read_whole(value) or NOTHING,  # 0 steps: no limit
    "several": lambda value: NOTHING if _read_whole(value) == 1 else _read_whole(value),  # 1 machine is the default
    "number": _read_number,
    "half": _read_half,  # of the tokens: for the prompt, or for the completion
    "switch": _read_switch,
    "capture": lambda value: NOTHING if _read_switch(value) else "none",  # recorded rollouts are on by default
    "only_adapters": lambda value: [] if _read_switch(value) else ["norms", "biases", "embeddings"],
    "names": str.split,
    "sources": _read_sources,
    "schedule": functools.partial(_read_choice, SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
    "precision": functools.partial(_read_choice, ("fp16", "bf16"), "fp16 or bf16"),
    "shares": _read_shares,  # of the three steps
}
"""The functions that read a value, by the name in `reader:` of the tables; a ValueError says what they expect."""
