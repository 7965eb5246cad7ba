"""A sweep's folder, and the result of each point: its status, and the numbers in its run's `stage.json`.

Runs record which points are complete. `sweep.json` records what no run's folder does: why a point was refused, or how
it failed; this counts as long as the point's recipe stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf.config.dump import format_recipe
from rlhf.config.schema import Stage, build_config
from rlhf.contrib.sweep.grid import Grid, Point
from rlhf.errors import RunError
from rlhf.runs.directory import RunDirectory
from rlhf.utils.atomic_io import CONSOLE, atomic_write, read_json
from rlhf.utils.file_lock import LOCK_FILES

Status = Literal["complete", "refused", "excluded", "out of memory", "failed", "not complete", "waiting"]

_UNSUCCESSFUL: tuple[Status, ...] = ("refused", "out of memory", "failed")
"""Statuses of points that are tried again only with --retry."""


class PointOutcome(NamedTuple):
    """The end of an incomplete point; `peak_memory` in bytes, if its last line states it."""

    status: Status
    reason: str
    peak_memory: int | None = None


class SweepDirectory:
    """The folder of one sweep.

    Attributes:
        description: marks the folder as a sweep's.
        table: the table as CSV.
        plot: the plot of the final numbers.
        curves: the plot of training curves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = path / "sweep.json"
        self.table = path / "sweep.csv"
        self.plot = path / "sweep.png"
        self.curves = path / "curves.png"

    def run(self, name: str) -> RunDirectory:
        """Return the run directory of a point."""
        return RunDirectory(self.path / name)

    def console(self, name: str) -> Path:
        """Return the log of everything that a point printed."""
        return self.path / name / CONSOLE

    def recipe(self, name: str) -> Path:
        """Return the path of a point's complete recipe, which `rlhf --config` accepts."""
        return self.path / "recipes" / f"{name}.yaml"

    def check(self, grid: Grid) -> None:
        """Check that the folder belongs to this sweep.

        Raises:
            RunError: the folder holds something else, or points that were started with other settings.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: expected a folder, got a file; choose another --output")
        others = [path for path in self.path.iterdir() if path.name not in LOCK_FILES] if self.path.is_dir() else []
        if others and not self.description.is_file():
            raise RunError(
                f"{self.path}: not empty, and not the folder of a sweep (no sweep.json); choose another --output"
            )
        for point in (*filter(None, [grid.shared]), *grid.points):
            run = self.run(point.name)
            run.recover()
            if not run.description.is_file():
                continue
            try:
                run.check(point.config, stages=point.stages, resume=True)
            except RunError as error:
                problem = str(error).rpartition("; ")[0]
                raise RunError(
                    f"{problem}; delete {run.path} to train this point again, or choose another --output"
                ) from error

    def is_complete(self, point: Point) -> bool:
        """Return whether all stages of a point are complete."""
        return all(self.run(point.name).stage(stage).done for stage in point.stages)

    def is_started(self, point: Point) -> bool:
        """Return whether some stage of a point was started."""
        return any(self.run(point.name).stage(stage).started for stage in point.stages)

    def write_recipe(self, point: Point) -> None:
        """Write the point's recipe, with absolute paths.

        Raises:
            RunError: the file cannot be written.
        """
        path = self.recipe(point.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, _format_point_recipe(point))
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}); choose another --output") from error

    def read_outcomes(self, grid: Grid) -> dict[str, PointOutcome]:
        """Return the recorded outcomes of points that are not complete, by name, if their settings are the same.

        Raises:
            RunError: `sweep.json` cannot be read.
        """
        recorded = read_json(self.description).get("points", []) if self.description.is_file() else []
        records = {record["name"]: record for record in recorded if record.get("status") in _UNSUCCESSFUL}
        outcomes = {}
        for point in grid.points:
            record, recipe = records.get(point.name), self.recipe(point.name)
            if record and recipe.is_file() and recipe.read_text(encoding="utf-8") == _format_point_recipe(point):
                outcomes[point.name] = PointOutcome(record["status"], record["reason"], record["peak_memory"])
        return outcomes

    def read_metric(self, name: str, stage: Stage, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of each record of a stage with a number under `key`."""
        path = self.run(name).stage(stage).metrics
        values = []
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            with suppress(ValueError):  # the last line of a running or killed stage may be cut off
                record = json.loads(line)
                if record.get(key) is not None:
                    values.append((record["step"], record[key]))
        return values


def _format_point_recipe(point: Point) -> str:
    config = build_config(point.config.model_dump(mode="json"))
    return format_recipe(config, f"Point {point.name} of a sweep: every key, with absolute paths.")


_HEADLINES: dict[Stage, tuple[str, ...]] = {
    "sft": ("perplexity",),
    "reward": ("accuracy",),
    "dpo": ("accuracy",),
    "ppo": ("reward", "kl", "approved_share"),
}
"""The held-out metrics after training that the table and the plots show, by stage."""


@dataclass(frozen=True)
class PointResult:
    """A point's status and numbers.

    Attributes:
        stages: the summaries of complete stages.
        lost_peak: memory in use when the point ran out of memory, in bytes.
    """

    name: str
    labels: dict[str, str]
    keys: dict[str, Any]
    status: Status
    reason: str
    stages: dict[Stage, dict[str, Any]]
    lost_peak: int | None = None

    def value(self, column: str) -> Any:
        """Return the number in a column, None if there is none.

        Args:
            column: `seconds` of all complete stages, `peak_memory` (the highest of any stage, or what was in use when
                the point ran out of memory, in bytes), or a stage and its metric after training.
        """
        if column == "seconds":
            return sum(stage["seconds"] for stage in self.stages.values()) if self.stages else None
        if column == "peak_memory":
            peaks = [stage["peak_memory"] for stage in self.stages.values()]
            return max([*peaks, *filter(None, [self.lost_peak])], default=None)
        stage, _, metric = column.partition(" ")
        return self.stages.get(stage, {}).get("after", {}).get(metric)  # type: ignore[call-overload]


def collect_results(grid: Grid, folder: SweepDirectory, outcomes: Mapping[str, PointOutcome]) -> list[PointResult]:
    """Return the result of every point, excluded points last."""
    results = []
    for point in grid.points:
        run, outcome = folder.run(point.name), outcomes.get(point.name)
        stages = {stage: run.stage(stage).summary() for stage in point.stages if run.stage(stage).done}
        if folder.is_complete(point):
            outcome = PointOutcome("complete", "")
        elif outcome is None and folder.is_started(point):
            outcome = PointOutcome("not complete", run.describe_saved() or "started; nothing is saved yet")
        status, reason, peak = outcome or PointOutcome("waiting", "")
        results.append(PointResult(point.name, point.labels, point.keys, status, reason, stages, peak))
    return results + [PointResult(name, {}, {}, "excluded", reason, {}) for name, reason in grid.excluded.items()]


def select_columns(grid: Grid, results: Sequence[PointResult]) -> list[str]:
    """Return the columns with numbers: the metrics of the stages, seconds, and peak memory."""
    metrics = [f"{stage} {metric}" for stage in grid.stages for metric in _HEADLINES[stage]]
    optional = "ppo approved_share"
    if all(result.value(optional) is None for result in results):
        metrics = [column for column in metrics if column != optional]
    return [*metrics, "seconds", "peak_memory"]
