"""How a run ends before it is done: what it has left, the command that goes on from there, and the line in its log.

A run's folder and its stages flow in before anything is written, so that what was there can be told from what this run
has left; errors as a user can use them flow out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.config.schema import STAGES, Stage
from rlhf.errors import USER_ERRORS, OutOfMemory, RemoteRankError, RunError
from rlhf.launchers.exit_status import ExitStatus, InternalError, Interrupted, as_resource_error
from rlhf.reporting.console import append_line
from rlhf.runs.directory import RunDirectory
from rlhf.utils.command_line import get_command_line
from rlhf.utils.process_info import current_process


class RunTermination:
    """The ending of a run of `stages` in `directory`; made before the run begins."""

    def __init__(self, directory: RunDirectory, stages: Sequence[Stage]) -> None:
        self._directory, self._stages = directory, stages
        self._before = _contents(directory.description)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Errors of the block become those that a user can use, and stand in the stage's log.

        Raises:
            RLHFError, AcceleratorError: something that the user can fix; the message says how.
            Interrupted: SIGINT, SIGTERM or SIGHUP arrived.
            InternalError: anything else; its traceback is in the run directory.
        """
        try:
            try:
                yield
            except KeyboardInterrupt as error:
                raise Interrupted(self._how_to_go_on()) from error
            except Exception as error:
                folder, go_on = self._directory.path, f"run: {self._next_command()}"
                if isinstance(error, OutOfMemory):
                    raise OutOfMemory(f"{error}; {go_on}") from error
                if lack := as_resource_error(error, folder, go_on):
                    raise lack from error
                if isinstance(error, (*USER_ERRORS, RemoteRankError)):
                    raise
                raise InternalError.from_error(
                    error, folder if self._directory.description.is_file() else None
                ) from error
        except Exception as error:
            if (
                current_process().rank == 0 and current_process().launcher != "rlhf"
            ):  # which knows of all ranks how they ended
                self.log(ExitStatus.from_error(error))
            raise

    def conclude(self, outcome: ExitStatus) -> None:
        """Undo what ranks that had to be killed have left in the folder, and log how the run ended."""
        with suppress(RunError):  # the next start tries again
            self._directory.recover()
        self.log(outcome)

    def log(self, outcome: ExitStatus) -> None:
        """Add how the run ended to what the terminal showed of the stage that it was in, if it had begun one."""
        logs = [stage.console for stage in map(self._directory.stage, self._stages) if not stage.done]
        if self._is_ours and logs and logs[0].is_file():
            with suppress(OSError):  # the disk may be full, which is how it ended
                append_line(logs[0], outcome.line)

    def _how_to_go_on(self) -> str:
        """What is saved, and the command that continues from there; see `_next_command`."""
        directory = self._directory
        saved = directory.describe_saved() or f"nothing is saved yet in {directory.path}"
        if self._is_ours and all(directory.stage(stage).done for stage in self._stages):
            return saved
        elsewhere = (
            ""
            if current_process().size == 1 or current_process().launcher == "rlhf"
            else " (with the launcher that you used)"
        )
        verb = "continue" if self._is_ours else "start again"
        return f"{saved}; to {verb}{elsewhere}: {self._next_command()}"

    def _next_command(self) -> str:
        """The command that goes on with the settings of this run.

        Where run.json is what it was before, so is all that this run was to replace or to go on from.
        """
        if not self._is_ours:
            return get_command_line()
        stages = tuple(self._stages)
        named = [] if stages == STAGES else [*stages] if len(stages) == 1 else ["--stages", ",".join(stages)]
        words = ["rlhf", *named, "--output", str(self._directory.path), "--resume"]
        return shlex.join([*words, *current_process().options()])

    @property
    def _is_ours(self) -> bool:
        """Whether the folder holds what this run has left, and not what was there before it."""
        return _contents(self._directory.description) not in (None, self._before)


def _contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
