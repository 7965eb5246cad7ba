"""Where mistakes are made, and the list that they are entered in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISTAKES: dict[str, Callable[[Bench], tuple[list[str], list[str]]]] = {}
"""Name of the mistake -> (arguments of rlhf, words of the error)."""


@dataclass(frozen=True)
class Bench:
    """Where mistakes are made: a folder of one's own, and what a finished run, its model and its data are."""

    folder: Path
    model: Path
    rows: Path
    run: Path

    @property
    def output(self) -> Path:
        return self.folder / "run"

    def copy(self, source: Path) -> Path:
        """A folder that may be changed."""
        return Path(shutil.copytree(source, self.folder / f"copy-{source.parent.name}-{source.name}"))

    def file(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def jsonl(self, *rows: Any) -> Path:
        return self.file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def settings(**keys: object) -> list[str]:
    return [part for key, value in keys.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


def mistake(function: Callable[[Bench], tuple[list[str], list[str]]]) -> Callable[..., Any]:
    MISTAKES[function.__name__] = function
    return function
