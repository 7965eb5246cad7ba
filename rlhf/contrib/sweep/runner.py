"""Run the points of a sweep one after the other, each in separate processes.

Complete points are kept, interrupted ones are resumed, and a failed point does not stop the others.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rlhf.contrib.sweep.directory import PointOutcome, SweepDirectory
from rlhf.contrib.sweep.grid import SHARED, Grid, Point
from rlhf.errors import USER_ERRORS, OutOfMemory, RunError
from rlhf.launchers import local
from rlhf.launchers.exit_status import INTERRUPTED, USER_ERROR, Interrupted
from rlhf.memory.advice import plan_stages
from rlhf.memory.environment import describe_environment
from rlhf.memory.report import format_peak
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress
from rlhf.trainers import preflight
from rlhf.trainers.interruption import RunTermination
from rlhf.utils import signals
from rlhf.utils.process_info import get_command_line
from rlhf.utils.units import format_seconds, parse_bytes

_PEAK = re.compile(r"\bpeak ([\d.]+) ([MG]iB)\b")  # as written by rlhf.trainers.oom
_PLAIN: dict[str, Any] = {"markup": False, "soft_wrap": True}


@dataclass(frozen=True)
class SweepRunner:
    """Runs the points of a grid in a sweep's folder; with `debug`, their logs contain what --debug shows."""

    grid: Grid
    folder: SweepDirectory
    debug: bool = False

    def find_refusal(self, point: Point) -> str:
        """Return why a point cannot be trained, as far as that is known before it starts; empty if nothing is known.

        Raises:
            ConfigError: `memory` is set, and the shape of a model is not known.
        """
        if self.folder.is_started(point):
            return ""
        resume = self.folder.run(point.name).description.is_file()
        try:
            preflight.check(point.config, point.stages, self.grid.ranks, resume=resume)
        except USER_ERRORS as error:
            message = " ".join(str(error).split())
            if not message.startswith(f"{self.folder.path / SHARED}/"):  # the shared stages are trained first
                return message
        return self._too_large(point)

    def run(self, points: Sequence[Point], report_point: Callable[[Point, PointOutcome | None], str]) -> None:
        """Train the shared stages, then the points that are not complete.

        Args:
            points: the points to train.
            report_point: called after each point with its outcome, None if it is complete; returns a line to print.

        Raises:
            RunError: the shared stages failed.
            Interrupted: a signal of `rlhf.utils.signals` arrived; the same command resumes the point.
        """
        todo = [point for point in points if not self.folder.is_complete(point)]
        if not todo:
            return
        shared, numbers = self.grid.shared, {point.name: place for place, point in enumerate(self.grid.points, start=1)}
        with signals.tolerate_closed_terminal():
            try:
                console.print(f"the output of each point is in {self.folder.console('POINT')}", **_PLAIN)
                if shared and not self.folder.is_complete(shared):
                    console.print(f"{SHARED}: {', '.join(shared.stages)}, once for all points", **_PLAIN)
                    self.folder.write_recipe(shared)
                    if outcome := self._train(shared):
                        raise RunError(f"the shared stages failed: {outcome.reason}")
                with progress(len(todo), "sweep", unit="points") as bar:
                    for point in todo:
                        console.print(f"point {numbers[point.name]} of {len(numbers)}: {point.name}", **_PLAIN)
                        started = time.monotonic()
                        self.folder.write_recipe(point)
                        self.folder.record_bases(point)
                        refusal = self.find_refusal(point)
                        line = report_point(point, PointOutcome("refused", refusal) if refusal else self._train(point))
                        console.print(f"  {line}; {format_seconds(time.monotonic() - started)} in total", **_PLAIN)
                        bar.advance()
            except KeyboardInterrupt:
                self._stop(None)

    def _train(self, point: Point) -> PointOutcome | None:
        """Run `rlhf` for the stages of a point that are not complete; return None if all are complete afterwards."""
        directory, log = self.folder.run(point.name), self.folder.console(point.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        termination = RunTermination(directory, point.stages)
        arguments = ["--stages", ",".join(point.stages), "--config", str(self.folder.recipe(point.name))]
        arguments += [*(["--resume"] if directory.description.is_file() else []), *(["--debug"] if self.debug else [])]
        with log.open("ab") as output:
            command = ["rlhf", *arguments, "--ranks", str(self.grid.ranks)]
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            status = local.spawn_ranks(self.grid.ranks, local.rank_command(arguments), debug=self.debug, console=output)
            if status:
                output.write(f"{status.line}\n".encode())
        if not status:
            return None
        termination.conclude(status)
        if status.code == INTERRUPTED:
            self._stop(point)
        if status.kind == OutOfMemory.__name__:
            match = _PEAK.search(status.message.replace(",", ""))
            peak = parse_bytes("".join(match.groups()), "peak") if match else None
            return PointOutcome("out of memory", status.message, peak)
        refused = status.code == USER_ERROR and not self.folder.is_started(point)
        return PointOutcome("refused" if refused else "failed", status.message)

    def _too_large(self, point: Point) -> str:
        """Return why a point does not fit in the memory of `grid.memory`; empty if it does, or without `memory`."""
        if self.grid.memory is None:
            return ""
        environment = describe_environment(point.alone, self.grid.ranks, self.grid.memory, None)
        for stage in point.stages:
            (plan,) = plan_stages(point.alone, [stage], environment)
            if not plan.fits(environment):
                return f"{stage} does not fit: {format_peak(plan, environment)}"
        return ""

    def _stop(self, point: Point | None) -> NoReturn:
        """Raise `Interrupted` with what is saved, and the command that resumes."""
        complete = sum(map(self.folder.is_complete, self.grid.points))
        saved = f"{complete} of {len(self.grid.points)} points of {self.folder.path} are complete"
        if point and (state := self.folder.run(point.name).describe_saved()):
            saved += f"; {state}"
        raise Interrupted(f"{saved}; to continue: {get_command_line()}")
