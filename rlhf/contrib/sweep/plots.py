"""The pictures of a sweep: bars of each number, a row a point, and the course of training, a line a point.

Rows of the result flow in; PNG files flow out. They are drawn without a display.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Stage
from rlhf.contrib.sweep.folder import SweepDirectory
from rlhf.contrib.sweep.grid import Grid
from rlhf.contrib.sweep.rows import Row
from rlhf.utils.atomic_io import PARTIAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COURSE: dict[Stage, str] = {"sft": "loss", "reward": "loss", "dpo": "loss", "ppo": "reward_ema"}
"""What is drawn of each stage's records over its steps."""

_UNITS = {"seconds": "s", "peak_memory": "GiB", "perplexity": "", "kl": "nats per sequence"}
_INK, _FAINT, _BAR, _LOST = "#222222", "#8a8a8a", "#4c78a8", "#d8a39d"
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


def write(grid: Grid, folder: SweepDirectory, found: Sequence[Row], columns: Sequence[str]) -> None:
    """Renew `sweep.png` and, where there are records, `curves.png`, each whole.

    Raises:
        OSError: the folder cannot be written to.
    """
    _save(_bars(found, columns), folder.plot)
    if figure := _curves(grid, folder, found):
        _save(figure, folder.curves)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(path.name + PARTIAL)
    figure.savefig(temporary, format="png", dpi=130)
    os.replace(temporary, path)


def _bars(found: Sequence[Row], columns: Sequence[str]) -> Figure:
    """A panel a column, a bar a point; where a point has no number, its status stands in the first panel."""
    from matplotlib.figure import Figure

    longest = max(len(row.name) for row in found)
    margin, panel = 0.09 * longest + 0.25, 2.3
    size = (margin + panel * len(columns), 0.26 * len(found) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    places = range(len(found))
    for axes, column in zip(panels, columns):
        values = [_scaled(column, row.value(column)) for row in found]
        colours = [_BAR if row.status == "complete" else _LOST for row in found]
        axes.barh(places, [value or 0 for value in values], color=colours, height=0.72)
        axes.set_title(_titled(column), fontsize=9, color=_INK)
        axes.tick_params(labelsize=8, length=0)
        axes.margins(x=0.22)
        axes.axvline(0, color=_INK, linewidth=0.6)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.xaxis.set_major_locator(_few_ticks())
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
    for place, row in enumerate(found):
        if row.value(columns[0]) is None:
            first.text(
                0.03,
                place,
                row.status,
                transform=first.get_yaxis_transform(),
                va="center",
                fontsize=7.5,
                color=_FAINT,
                style="italic",
            )
    first.set_yticks(list(places), [row.name for row in found], fontsize=8)
    for label, row in zip(first.get_yticklabels(), found):
        label.set_color(_INK if row.status == "complete" else _FAINT)
    first.set_ylim(len(found) - 0.4, -0.6)
    return figure


def _curves(grid: Grid, folder: SweepDirectory, found: Sequence[Row]) -> Figure | None:
    """A panel a stage, a line a point; None where no point has made a step yet."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    courses = {
        (row.name, stage): folder.course(row.name, stage, _COURSE[stage])
        for row in found
        if row.status != "excluded"
        for stage in grid.stages
    }
    stages = [stage for stage in grid.stages if any(courses[key] for key in courses if key[1] == stage)]
    if not stages:
        return None
    names = [row.name for row in found if any(courses.get((row.name, stage)) for stage in stages)]
    height = max(3.2, 0.2 * len(names) + 0.8)
    figure = Figure(figsize=(5.2 * len(stages) + 0.085 * max(map(len, names)) + 0.7, height), layout="constrained")
    panels = figure.subplots(1, len(stages), squeeze=False)[0]
    palette = [colour for at, colour in enumerate(colormaps["tab10"].colors) if at != 7]  # type: ignore[attr-defined]
    lines: list[Any] = []
    for axes, stage in zip(panels, stages):
        lines = []
        for number, name in enumerate(names):
            course = courses[name, stage]
            style = _DASHES[number // len(palette) % len(_DASHES)]
            colour = palette[number % len(palette)]
            marker = "o" if len(course) == 1 else None
            steps, values = zip(*course) if course else ((), ())
            lines += axes.plot(steps, values, color=colour, linestyle=style, linewidth=1.4, marker=marker, label=name)
        axes.set_title(f"{stage}: {_COURSE[stage].replace('_ema', ', moving mean')}", fontsize=10, color=_INK)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_locator(_few_ticks(8, integer=True))
        axes.tick_params(labelsize=8)
        axes.grid(color="#e6e6e6", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(handles=lines, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _scaled(column: str, value: float | None) -> float | None:
    return value / 2**30 if column == "peak_memory" and value is not None else value


def _titled(column: str) -> str:
    unit = _UNITS.get(column.rpartition(" ")[2], "")
    words = column.replace("_", " ")
    return words if column == "seconds" or not unit else f"{words} ({unit})"


def _few_ticks(most: int = 3, *, integer: bool = False) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=integer)
