"""The result of each point of a sweep, and the report: a table, `sweep.json`, `sweep.csv` and a page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.schema import Stage
from rlhf.contrib.sweep.directory import PointOutcome, Status, SweepDirectory
from rlhf.contrib.sweep.grid import Grid
from rlhf.diagnosis.records import RunRecords, read_run
from rlhf.diagnosis.verdict import examine_run
from rlhf.errors import RLHFError
from rlhf.report.comparison import HEADLINES
from rlhf.report.page import write_report as write_report_page
from rlhf.reporting.summary import format_value
from rlhf.utils.atomic_io import atomic_write, atomic_write_json
from rlhf.utils.units import format_bytes, format_seconds


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
    metrics = [f"{stage} {metric}" for stage in grid.stages for metric in HEADLINES[stage]]
    recorded = [column for column in metrics if any(result.value(column) is not None for result in results)]
    return [*(recorded or metrics), "seconds", "peak_memory"]


def to_document(grid: Grid, results: Sequence[PointResult]) -> dict[str, Any]:
    """Return the contents of `sweep.json`."""
    return {
        "grid": str(grid.file),
        "stages": list(grid.stages),
        "shared": list(grid.shared.stages) if grid.shared else [],
        "ranks": grid.ranks,
        "axes": list(grid.axes),
        "points": [
            {
                "name": result.name,
                "status": result.status,
                "reason": result.reason,
                "labels": result.labels,
                "keys": result.keys,
                "seconds": result.value("seconds"),
                "peak_memory": result.value("peak_memory"),
                "stages": {
                    stage: {key: summary.get(key) for key in ("before", "after", "steps", "seconds", "peak_memory")}
                    for stage, summary in result.stages.items()
                },
            }
            for result in results
        ],
    }


def format_table(grid: Grid, results: Sequence[PointResult], *, people: bool) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table: rounded and with units for people, else with all digits and reasons."""
    columns = select_columns(grid, results)
    if people:
        header = ["point", "status", *("\n".join(column.replace("_", " ").split()) for column in columns)]
        return header, [
            [result.name, result.status, *(_format_for_people(column, result.value(column)) for column in columns)]
            for result in results
        ]
    header = ["point", "status", *columns, "reason"]
    rows = []
    for result in results:
        values = (result.value(column) for column in columns)
        cells = ["" if value is None else repr(value) for value in values]
        rows.append([result.name, result.status, *cells, result.reason])
    return header, rows


def describe_best(grid: Grid, results: Sequence[PointResult]) -> str:
    """Return the best complete point by the first metric of the last stage, on one line; empty without one."""
    stage = grid.stages[-1]
    metric = HEADLINES[stage][0]
    column = f"{stage} {metric}"
    values = {
        result.name: value
        for result in results
        if result.status == "complete" and (value := result.value(column)) is not None and math.isfinite(value)
    }
    if not values:
        return ""
    name = getattr(grid.points[0].config, stage).better[metric](values, key=values.__getitem__)
    return f"best {column}: {name} ({_format_for_people(column, values[name])})"


def describe_result(grid: Grid, result: PointResult) -> str:
    """Return a point's status and numbers on one line."""
    numbers = [
        f"{column.replace('_', ' ')} {_format_for_people(column, value)}"
        for column in select_columns(grid, [result])
        if (value := result.value(column)) is not None
    ]
    return ": ".join(filter(None, [result.status, result.reason or ", ".join(numbers)]))


def _format_for_people(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column == "seconds":
        return format_seconds(value)
    return format_bytes(value) if column == "peak_memory" else format_value(column, value)


def write_index(grid: Grid, folder: SweepDirectory, results: Sequence[PointResult]) -> None:
    """Write `sweep.json`, atomically."""
    atomic_write_json(folder.description, to_document(grid, results))


def write_table(grid: Grid, folder: SweepDirectory, results: Sequence[PointResult]) -> None:
    """Write `sweep.json` and `sweep.csv`.

    Raises:
        OSError: the folder is not writable.
    """
    write_index(grid, folder, results)
    (first, *header), rows = format_table(grid, results, people=False)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([first, *grid.axes, *header])
    for result, (name, *cells) in zip(results, rows, strict=True):
        writer.writerow([name, *(result.labels.get(axis, "") for axis in grid.axes), *cells])
    atomic_write(folder.table, text.getvalue())


def write_report(grid: Grid, folder: SweepDirectory, results: Sequence[PointResult]) -> None:
    """Write the table, and the page with the runs of all points, `report.html`.

    Raises:
        OSError: the folder is not writable.
    """
    write_table(grid, folder, results)
    runs = [folder.run(result.name).path for result in results]
    reports = [examine_run(records, place) for place, records in enumerate(filter(None, map(_read_started, runs)))]
    shown = {report.records.path for report in reports}
    others = [
        (result.name, f"{result.status}{': ' * bool(result.reason)}{result.reason}")
        for result, run in zip(results, runs, strict=True)
        if run not in shown or result.reason
    ]
    write_report_page(reports, folder.report, title=f"sweep {grid.file.stem}", notes=others)


def _read_started(run: Path) -> RunRecords | None:
    """Return the records of a point; None if it has recorded no step, or they cannot be read."""
    try:
        return read_run(run)
    except RLHFError:
        return None
