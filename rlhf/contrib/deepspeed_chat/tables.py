"""The two tables, read: what each flag and each variable is here. Pure data; nothing is translated yet."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.config.loader import parse_yaml

HERE = Path(__file__).parent


STEPS: Mapping[str, str] = {"sft": "step 1", "reward": "step 2", "dpo": "step 2 (DPO)", "ppo": "step 3"}
"""A stage here -> DeepSpeed-Chat's name of it."""


@dataclass(frozen=True)
class Flag:
    """A flag of DeepSpeed-Chat; see the head of flags.yaml for the fields. `reader` is empty for a switch."""

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
    fork: bool = False
    note: str = ""

    def keys_of(self, program: str) -> list[str]:
        """The keys that it sets as a flag of `program`."""
        found = self.keys.get(program, ()) if isinstance(self.keys, Mapping) else self.keys
        return [key.format(stage=program) for key in found] if program in STEPS else []


@dataclass(frozen=True)
class Implied:
    """What DeepSpeed-Chat does in `stages` without a flag, and rlhf does otherwise unless told."""

    stages: Sequence[str]
    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Variable:
    """A variable of the fork's scripts; see the head of variables.yaml for the fields."""

    name: str
    flags: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    reader: str = "text"
    earlier: Mapping[str, str] = field(default_factory=dict)
    option: str = ""
    automatic: str = ""
    nothing: str = ""
    note: str = ""


@dataclass(frozen=True)
class Script:
    """One of the fork's scripts: the flags that it always gives, and what it takes where a variable is not set."""

    name: str
    stage: str
    fixed: str
    defaults: Mapping[str, Any]
    lora_scope: str
    only_adapters: bool = False


@functools.cache
def flags() -> dict[str, Flag]:
    """By name."""
    return {name: Flag(name, **_renamed(row)) for name, row in _read("flags.yaml")["flags"].items()}


@functools.cache
def implied() -> tuple[Implied, ...]:
    """In the order in which stages run."""
    return tuple(Implied(**row) for row in _read("flags.yaml")["implied"])


@functools.cache
def flag_of(program: str, name: str) -> Flag | None:
    """The flag that `name` is, today or earlier, of a program; None: it has none such."""
    for row in flags().values():
        if program in row.of and (row.name == name or name in row.was):
            return row
    return None


@functools.cache
def variables() -> dict[str, Variable]:
    """By name."""
    return {name: _variable(name, _renamed(row)) for name, row in _read("variables.yaml")["variables"].items()}


@functools.cache
def scripts() -> dict[str, Script]:
    """By path below the fork's `example_scripts`."""
    return {name: Script(name, **row) for name, row in _read("variables.yaml")["scripts"].items()}


def nearest(name: str, known: Iterable[str], what: str) -> str:
    """The end of an error about an unknown name: the one that was probably meant, or where they all are."""
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {close[0]}?" if close else f"docs/deepspeed-chat.md lists {what}"


def _variable(name: str, row: dict[str, Any]) -> Variable:
    """One that says nothing else has the keys of its flags."""
    if not {"keys", "option", "automatic", "nothing"} & set(row):
        row = row | {"keys": {stage: flags()[flag].keys_of(stage) for stage, flag in row["flags"].items()}}
    return Variable(name, **row)


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    return {"reader" if name == "as" else name: value for name, value in row.items()}


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = parse_yaml((HERE / name).read_text(encoding="utf-8"))
    return found
