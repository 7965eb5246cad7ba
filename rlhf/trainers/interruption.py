"""Report the end of an incomplete run: what is saved, the command that resumes it, and the line in the stage's log.

A `RunTermination` is created before anything is written, so it can distinguish earlier contents of the folder from
those of this run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.config.schema import STAGES, Stage
from rlhf.errors import USER_ERRORS, RemoteRankError, RunError, translate_errors
from rlhf.launchers.exit_status import ExitStatus, Interrupted, find_culprit
from rlhf.reporting.console import append_line, console
from rlhf.runs.directory import RunDirectory
from rlhf.utils.process_info import current_process, get_command_line


class RunTermination:
    """The end of a run of `stages` in `directory`; create it before the run starts."""

    def __init__(self, directory: RunDirectory, stages: Sequence[Stage]) -> None:
        self._directory, self._stages = directory, stages
        self._before = directory.read_description_bytes()

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Turn errors of the block into ones that a user can act on, and log them in the stage's log.

        Raises:
            RLHFError, AcceleratorError: the user can fix it; the message says how.
            Interrupted: a signal of `rlhf.utils.signals` arrived.
            PluginError: any other error of a plugin's code.
            InternalError: any other error; its traceback is in the run directory.
        """
        folder = self._directory.path
        try:
            try:
                with translate_errors(folder, self._next_command):
                    yield
            except KeyboardInterrupt as error:
                raise Interrupted(self._describe_saved()) from error
            except (*USER_ERRORS, RemoteRankError):
                raise
            except Exception as error:
                holds_run = self._directory.description.is_file()
                raise find_culprit(error, folder if holds_run else None) from error
        except Exception as error:
            process = current_process()
            if process.rank == 0 and process.launcher != "rlhf":  # our launcher logs the end of all ranks
                self._log(ExitStatus.from_error(error))
            raise

    @contextmanager
    def notice_deletion(self) -> Iterator[None]:
        """Raise `RunError` for an error of the block, in which the run's folder is open, if somebody deleted it."""
        try:
            yield
        except Exception as error:
            if deleted := self._find_deleted(error):
                raise RunError(f"{deleted}: was deleted or moved while the run wrote to it; start it again") from error
            raise

    def conclude(self, status: ExitStatus) -> None:
        """Repair the folder after killed ranks, log how the run ended, and write the report if no rank did."""
        with suppress(RunError):  # the next start tries again
            self._directory.recover()
        self._log(status)
        records = [stage.metrics for stage in self._directory.stages if stage.metrics.is_file()]
        reported = self._directory.report.stat().st_mtime if self._directory.report.is_file() else 0.0
        if any(path.stat().st_mtime > reported for path in records):
            self.write_report()

    def write_report(self, *, show: bool = True) -> None:
        """Write the run's report, if this run has recorded a step, and print the verdict if `show` is set.

        A failure does not end a run that is done.
        """
        if not self._has_written:
            return
        from rlhf.diagnosis.records import read_run
        from rlhf.diagnosis.verdict import examine_run
        from rlhf.report.page import write_report
        from rlhf.report.terminal import print_states

        path = self._directory.report
        try:
            report = examine_run(read_run(self._directory.path))
            write_report([report], path)
        except RunError:  # no step is recorded yet
            return
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            console.print(
                f"note: {path}: could not be written ({reason}); `rlhf report {self._directory.path}` tries again",
                markup=False,
                soft_wrap=True,
            )
            return
        if not show:
            return
        console.print()
        with console.loudly():
            print_states(report)
            console.print(f"{path} explains the run; open it in a browser", markup=False, soft_wrap=True)

    def _log(self, status: ExitStatus) -> None:
        """Append how the run ended to the log of the stage that was running, if there is one."""
        logs = [stage.console for stage in map(self._directory.stage, self._stages) if not stage.done]
        if self._has_written and logs and logs[0].is_file():
            with suppress(OSError):  # a full disk may be why it ended
                append_line(logs[0], status.line)

    def _describe_saved(self) -> str:
        """Return one line: what is saved, and the command that continues; see `_next_command`."""
        directory = self._directory
        saved = directory.describe_saved() or f"nothing is saved yet in {directory.path}"
        if self._has_written and all(directory.stage(stage).done for stage in self._stages):
            return saved
        process = current_process()
        launcher = "" if process.size == 1 or process.launcher == "rlhf" else " (with the launcher that you used)"
        verb = "continue" if self._has_written else "start again"
        return f"{saved}; to {verb}{launcher}: {self._next_command()}"

    def _find_deleted(self, error: BaseException) -> Path | None:
        """Return the folder of the run, or of the stage that was running, if it is gone and the error says so.

        Without such an error, it is rank 0 that has removed a run that it was interrupted in before the first step.
        """
        if not (isinstance(error, FileNotFoundError) or re.search("does not exist|No such file", str(error))):
            return None
        unfinished = [stage.path for stage in map(self._directory.stage, self._stages) if not stage.done]
        if not self._directory.description.is_file():
            return self._directory.path
        return unfinished[0] if unfinished and not unfinished[0].is_dir() else None

    def _next_command(self) -> str:
        """Return the command that continues with the settings of this run.

        If this run has not written run.json yet, the same command starts it again: the folder is unchanged.
        """
        if not self._has_written:
            return get_command_line()
        stages = tuple(self._stages)
        names = [] if stages == STAGES else [*stages] if len(stages) == 1 else ["--stages", ",".join(stages)]
        words = ["rlhf", *names, "--output", str(self._directory.path), "--resume"]
        return shlex.join([*words, *current_process().launcher_options()])

    @property
    def _has_written(self) -> bool:
        """True if this run has written run.json; until then, the folder has only its earlier contents."""
        return self._directory.read_description_bytes() not in (None, self._before)
