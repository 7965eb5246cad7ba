"""The points of a sweep as rows: how each stands, and its numbers, which are those that its run left in `stage.json`.

Nothing is computed here but sums of seconds and the most of peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.config.schema import Stage
from rlhf.contrib.sweep.folder import Ending, Status, SweepDirectory
from rlhf.contrib.sweep.grid import Grid, Point

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
        number: float | None = self.stages.get(stage, {}).get("after", {}).get(measure)  # type: ignore[call-overload]
        return number


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
        ending = Ending("not complete", run.describe_saved() or "begun; nothing is saved yet")
    ending = ending or Ending("waiting", "")
    return Row(point.name, point.labels, point.keys, ending.status, ending.reason, stages, ending.peak_memory)


def columns(grid: Grid, found: Sequence[Row]) -> list[str]:
    """Those with numbers: the headlines of the stages, seconds, and peak memory."""
    wanted = [f"{stage} {measure}" for stage in grid.stages for measure in HEADLINES[stage]]
    extra = [column for column in wanted if column.endswith("approved_share")]
    known = [column for column in wanted if column not in extra or any(row.value(column) is not None for row in found)]
    return [*known, "seconds", "peak_memory"]
