"""A sweep's folder, the result of each point, and the report: a table, `sweep.json`, `sweep.csv` and plots.

Runs record which points are complete. `sweep.json` records facts that are in no run's folder: why a point was refused,
or how it failed. They are valid as long as the point's recipe does not change. Plots need no display.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf.config.data import DataConfig
from rlhf.config.dump import format_recipe
from rlhf.config.schema import Stage, build_config
from rlhf.contrib.sweep.grid import SHARED, Grid, Point
from rlhf.data.load_sources import read_sources
from rlhf.errors import RunError
from rlhf.reporting.summary import format_value
from rlhf.roles.base_sharing import identify_bases
from rlhf.roles.lineage import base_models, resolve_base_models
from rlhf.roles.model_identity import StartModel, fingerprint_model
from rlhf.runs.directory import RunDirectory
from rlhf.runs.resume import Fingerprints
from rlhf.utils.atomic_io import CONSOLE, atomic_file, atomic_write, atomic_write_json, read_json, refuse_link
from rlhf.utils.file_lock import LOCK_FILES
from rlhf.utils.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVE_METRICS: dict[Stage, str] = {"sft": "loss", "reward": "loss", "dpo": "loss", "ppo": "reward_ema"}
"""The metric whose training curve is drawn, by stage."""

_TITLES = {"peak_memory": "peak memory (GiB)", "ppo kl": "ppo kl (nats per sequence)"}
_INK, _FAINT, _BAR, _LOST = "#222222", "#8a8a8a", "#4c78a8", "#d8a39d"
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))

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
        tradeoff: the plot of reward against KL, of sweeps with PPO.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = path / "sweep.json"
        self.table = path / "sweep.csv"
        self.plot = path / "sweep.png"
        self.curves = path / "curves.png"
        self.tradeoff = path / "reward-kl.png"

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
            RunError: the folder holds something else, or points that were started with other settings, from other
                models or, if points are still to be trained, on other rows; or a file in it is a link.
            ModelError: a model that a point started from is damaged.
            DataError: the rows of a source cannot be read.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: expected a folder, got a file; choose another --output")
        others = [path for path in self.path.iterdir() if path.name not in LOCK_FILES] if self.path.is_dir() else []
        if others and not self.description.is_file():
            raise RunError(
                f"{self.path}: not empty, and not the folder of a sweep (no sweep.json); choose another --output"
            )
        all_points = (*filter(None, [grid.shared]), *grid.points)
        for path in (self.path / "recipes", *(self.console(point.name) for point in all_points)):
            refuse_link(path)
        changed: dict[str, tuple[str, str]] = {}
        read_rows = cache(self._fingerprint_rows) if not all(map(self.is_complete, all_points)) else None
        for point in all_points:
            run = self.run(point.name)
            run.recover()
            if not run.description.is_file():
                continue
            try:
                run.check(point.config, stages=point.stages, resume=True)
            except RunError as error:
                problem = str(error).rpartition("; ")[0]
                folders = [run.path] if point is not grid.shared else self._list_folders([point, *grid.points])
                raise RunError(f"{problem}; {_delete(folders)}") from error
            try:
                run.check_models(point.config, self._identify_outside(point))
                if read_rows:
                    data = point.config.data.model_dump_json(exclude={"pretraining"})
                    run.check_rows(point.config, read_rows(data, point.config.data_seed, self._started(point)))
            except RunError as error:
                problem, _, remedies = str(error).rpartition("; ")
                changed[point.name] = problem, remedies.partition(",")[0]
        if changed:
            stale = [point for point in all_points if point.name in changed or SHARED in changed]
            problem, remedy = next(iter(changed.values()))
            raise RunError(f"{problem}; {remedy}, {_delete(self._list_folders(stale))}")
        models = sorted({model for point in grid.points for model in self._shared_models(point)})
        for model, digest in self._fingerprint(models).items():
            users = [point for point in grid.points if model in self._shared_models(point) and self.is_started(point)]
            if stale := [point for point in users if digest is None or self._read_bases(point).get(model) != digest]:
                reason = "which is another one now" if digest else "which is gone"
                names = ", ".join(point.name for point in stale)
                raise RunError(
                    f"{self.path / model}: {names} started from this model, {reason}; "
                    f"{_delete(self._list_folders(stale))}"
                )

    def _identify_outside(self, point: Point) -> dict[Stage, dict[str, StartModel]]:
        """Return the content of the models outside of the sweep that the started stages of a point start from."""
        return {
            stage: identify_bases(
                point.config,
                stage,
                [
                    base
                    for base in resolve_base_models(point.config, stage)
                    if not Path(base.path or "").is_relative_to(self.path)
                ],
            )
            for stage in self._started(point)
        }

    @staticmethod
    def _fingerprint_rows(data: str, seed: int, stages: tuple[Stage, ...]) -> Fingerprints:
        """Return the fingerprint of each source of `stages`; `data` is that section of the settings, as JSON."""
        return read_sources(DataConfig.model_validate_json(data), stages, seed=seed).fingerprints()

    def record_bases(self, point: Point) -> None:
        """Record the digests of the shared models that a point starts from, unless it was started before.

        Raises:
            RunError: the file cannot be written.
        """
        if not self.is_started(point):
            digests = self._fingerprint(self._shared_models(point))
            self._write(self._bases(point), json.dumps(digests, indent=2) + "\n")

    def _fingerprint(self, models: Sequence[str]) -> dict[str, str | None]:
        folders = {model: self.path / model for model in models}
        return {model: fingerprint_model(str(path)) if path.is_dir() else None for model, path in folders.items()}

    def _read_bases(self, point: Point) -> dict[str, str]:
        path = self._bases(point)
        return read_json(path) if path.is_file() else {}

    def _bases(self, point: Point) -> Path:
        return self.path / "recipes" / f"{point.name}.bases.json"

    def _shared_models(self, point: Point) -> list[str]:
        """Return the shared models that a point starts from, as paths in the sweep's folder."""
        named = (ref.named_in(point.config) for stage in point.stages for ref in base_models(point.config, stage))
        paths = [Path(path) for path in named if path]
        return [str(path.relative_to(self.path)) for path in paths if path.is_relative_to(self.path / SHARED)]

    def _list_folders(self, points: Sequence[Point]) -> list[Path]:
        """Return the folders of those points that exist."""
        return [path for point in points if (path := self.run(point.name).path).is_dir()]

    def is_complete(self, point: Point) -> bool:
        """Return whether all stages of a point are complete."""
        return all(self.run(point.name).stage(stage).done for stage in point.stages)

    def is_started(self, point: Point) -> bool:
        """Return whether some stage of a point was started."""
        return bool(self._started(point))

    def _started(self, point: Point) -> tuple[Stage, ...]:
        return tuple(stage for stage in point.stages if self.run(point.name).stage(stage).started)

    def write_recipe(self, point: Point) -> None:
        """Write the point's recipe, with absolute paths.

        Raises:
            RunError: the file cannot be written.
        """
        self._write(self.recipe(point.name), _format_point_recipe(point))

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, text)
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


def _delete(folders: Sequence[Path]) -> str:
    """Return the remedy of points that were trained otherwise."""
    return f"delete {', '.join(map(str, folders))} to train again, or choose another --output"


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
