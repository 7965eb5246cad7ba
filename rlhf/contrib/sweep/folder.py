"""A sweep's folder: a run for each point, and `sweep.json`, which holds what became of each.

Which points are complete the runs themselves say; `sweep.json` keeps what no run's folder tells: why a point was
refused, or how it failed. That holds as long as the point's recipe is the same.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rlhf.config.dump import format_recipe
from rlhf.config.schema import Stage, build_config
from rlhf.contrib.sweep.grid import Grid, Point
from rlhf.errors import RunError
from rlhf.runs.directory import RunDirectory
from rlhf.utils.atomic_io import CONSOLE, atomic_write, read_json
from rlhf.utils.file_lock import LOCK_FILES

Status = Literal["complete", "refused", "excluded", "out of memory", "failed", "not complete", "waiting"]

ENDED: tuple[Status, ...] = ("refused", "out of memory", "failed")
"""How a point ends that is not complete; it is tried again only when asked to be."""


class Ending(NamedTuple):
    """How a point ended that is not complete; `peak_memory` in bytes, where its last line tells it."""

    status: Status
    reason: str
    peak_memory: int | None = None


@dataclass(frozen=True)
class SweepDirectory:
    """The folder of one sweep."""

    path: Path

    @property
    def description(self) -> Path:
        return self.path / "sweep.json"

    @property
    def table(self) -> Path:
        return self.path / "sweep.csv"

    @property
    def plot(self) -> Path:
        return self.path / "sweep.png"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    def run(self, name: str) -> RunDirectory:
        return RunDirectory(self.path / name)

    def console(self, name: str) -> Path:
        """What a point printed, of every time that it was started."""
        return self.path / name / CONSOLE

    def recipe(self, name: str) -> Path:
        """The whole recipe of a point: `rlhf --config` takes it alone, too."""
        return self.path / "recipes" / f"{name}.yaml"

    def check(self, grid: Grid) -> None:
        """Raise `RunError` where the folder is no sweep's, or holds points that were begun with other settings."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: is a file; choose a folder with --output")
        others = [path for path in self.path.iterdir() if path.name not in LOCK_FILES] if self.path.is_dir() else []
        if others and not self.description.is_file():
            raise RunError(
                f"{self.path}: is not empty and holds no sweep (no sweep.json), so nothing is written there; "
                "choose another --output"
            )
        for point in (*filter(None, [grid.shared]), *grid.points):
            run = self.run(point.name)
            run.recover()
            if not run.description.is_file():
                continue
            try:
                RunDirectory.check(point.config, stages=point.stages, resume=True)
            except RunError as error:
                what = str(error).rpartition("; ")[0]
                raise RunError(
                    f"{what}; delete {run.path} to train this point anew, or give the sweep another --output"
                ) from error

    def is_complete(self, point: Point) -> bool:
        return all(self.run(point.name).stage(stage).done for stage in point.stages)

    def is_begun(self, point: Point) -> bool:
        return any(self.run(point.name).stage(stage).started for stage in point.stages)

    def write_recipe(self, point: Point) -> None:
        """Leave the point's recipe, its paths absolute.

        Raises:
            RunError: it cannot be written.
        """
        path = self.recipe(point.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, _recipe_of(point))
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}); choose another --output") from error

    def endings(self, grid: Grid) -> dict[str, Ending]:
        """How points ended that are not complete, by name: those of `grid` whose settings are still the same.

        Raises:
            RunError: `sweep.json` was changed into something else.
        """
        recorded = read_json(self.description).get("points", []) if self.description.is_file() else []
        there = {one["name"]: one for one in recorded if one.get("status") in ENDED}
        found = {}
        for point in grid.points:
            one, recipe = there.get(point.name), self.recipe(point.name)
            if one and recipe.is_file() and recipe.read_text(encoding="utf-8") == _recipe_of(point):
                found[point.name] = Ending(one["status"], one["reason"], one["peak_memory"])
        return found

    def course(self, name: str, stage: Stage, key: str) -> list[tuple[int, float]]:
        """(step, value) of each record of a stage that has a number under `key`."""
        path = self.run(name).stage(stage).metrics
        found = []
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            with suppress(ValueError):  # the stage is at work, or a crash cut its last line short
                record = json.loads(line)
                if record.get(key) is not None:
                    found.append((record["step"], record[key]))
        return found


def _recipe_of(point: Point) -> str:
    config = build_config(point.config.model_dump(mode="json"))
    return format_recipe(config, f"The point {point.name} of a sweep: every key, its paths absolute.")
