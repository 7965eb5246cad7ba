"""The exit status of a command: its code, and its line on standard error.

Every exception that reaches the command line becomes an `ExitStatus`. Processes that a launcher started write their
status to a folder, so that the launcher can tell the root cause from its consequences on other ranks.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from typer import TyperException

from accelerators import PluginError, blame_plugin
from rlhf.errors import (
    USER_ERRORS,
    ConfigError,
    InvalidValuesError,
    RemoteRankError,
    RunError,
    as_resource_error,
    summarize_error,
)
from rlhf.utils.atomic_io import PARTIAL, open_no_link
from rlhf.utils.process_info import STATUS_FOLDER_VARIABLE, ProcessInfo, current_process

USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 1, 130
_ERROR, _INTERRUPTED = "rlhf: error: ", "rlhf: interrupted; "


class Interrupted(Exception):
    """The user stopped the run; the message says what is saved."""

    exit_code = INTERRUPTED


class InternalError(Exception):
    """A bug of rlhf; the message says where its traceback is."""

    exit_code = INTERNAL_ERROR


def find_culprit(error: BaseException, folder: Path | None = None) -> PluginError | InternalError:
    """Return the error for the user that names a plugin or rlhf as the cause of an unexpected `error`.

    Its traceback is saved in `folder`, or in a temporary folder, if it is a bug of rlhf.
    """
    if plugin_error := blame_plugin(error):
        return plugin_error
    rank = _current_process().rank
    try:
        if folder is None or not folder.is_dir():
            folder = Path(tempfile.mkdtemp(prefix="rlhf-"))
        path = folder / (f"traceback-rank{rank}.txt" if rank else "traceback.txt")
        with open_no_link(path, "w") as file:
            file.write("".join(traceback.format_exception(error)))
        traceback_note = f"its traceback is in {path}"
    except (OSError, RunError):  # it is a link
        traceback_note = "its traceback could not be saved"
    return InternalError(f"this is a bug of rlhf: {summarize_error(error)}; {traceback_note}; please report it")


@dataclass(frozen=True)
class ExitStatus:
    """The exit of a process.

    Attributes:
        code: the exit code.
        line: the line for standard error.
        time: the time of the error, in seconds since the epoch; infinite if it is a consequence of another rank's.
        kind: the error's class.
    """

    code: int
    line: str
    time: float
    kind: str = ""

    @classmethod
    def from_error(cls, error: BaseException) -> ExitStatus:
        """Return the exit status of an exception that ends the process."""
        if isinstance(error, KeyboardInterrupt):
            error = Interrupted("nothing was started")
        error = as_resource_error(error) or error
        if not isinstance(getattr(error, "exit_code", None), int):
            error = find_culprit(error)
        # An error that follows from another rank's is never the root cause.
        known = math.inf if isinstance(error, RemoteRankError) else time.time()
        code: int = error.exit_code  # type: ignore[attr-defined]  # checked above: rlhf's, a plugin's or typer's errors
        # All problems of a recipe are listed; any other error is one line.
        message = str(error) if isinstance(error, InvalidValuesError) else " ".join(str(error).split())
        if isinstance(error, TyperException):
            command = getattr(getattr(error, "ctx", None), "command_path", "rlhf")
            text = error.format_message().rstrip(".")
            message = f"{text} See `{command} --help`" if text.endswith("?") else f"{text}; see `{command} --help`"
        return cls(code, (_INTERRUPTED if code == INTERRUPTED else _ERROR) + message, known, type(error).__name__)

    @classmethod
    def summarize(cls, error: BaseException, *, follows: bool = False) -> ExitStatus:
        """Return a status for the other ranks while this one is still cleaning up.

        Args:
            follows: the error is a consequence of the loss of another rank.
        """
        known = math.inf if follows else time.time()
        if isinstance(error, KeyboardInterrupt):
            return cls(INTERRUPTED, f"{_INTERRUPTED}by a signal to {rank_name(_current_process().rank)}", known)
        error = as_resource_error(error) or blame_plugin(error) or error
        if isinstance(error, (*USER_ERRORS, RemoteRankError)):
            return cls(error.exit_code, _ERROR + " ".join(str(error).split()), known)
        return cls(INTERNAL_ERROR, _ERROR + summarize_error(error), known)

    @property
    def message(self) -> str:
        """The line without the prefix that every such line has."""
        return self.line.removeprefix(_ERROR).removeprefix(_INTERRUPTED)

    def prefix_with(self, name: str) -> ExitStatus:
        """Return this status with `name`, a rank, in its line, unless it is an interruption or a consequence."""
        if self.code == INTERRUPTED or self.time == math.inf:
            return self
        return replace(self, line=f"{_ERROR}{name}: {self.message}")

    def report(self) -> int:
        """Report to the launcher, or to the user if there is none, and return the exit code."""
        process = _current_process()
        if folder := os.environ.get(STATUS_FOLDER_VARIABLE):
            path = Path(folder, f"{process.rank}.json")
            path.with_suffix(PARTIAL).write_text(json.dumps(astuple(self)), encoding="utf-8")
            path.with_suffix(PARTIAL).rename(path)
        else:
            print(self.prefix_with(rank_name(process.rank)).line if process.size > 1 else self.line, file=sys.stderr)
        return self.code

    @classmethod
    def read(cls, folder: Path, rank: int) -> ExitStatus | None:
        """Return the status that a rank wrote; None if the rank ended before it wrote one."""
        path = folder / f"{rank}.json"
        return cls(*json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def find_root_cause(statuses: list[ExitStatus]) -> ExitStatus:
    """Return the status to report.

    Errors that a user can fix come first, since they end other ranks in ways that look like internal errors; then the
    earliest one.
    """
    order = {USER_ERROR: 0, INTERRUPTED: 1}  # then internal errors; a plugin's error may have any code
    return min(statuses, key=lambda status: (order.get(status.code, 2), status.time))


def rank_name(rank: int) -> str:
    """Return the name of a rank of this machine in a run on several machines."""
    return f"rank {rank} on {socket.gethostname()}"


def _current_process() -> ProcessInfo:
    try:
        return current_process()
    except ConfigError:  # this is the error to report
        return ProcessInfo()
