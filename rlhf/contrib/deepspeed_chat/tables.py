"""Read the tables of flags and variables, and the values that users give to them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.config.loader import parse_yaml

HERE = Path(__file__).parent


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
    fork: bool = False
    note: str = ""

    def keys_of(self, program: str) -> list[str]:
        """Return the keys that the flag sets in a command of `program`."""
        found = self.keys.get(program, ()) if isinstance(self.keys, Mapping) else self.keys
        return [key.format(stage=program) for key in found] if program in STEPS else []


@dataclass(frozen=True)
class Implied:
    """A setting that DeepSpeed-Chat always uses in `stages`, and that differs from the default of rlhf."""

    stages: Sequence[str]
    key: str
    value: Any
    why: str


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


@dataclass(frozen=True)
class Script:
    """One of the fork's scripts: the flags that it always sets, and its defaults for unset variables."""

    name: str
    stage: str
    fixed: str
    defaults: Mapping[str, Any]
    lora_scope: str
    only_adapters: bool = False


@functools.cache
def load_flags() -> dict[str, Flag]:
    """Return the flags, by name."""
    return {name: Flag(name, **_rename_reader(row)) for name, row in _read_table("flags.yaml")["flags"].items()}


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
    """Return the variables, by name."""
    return {
        name: _build_variable(name, _rename_reader(row))
        for name, row in _read_table("variables.yaml")["variables"].items()
    }


@functools.cache
def load_scripts() -> dict[str, Script]:
    """Return the fork's scripts, by path below its `example_scripts`."""
    return {name: Script(name, **row) for name, row in _read_table("variables.yaml")["scripts"].items()}


def suggest(name: str, known: Iterable[str], what: str) -> str:
    """Return the remedy for an unknown name: the closest known name, or the page that lists all."""
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {close[0]}?" if close else f"docs/deepspeed-chat.md lists {what}"


def _build_variable(name: str, row: dict[str, Any]) -> Variable:
    """Build a variable; without other fields it sets the keys of its flags."""
    if not {"keys", "option", "automatic", "nothing"} & set(row):
        row = row | {"keys": {stage: load_flags()[flag].keys_of(stage) for stage, flag in row["flags"].items()}}
    return Variable(name, **row)


def _rename_reader(row: dict[str, Any]) -> dict[str, Any]:
    return {"reader" if name == "as" else name: value for name, value in row.items()}


def _read_table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = parse_yaml((HERE / name).read_text(encoding="utf-8"))
    return table


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


def read_text(value: str) -> str:
    """Return the text unchanged."""
    return value


def read_whole(value: str) -> int:
    """Return a whole number, 0 or more."""
    if not value.strip().isdecimal():
        raise ValueError("a whole number")
    return int(value)


def read_positive(value: str) -> Any:
    """Return a number of steps; 0 means no limit."""
    return read_whole(value) or NOTHING


def read_several(value: str) -> Any:
    """Return a number of machines; 1 is the default."""
    return NOTHING if read_whole(value) == 1 else read_whole(value)


def read_number(value: str) -> float:
    """Return a finite number."""
    try:
        found = float(value)
    except ValueError:
        found = float("nan")
    if not abs(found) < float("inf"):
        raise ValueError("a number")
    return found


def read_half(value: str) -> int:
    """Return half of the tokens: those of a prompt, or of a completion."""
    if read_whole(value) < 2:
        raise ValueError("a whole number of at least 2")
    return read_whole(value) // 2


def read_switch(value: str) -> bool:
    """Return 0 or 1 as false or true."""
    if value not in ("0", "1"):
        raise ValueError("0 or 1")
    return value == "1"


def read_capture(value: str) -> Any:
    """Return `none` for 0, which turns off recorded rollouts; they are on by default."""
    return NOTHING if read_switch(value) else "none"


def read_only_adapters(value: str) -> list[str]:
    """Return what is trained in addition to the adapters; nothing for 1."""
    return [] if read_switch(value) else ["norms", "biases", "embeddings"]


def read_names(value: str) -> list[str]:
    """Return names that are separated by spaces."""
    return value.split()


def read_sources(value: str) -> list[Any]:
    """Return sources of rows; of several, all rows are used, while rlhf would blend equal parts."""
    found = value.split()
    return found if len(found) < 2 else [{"path": name, "weight": "all"} for name in found]


def read_schedule(value: str) -> str:
    """Return the name of a schedule of DeepSpeed-Chat, a key of `SCHEDULES`."""
    if value not in SCHEDULES:
        raise ValueError(f"one of {', '.join(SCHEDULES)}")
    return value


def read_precision(value: str) -> str:
    """Return the number format of computations."""
    if value not in ("fp16", "bf16"):
        raise ValueError("fp16 or bf16")
    return value


def read_shares(value: str) -> list[float]:
    """Return the proportions of the three steps, which are separated by commas."""
    parts = value.split(",")
    if len(parts) != 3:
        raise ValueError("three shares, for example 2,4,4")
    return [int(part) if part.isdecimal() else read_number(part) for part in parts]


READERS: Mapping[str, Callable[[str], Any]] = {
    function.__name__.removeprefix("read_"): function
    for function in (
        read_text,
        read_whole,
        read_positive,
        read_several,
        read_number,
        read_half,
        read_switch,
        read_capture,
        read_only_adapters,
        read_names,
        read_sources,
        read_schedule,
        read_precision,
        read_shares,
    )
}
"""The functions that read a value, by the name in `as:` of the tables."""
