"""The points of a sweep, one after the other, each in processes of its own.

A grid and its folder flow in; runs come to be there, and how each point ended. What is complete stays, what was
interrupted goes on, and a point that fails stops no other.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rlhf.contrib.sweep.folder import Ending, SweepDirectory
from rlhf.contrib.sweep.grid import SHARED, Grid, Point
from rlhf.errors import USER_ERRORS, OutOfMemory, RunError
from rlhf.launchers import local
from rlhf.launchers.exit_status import INTERRUPTED, USER_ERROR, ExitStatus, Interrupted
from rlhf.memory.advice import plan_stages
from rlhf.memory.environment import describe_environment
from rlhf.memory.report import format_peak
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress
from rlhf.trainers import preflight
from rlhf.trainers.interruption import RunTermination
from rlhf.utils import signals
from rlhf.utils.command_line import get_command_line
from rlhf.utils.units import format_seconds, parse_bytes

_PEAK = re.compile(r"\bpeak ([\d.]+) ([MG]iB)\b")  # as rlhf.trainers.oom writes it
_PLAIN: dict[str, Any] = {"markup": False, "soft_wrap": True}


@dataclass(frozen=True)
class Sweeping:
    """A sweep at work. `debug`: points show what --debug shows, in what is kept of their output."""

    grid: Grid
    folder: SweepDirectory
    debug: bool = False

    def refusal(self, point: Point) -> str:
        """Why a point that is not begun cannot be trained, as far as can be known without starting it; else empty.

        Raises:
            ConfigError: `memory` is given, and the shape of a model is not known.
        """
        if self.folder.is_begun(point):
            return ""
        resume = self.folder.run(point.name).description.is_file()
        try:
            preflight.check(point.config, point.stages, self.grid.ranks, resume=resume)
        except USER_ERRORS as error:
            said = " ".join(str(error).split())
            if not said.startswith(f"{self.folder.path / SHARED}/"):  # that will be there by then
                return said
        return self._too_large(point)

    def run(self, wanted: Sequence[Point], ended: Callable[[Point, Ending | None], str]) -> None:
        """Train the shared stages, then those of `wanted` that are not complete.

        Args:
            ended: told of each point, and how it ended where it is not complete; gives a line to be shown.

        Raises:
            RunError: the shared stages failed.
            Interrupted: SIGINT, SIGTERM or SIGHUP arrived; what the point at work has saved, it goes on from.
        """
        todo = [point for point in wanted if not self.folder.is_complete(point)]
        if not todo:
            return
        with signals.tolerate_closed_terminal(), signals.handle_signals(_interrupt):
            try:
                console.print(f"each point prints to {self.folder.console('POINT')}", **_PLAIN)
                self._run_shared()
                self._run_points(todo, ended)
            except KeyboardInterrupt:
                self._stop(None)

    def _run_shared(self) -> None:
        shared = self.grid.shared
        if shared is None or self.folder.is_complete(shared):
            return
        console.print(f"{SHARED}: {', '.join(shared.stages)}, once for all points", **_PLAIN)
        if ending := self._train(shared):
            raise RunError(f"the stages that all points share: {ending.reason}")

    def _run_points(self, todo: Sequence[Point], ended: Callable[[Point, Ending | None], str]) -> None:
        place = {point.name: number for number, point in enumerate(self.grid.points, start=1)}
        with progress(len(todo), "sweep", unit="points") as bar:
            for point in todo:
                started = time.monotonic()
                console.print(f"point {place[point.name]} of {len(place)}: {point.name}", **_PLAIN)
                self.folder.write_recipe(point)
                refused = self.refusal(point)
                said = ended(point, Ending("refused", refused) if refused else self._train(point))
                console.print(f"  {said}; {format_seconds(time.monotonic() - started)} in all", **_PLAIN)
                bar.advance()

    def _train(self, point: Point) -> Ending | None:
        """Train what is not complete of a point; None where all is then."""
        if outcome := self._start(point):
            if outcome.code == INTERRUPTED:
                self._stop(point)
            return self._ending(point, outcome)
        return None

    def _start(self, point: Point) -> ExitStatus | None:
        """One `rlhf` command, and how it ended; None where it did what it should."""
        directory, log = self.folder.run(point.name), self.folder.console(point.name)
        self.folder.write_recipe(point)
        log.parent.mkdir(parents=True, exist_ok=True)
        end = RunTermination(directory, point.stages)
        words = ["--stages", ",".join(point.stages), "--config", str(self.folder.recipe(point.name))]
        words += [*(["--resume"] if directory.description.is_file() else []), *(["--debug"] if self.debug else [])]
        with log.open("ab") as output:
            output.write(f"$ rlhf {' '.join(words)} --ranks {self.grid.ranks}\n".encode())
            output.flush()
            outcome = local.spawn_ranks(self.grid.ranks, local.rank_command(words), debug=self.debug, console=output)
            if outcome:
                output.write(f"{outcome.line}\n".encode())
        if outcome:
            end.conclude(outcome)
        return outcome

    def _ending(self, point: Point, outcome: ExitStatus) -> Ending:
        if outcome.kind == OutOfMemory.__name__:
            most = _PEAK.search(outcome.message.replace(",", ""))
            peak = parse_bytes("".join(most.groups()), "peak") if most else None
            return Ending("out of memory", outcome.message, peak)
        refused = outcome.code == USER_ERROR and not self.folder.is_begun(point)
        return Ending("refused" if refused else "failed", outcome.message)

    def _too_large(self, point: Point) -> str:
        """What the plan says of a point that does not fit the device that is described."""
        if self.grid.memory is None:
            return ""
        environment, limits = describe_environment(point.alone, self.grid.ranks, self.grid.memory, None)
        for stage in point.stages:
            (plan,) = plan_stages(point.alone, [stage], environment, limits=limits)
            if not plan.fits(limits):
                return f"{stage} does not fit: {format_peak(plan, limits)}"
        return ""

    def _stop(self, point: Point | None) -> NoReturn:
        """Say what is there, and how to go on."""
        complete = sum(map(self.folder.is_complete, self.grid.points))
        saved = f"{complete} of {len(self.grid.points)} points of {self.folder.path} are complete"
        if point and (state := self.folder.run(point.name).describe_saved()):
            saved += f"; {state}"
        raise Interrupted(f"{saved}; to continue: {get_command_line()}")


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt
