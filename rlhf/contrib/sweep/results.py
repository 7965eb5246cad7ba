"""The result of each point of a sweep, and the report: a table, `sweep.json`, `sweep.csv` and plots.

Plots need no display.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Stage
from rlhf.contrib.sweep.directory import PointOutcome, Status, SweepDirectory
from rlhf.contrib.sweep.grid import Grid
from rlhf.reporting.summary import format_value
from rlhf.utils.atomic_io import atomic_file, atomic_write, atomic_write_json
from rlhf.utils.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVE_METRICS: dict[Stage, str] = {"sft": "loss", "reward": "loss", "dpo": "loss", "ppo": "reward_ema"}
"""The metric whose training curve is drawn, by stage."""

_TITLES = {"peak_memory": "peak memory (GiB)", "ppo kl": "ppo kl (nats per sequence)"}
_INK, _FAINT, _BAR, _LOST = "#222222", "#8a8a8a", "#4c78a8", "#d8a39d"
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))

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
    metric = _HEADLINES[stage][0]
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


def write_report(grid: Grid, folder: SweepDirectory, results: Sequence[PointResult]) -> None:
    """Write `sweep.json`, `sweep.csv`, `sweep.png` and, with the numbers for them, `curves.png` and `reward-kl.png`.

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
    _save(_draw_bars(results, select_columns(grid, results)), folder.plot)
    if figure := _draw_curves(grid, folder, results):
        _save(figure, folder.curves)
    if figure := _draw_tradeoff(results):
        _save(figure, folder.tradeoff)


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _draw_bars(results: Sequence[PointResult], columns: Sequence[str]) -> Figure:
    """Draw one panel per column and one bar per point; points without numbers show their status."""
    from matplotlib.figure import Figure

    longest = max(len(result.name) for result in results)
    size = (0.09 * longest + 0.25 + 2.3 * len(columns), 0.26 * len(results) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    places = range(len(results))
    for axes, column in zip(panels, columns, strict=True):
        scale = 2**30 if column == "peak_memory" else 1
        values = [None if (value := result.value(column)) is None else value / scale for result in results]
        colours = [_BAR if result.status == "complete" else _LOST for result in results]
        axes.barh(places, [value or 0 for value in values], color=colours, height=0.72)
        labels = [
            "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" for value in values
        ]
        for place, (value, label) in enumerate(zip(values, labels, strict=True)):
            # To the right of a negative bar too: the point's name is on its left.
            style = {"textcoords": "offset points", "va": "center", "fontsize": 7, "color": _INK}
            axes.annotate(label, (max(value or 0, 0), place), xytext=(3, 0), **style)
        axes.set_title(_TITLES.get(column, column.replace("_", " ")), fontsize=9, color=_INK)
        axes.margins(x=0.22)
        axes.axvline(0, color=_INK, linewidth=0.6)
        _style(axes, ticks=3, hidden=("top", "right", "left", "bottom"))
        axes.tick_params(length=0)
        axes.grid(visible=False, axis="y")
    first = panels[0]
    for place, result in enumerate(results):
        if result.value(columns[0]) is None:
            style = {"va": "center", "fontsize": 7.5, "color": _FAINT, "style": "italic"}
            first.text(0.03, place, result.status, transform=first.get_yaxis_transform(), **style)
    first.set_yticks(list(places), [result.name for result in results], fontsize=8)
    for label, result in zip(first.get_yticklabels(), results, strict=True):
        label.set_color(_INK if result.status == "complete" else _FAINT)
    first.set_ylim(len(results) - 0.4, -0.6)
    return figure


def _draw_curves(grid: Grid, folder: SweepDirectory, results: Sequence[PointResult]) -> Figure | None:
    """Draw one panel per stage and one line per point; return None if there are no records yet."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves = {
        stage: {
            result.name: folder.read_metric(result.name, stage, _CURVE_METRICS[stage])
            for result in results
            if result.status != "excluded"
        }
        for stage in grid.stages
    }
    curves = {stage: lines for stage, lines in curves.items() if any(lines.values())}
    names = [result.name for result in results if any(lines.get(result.name) for lines in curves.values())]
    if not names:
        return None
    height = max(3.2, 0.2 * len(names) + 0.8)
    figure = Figure(figsize=(5.2 * len(curves) + 0.085 * max(map(len, names)) + 0.7, height), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    palette = [colour for at, colour in enumerate(colormaps["tab10"].colors) if at != 7]  # type: ignore[attr-defined]
    for axes, (stage, lines) in zip(panels, curves.items(), strict=True):
        for number, name in enumerate(names):
            steps, values = zip(*lines[name]) if lines[name] else ((), ())
            axes.plot(
                steps,
                values,
                color=palette[number % len(palette)],
                linestyle=_DASHES[number // len(palette) % len(_DASHES)],
                linewidth=1.4,
                marker="o" if len(steps) == 1 else None,
                label=name,
            )
        axes.set_title(f"{stage}: {_CURVE_METRICS[stage].replace('_ema', ', moving mean')}", fontsize=10, color=_INK)
        axes.set_xlabel("step", fontsize=9)
        _style(axes, ticks=8, hidden=("top", "right"), integer=True)
    figure.legend(handles=panels[-1].get_lines(), loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _draw_tradeoff(results: Sequence[PointResult]) -> Figure | None:
    """Draw the held-out reward of each point after PPO against its KL; return None without points."""
    from matplotlib.figure import Figure

    points = sorted(
        (kl, reward, result.name)
        for result in results
        if (kl := result.value("ppo kl")) is not None and (reward := result.value("ppo reward")) is not None
    )
    if not points:
        return None
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.scatter([kl for kl, *_ in points], [reward for _, reward, _ in points], color=_BAR, s=22, zorder=3)
    for number, (kl, reward, name) in enumerate(points):  # neighbours' names are above and below them
        axes.annotate(
            name, (kl, reward), xytext=(5, -9 if number % 2 else 3), textcoords="offset points", fontsize=7, color=_INK
        )
    axes.set_xlabel(_TITLES["ppo kl"], fontsize=9)
    axes.set_ylabel("ppo reward", fontsize=9)
    axes.margins(x=0.18, y=0.1)
    _style(axes, ticks=8, hidden=("top", "right"))
    return figure


def _style(axes: Axes, *, ticks: int, hidden: Sequence[str], integer: bool = False) -> None:
    """Set the common style of a panel: few ticks along x, a faint grid below the data, no frame on `hidden` sides."""
    axes.locator_params(axis="x", nbins=ticks, integer=integer)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[[*hidden]].set_visible(False)
