"""Read files of records, one JSON object a line, to which a process may be writing, or was when it was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records; lines that a crash cut short, or that are no record, are left out. No file has no records."""
    try:
        lines = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with lines:
        for line in lines:
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record
