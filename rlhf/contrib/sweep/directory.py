"""A sweep's folder: its files, the checks before points are added to it, and the outcome of each point.

Runs record which points are complete. `sweep.json` records facts that are in no run's folder: why a point was refused,
or how it failed. They are valid as long as the point's recipe does not change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from rlhf.config.data import DataConfig
from rlhf.config.dump import format_recipe
from rlhf.config.schema import Stage, build_config
from rlhf.contrib.sweep.grid import SHARED, Grid, Point
from rlhf.data.load_sources import read_sources
from rlhf.errors import RunError
from rlhf.roles.base_sharing import identify_bases
from rlhf.roles.lineage import base_models, resolve_base_models
from rlhf.roles.model_identity import StartModel, fingerprint_model
from rlhf.runs.directory import RunDirectory
from rlhf.runs.resume import Fingerprints
from rlhf.utils.atomic_io import CONSOLE, atomic_write, read_json, refuse_link
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
        report: the page about the runs of all points.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = path / "sweep.json"
        self.table = path / "sweep.csv"
        self.report = path / "report.html"

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
        read_rows = None if all(map(self.is_complete, all_points)) else cache(_fingerprint_rows)
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
                    rows = read_rows(point.config.data, self._started(point), point.config.data_seed)
                    run.check_rows(point.config, rows)
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


def _fingerprint_rows(data: DataConfig, stages: tuple[Stage, ...], seed: int) -> Fingerprints:
    return read_sources(data, stages, seed=seed).fingerprints()


def _delete(folders: Sequence[Path]) -> str:
    """Return the remedy of points that were trained otherwise."""
    return f"delete {', '.join(map(str, folders))} to train again, or choose another --output"


def _format_point_recipe(point: Point) -> str:
    config = build_config(point.config.model_dump(mode="json"))
    return format_recipe(config, f"Point {point.name} of a sweep: every key, with absolute paths.")
