"""Write the results of a sweep: a table, `sweep.json`, `sweep.csv` and plots, which need no display."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Stage
from rlhf.contrib.sweep.grid import Grid
from rlhf.contrib.sweep.results import PointResult, SweepDirectory, select_columns
from rlhf.reporting.summary import format_value
from rlhf.utils.atomic_io import PARTIAL, atomic_write, atomic_write_json
from rlhf.utils.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CURVE_METRICS: dict[Stage, str] = {"sft": "loss", "reward": "loss", "dpo": "loss", "ppo": "reward_ema"}
"""The metric whose training curve is drawn, by stage."""

_UNITS = {"seconds": "s", "peak_memory": "GiB", "perplexity": "", "kl": "nats per sequence"}
_INK, _FAINT, _BAR, _LOST = "#222222", "#8a8a8a", "#4c78a8", "#d8a39d"
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


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
                "seconds": result.seconds,
                "peak_memory": result.peak_memory,
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
    return header, [
        [result.name, result.status, *(_format_exactly(result.value(column)) for column in columns), result.reason]
        for result in results
    ]


def describe_result(grid: Grid, result: PointResult) -> str:
    """Return a point's status and numbers on one line."""
    values = [(column, result.value(column)) for column in select_columns(grid, [result])]
    numbers = [
        f"{column.replace('_', ' ')} {_format_for_people(column, value)}"
        for column, value in values
        if value is not None
    ]
    return ": ".join(filter(None, [result.status, result.reason or ", ".join(numbers)]))


def write_index(grid: Grid, folder: SweepDirectory, results: Sequence[PointResult]) -> None:
    """Write `sweep.json`, atomically."""
    atomic_write_json(folder.description, to_document(grid, results))


def write_report(grid: Grid, folder: SweepDirectory, results: Sequence[PointResult]) -> None:
    """Write `sweep.json`, `sweep.csv` and the plots, each atomically.

    Raises:
        OSError: the folder is not writable.
    """
    write_index(grid, folder, results)
    header, lines = format_table(grid, results, people=False)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*header[:1], *grid.axes, *header[1:]])
    for result, line in zip(results, lines):
        writer.writerow([*line[:1], *(result.labels.get(axis, "") for axis in grid.axes), *line[1:]])
    atomic_write(folder.table, text.getvalue())
    _write_plots(grid, folder, results, select_columns(grid, results))


def _format_for_people(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column == "seconds":
        return format_seconds(value)
    return format_bytes(value) if column == "peak_memory" else format_value(column, value)


def _format_exactly(value: float | None) -> str:
    return "" if value is None else repr(value)


def _write_plots(
    grid: Grid, folder: SweepDirectory, results: Sequence[PointResult], select_columns: Sequence[str]
) -> None:
    """Write `sweep.png`, and `curves.png` if there are records, each atomically."""
    _save(_draw_bars(results, select_columns), folder.plot)
    if figure := _draw_curves(grid, folder, results):
        _save(figure, folder.curves)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(path.name + PARTIAL)
    figure.savefig(temporary, format="png", dpi=130)
    os.replace(temporary, path)


def _draw_bars(results: Sequence[PointResult], select_columns: Sequence[str]) -> Figure:
    """Draw one panel per column and one bar per point; points without numbers show their status."""
    from matplotlib.figure import Figure

    longest = max(len(result.name) for result in results)
    margin, panel = 0.09 * longest + 0.25, 2.3
    size = (margin + panel * len(select_columns), 0.26 * len(results) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(select_columns), sharey=True, squeeze=False)[0]
    places = range(len(results))
    for axes, column in zip(panels, select_columns):
        values = [_to_unit(column, result.value(column)) for result in results]
        colours = [_BAR if result.status == "complete" else _LOST for result in results]
        axes.barh(places, [value or 0 for value in values], color=colours, height=0.72)
        axes.set_title(_format_title(column), fontsize=9, color=_INK)
        axes.tick_params(labelsize=8, length=0)
        axes.margins(x=0.22)
        axes.axvline(0, color=_INK, linewidth=0.6)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.xaxis.set_major_locator(_limit_ticks())
        axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
        for place, value in zip(places, values):
            if value is not None:
                side = "right" if value < 0 else "left"
                axes.annotate(
                    f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}",
                    (value, place),
                    xytext=(-3 if value < 0 else 3, 0),
                    textcoords="offset points",
                    ha=side,
                    va="center",
                    fontsize=7,
                    color=_INK,
                )
    first = panels[0]
    for place, result in enumerate(results):
        if result.value(select_columns[0]) is None:
            first.text(
                0.03,
                place,
                result.status,
                transform=first.get_yaxis_transform(),
                va="center",
                fontsize=7.5,
                color=_FAINT,
                style="italic",
            )
    first.set_yticks(list(places), [result.name for result in results], fontsize=8)
    for label, result in zip(first.get_yticklabels(), results):
        label.set_color(_INK if result.status == "complete" else _FAINT)
    first.set_ylim(len(results) - 0.4, -0.6)
    return figure


def _draw_curves(grid: Grid, folder: SweepDirectory, results: Sequence[PointResult]) -> Figure | None:
    """Draw one panel per stage and one line per point; return None if there are no records yet."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves = {
        (result.name, stage): folder.read_metric(result.name, stage, _CURVE_METRICS[stage])
        for result in results
        if result.status != "excluded"
        for stage in grid.stages
    }
    stages = [stage for stage in grid.stages if any(curves[key] for key in curves if key[1] == stage)]
    if not stages:
        return None
    names = [result.name for result in results if any(curves.get((result.name, stage)) for stage in stages)]
    height = max(3.2, 0.2 * len(names) + 0.8)
    figure = Figure(figsize=(5.2 * len(stages) + 0.085 * max(map(len, names)) + 0.7, height), layout="constrained")
    panels = figure.subplots(1, len(stages), squeeze=False)[0]
    palette = [colour for at, colour in enumerate(colormaps["tab10"].colors) if at != 7]  # type: ignore[attr-defined]
    lines: list[Any] = []
    for axes, stage in zip(panels, stages):
        lines = []
        for number, name in enumerate(names):
            curve = curves[name, stage]
            style = _DASHES[number // len(palette) % len(_DASHES)]
            colour = palette[number % len(palette)]
            marker = "o" if len(curve) == 1 else None
            steps, values = zip(*curve) if curve else ((), ())
            lines += axes.plot(steps, values, color=colour, linestyle=style, linewidth=1.4, marker=marker, label=name)
        axes.set_title(f"{stage}: {_CURVE_METRICS[stage].replace('_ema', ', moving mean')}", fontsize=10, color=_INK)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_locator(_limit_ticks(8, integer=True))
        axes.tick_params(labelsize=8)
        axes.grid(color="#e6e6e6", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(handles=lines, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _to_unit(column: str, value: float | None) -> float | None:
    return value / 2**30 if column == "peak_memory" and value is not None else value


def _format_title(column: str) -> str:
    unit = _UNITS.get(column.rpartition(" ")[2], "")
    words = column.replace("_", " ")
    return words if column == "seconds" or not unit else f"{words} ({unit})"


def _limit_ticks(most: int = 3, *, integer: bool = False) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=integer)
