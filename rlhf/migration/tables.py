"""The two tables, read: what each flag and each variable is here. Pure data; nothing is translated yet."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Variable:
    """A variable of the fork's scripts; see the head of variables.yaml for the fields."""

    name: str
    flags: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    reader: str = "text"
    beside: Mapping[str, Any] = field(default_factory=dict)
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
def variables() -> dict[str, Variable]:
    """By name."""
    return {name: Variable(name, **_renamed(row)) for name, row in _read("variables.yaml")["variables"].items()}


@functools.cache
def scripts() -> dict[str, Script]:
    """By path below the fork's `example_scripts`."""
    return {name: Script(name, **row) for name, row in _read("variables.yaml")["scripts"].items()}


def nearest(name: str, known: Iterable[str], what: str) -> str:
    """The end of an error about an unknown name: the one that was probably meant, or where they all are."""
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {close[0]}?" if close else f"rlhf/migration/README.md lists {what}"


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    return {"reader" if name == "as" else name: value for name, value in row.items()}


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((HERE / name).read_text(encoding="utf-8"))
    return found
