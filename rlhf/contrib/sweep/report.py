"""The result of a sweep, written: a table, `sweep.json`, `sweep.csv` and plots."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rlhf.contrib.sweep import plots
from rlhf.contrib.sweep.folder import SweepDirectory
from rlhf.contrib.sweep.grid import Grid
from rlhf.contrib.sweep.rows import Row, columns
from rlhf.reporting.summary import format_value
from rlhf.utils.atomic_io import atomic_write, atomic_write_json
from rlhf.utils.units import format_bytes, format_seconds


def document(grid: Grid, found: Sequence[Row]) -> dict[str, Any]:
    """What `sweep.json` holds."""
    return {
        "grid": str(grid.file),
        "stages": list(grid.stages),
        "shared": list(grid.shared.stages) if grid.shared else [],
        "ranks": grid.ranks,
        "axes": list(grid.axes),
        "points": [
            {
                "name": row.name,
                "status": row.status,
                "reason": row.reason,
                "labels": row.labels,
                "keys": row.keys,
                "seconds": row.seconds,
                "peak_memory": row.peak_memory,
                "stages": {
                    stage: {key: summary.get(key) for key in ("before", "after", "steps", "seconds", "peak_memory")}
                    for stage, summary in row.stages.items()
                },
            }
            for row in found
        ],
    }


def cells(grid: Grid, found: Sequence[Row], *, people: bool) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table: for people rounded, with units; else every digit, and the reasons."""
    named = columns(grid, found)
    if people:
        header = ["point", "status", *("\n".join(column.replace("_", " ").split()) for column in named)]
        return header, [
            [row.name, row.status, *(_shown(column, row.value(column)) for column in named)] for row in found
        ]
    header = ["point", "status", *named, "reason"]
    return header, [
        [row.name, row.status, *(_exact(row.value(column)) for column in named), row.reason] for row in found
    ]


def in_words(grid: Grid, row: Row) -> str:
    """A point in one line: how it ended, and its numbers."""
    named = [(column, row.value(column)) for column in columns(grid, [row])]
    numbers = [f"{column.replace('_', ' ')} {_shown(column, value)}" for column, value in named if value is not None]
    return ": ".join(filter(None, [row.status, row.reason or ", ".join(numbers)]))


def record(grid: Grid, folder: SweepDirectory, found: Sequence[Row]) -> None:
    """Renew `sweep.json`, which holds how points ended."""
    atomic_write_json(folder.description, document(grid, found))


def write(grid: Grid, folder: SweepDirectory, found: Sequence[Row]) -> None:
    """Renew `sweep.json`, `sweep.csv` and the plots, each whole.

    Raises:
        OSError: the folder cannot be written to.
    """
    record(grid, folder, found)
    header, lines = cells(grid, found, people=False)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*header[:1], *grid.axes, *header[1:]])
    for row, line in zip(found, lines):
        writer.writerow([*line[:1], *(row.labels.get(axis, "") for axis in grid.axes), *line[1:]])
    atomic_write(folder.table, text.getvalue())
    plots.write(grid, folder, found, columns(grid, found))


def _shown(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column == "seconds":
        return format_seconds(value)
    return format_bytes(value) if column == "peak_memory" else format_value(column, value)


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)
