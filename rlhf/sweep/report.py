"""The result of a sweep: one row a point, as a table, `sweep.json`, `sweep.csv` and plots.

What the runs left (`stage.json`) and how the other points ended flow in; numbers are those of the runs, none is made
here but sums of seconds and the most of peaks.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.config import Stage
from rlhf.files import atomic_write, atomic_write_json
from rlhf.metrics.progress import format_seconds
from rlhf.metrics.summary import format_bytes, shown_value
from rlhf.sweep.folder import Ending, Status, SweepDirectory
from rlhf.sweep.grid import Grid, Point

HEADLINES: dict[Stage, tuple[str, ...]] = {
    "sft": ("perplexity",),
    "reward": ("accuracy",),
    "dpo": ("accuracy",),
    "ppo": ("reward", "kl", "approved_share"),
}
"""Of each stage, the held-out numbers after training that the table and the plots show, where there are any."""


@dataclass(frozen=True)
class Row:
    """A point in the result. `stages` are the summaries of those that are complete."""

    name: str
    labels: dict[str, str]
    keys: dict[str, Any]
    status: Status
    reason: str
    stages: dict[Stage, dict[str, Any]]
    lost_peak: int | None = None

    @property
    def seconds(self) -> float | None:
        """Of all complete stages together."""
        return sum(stage["seconds"] for stage in self.stages.values()) if self.stages else None

    @property
    def peak_memory(self) -> int | None:
        """The most of any stage, or what was in use where a point ran out of memory; bytes."""
        peaks = [stage["peak_memory"] for stage in self.stages.values()]
        return max([*peaks, *filter(None, [self.lost_peak])], default=None)

    def value(self, column: str) -> float | None:
        """The number in a column: `seconds`, `peak_memory`, or a stage and its measure."""
        if column in ("seconds", "peak_memory"):
            found: float | None = getattr(self, column)
            return found
        stage, _, measure = column.partition(" ")
        return self.stages.get(stage, {}).get("after", {}).get(measure)  # type: ignore[call-overload]


def rows(grid: Grid, folder: SweepDirectory, endings: Mapping[str, Ending]) -> list[Row]:
    """Every point of the grid, those that are left out last."""
    found = [_row(point, folder, endings.get(point.name)) for point in grid.points]
    return found + [Row(name, {}, {}, "excluded", reason, {}) for name, reason in grid.excluded.items()]


def _row(point: Point, folder: SweepDirectory, ending: Ending | None) -> Row:
    run = folder.run(point.name)
    stages = {stage: run.stage(stage).summary() for stage in point.stages if run.stage(stage).done}
    if folder.is_complete(point):
        ending = Ending("complete", "")
    elif ending is None and folder.is_begun(point):
        ending = Ending("not complete", run.saved_state() or "begun; nothing is saved yet")
    ending = ending or Ending("waiting", "")
    return Row(point.name, point.labels, point.keys, ending.status, ending.reason, stages, ending.peak_memory)


def columns(grid: Grid, found: Sequence[Row]) -> list[str]:
    """Those with numbers: the headlines of the stages, seconds, and peak memory."""
    wanted = [f"{stage} {measure}" for stage in grid.stages for measure in HEADLINES[stage]]
    extra = [column for column in wanted if column.endswith("approved_share")]
    known = [column for column in wanted if column not in extra or any(row.value(column) is not None for row in found)]
    return [*known, "seconds", "peak_memory"]


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
        header = ["point", "status", *(column.replace("_", " ") for column in named)]
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
    from rlhf.sweep import plots

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
    return format_bytes(value) if column == "peak_memory" else shown_value(column, value)


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)
