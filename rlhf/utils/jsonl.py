"""Read files of records, one JSON object a line, to which a process may be writing, or was when it was killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_TEXTS = {"stage", "tag", "text", "rule", "state", "remedy", "prompt", "completion"}
_SAMPLE = {"prompt", "score", "kl", "tokens", "pieces", "by_token"}
_MAX_STEP = 2**53


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records; lines that a crash cut short, or that are no record, are left out. No file has no records.

    A record has a `step`. Its other values are texts and finite numbers, or None for a number that was not finite; but
    `rows` is a list of such objects, in which `rewards` are numbers, and `sample` is one in which `pieces` are texts
    and `by_token` has numbers in lists.
    """
    try:
        lines = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with lines:
        for line in lines:
            record = None
            with suppress(ValueError, RecursionError):
                value = json.loads(line)
                if b"\\u" in line:  # an unpaired surrogate raises ValueError here: no text file can hold it
                    json.dumps(value, ensure_ascii=False).encode()
                record = value
            if isinstance(record, dict) and _is_step(record.get("step")) and _has_types(record):
                yield record


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_STEP


def _has_types(record: dict[str, Any]) -> bool:
    return all(_has_type(name, value) for name, value in record.items())


def _has_type(name: str, value: Any) -> bool:
    """Return whether `value` is what records have under this name."""
    if name in _TEXTS:
        return isinstance(value, str)
    if name == "rows":
        return isinstance(value, list) and all(isinstance(row, dict) and _has_types(row) for row in value)
    if name == "sample":
        return isinstance(value, dict) and value.keys() >= _SAMPLE and _has_types(value)
    if name == "pieces":
        return isinstance(value, list) and all(isinstance(piece, str) for piece in value)
    if name == "by_token":
        return isinstance(value, dict) and all(map(_is_list_of_numbers, value.values()))
    return _is_list_of_numbers(value) if name == "rewards" else _is_number(value)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
