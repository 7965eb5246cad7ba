"""How a command ends: the exit code and the one line that goes with it.

Every exception that reaches the command line becomes an `ExitStatus`. Processes that a launcher started leave
theirs in a folder, so that the launcher can tell the cause from its consequences on the other ranks.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from typer import TyperException

from accelerators import find_out_of_memory
from rlhf.errors import USER_ERRORS, ConfigError, OutOfMemory, RemoteRankError, RLHFError, RunError
from rlhf.utils.atomic_io import PARTIAL
from rlhf.utils.process_info import FOLDER_VARIABLE, ProcessInfo, current_process

USER, DEFECT, INTERRUPTED = 2, 1, 130
_ERROR, _INTERRUPTED = "rlhf: error: ", "rlhf: interrupted; "
# torch.save raises no OSError where the disk is full.
_NO_ROOM = re.compile(r"PytorchStreamWriter failed|inline_container\.cc.* unexpected pos|no space left", re.IGNORECASE)
_FULL = {errno.EDQUOT, errno.ENOSPC, errno.EFBIG}
_RIGHTS = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_PATH = {errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}


class Interrupted(Exception):
    """The user stopped the run; the message says what is saved."""

    exit_code = INTERRUPTED


class InternalError(Exception):
    """An error that no user could have caused; the message says where its traceback is."""

    exit_code = DEFECT

    @classmethod
    def from_error(cls, error: BaseException, folder: Path | None = None) -> InternalError:
        """Save the traceback of `error` in `folder`, or where temporary files go."""
        rank = _place().rank
        try:
            if folder is None or not folder.is_dir():
                folder = Path(tempfile.mkdtemp(prefix="rlhf-"))
            path = folder / (f"traceback-rank{rank}.txt" if rank else "traceback.txt")
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            where = f"its traceback is in {path}"
        except OSError:
            where = "its traceback could not be saved"
        return cls(f"this is a defect of rlhf: {_shortened(_text(error))}; {where}; please report it")


@dataclass(frozen=True)
class ExitStatus:
    """An exit code, the line for standard error, when it was known (seconds since the epoch), and the error's class."""

    code: int
    line: str
    time: float
    kind: str = ""

    @classmethod
    def from_error(cls, error: BaseException) -> ExitStatus:
        if isinstance(error, KeyboardInterrupt):
            error = Interrupted("nothing was started")
        error = as_resource_error(error) or error
        if not isinstance(getattr(error, "exit_code", None), int):
            error = InternalError.from_error(error)
        # A rank that only followed another is never the cause.
        known = math.inf if isinstance(error, RemoteRankError) else time.time()
        code: int = error.exit_code  # type: ignore[attr-defined]  # checked above: rlhf's, a plugin's or typer's errors
        said = " ".join(str(error).split())
        if isinstance(error, TyperException):
            command = getattr(getattr(error, "ctx", None), "command_path", "rlhf")
            said = f"{error.format_message().rstrip('.')}; see `{command} --help`"
        return cls(code, (_INTERRUPTED if code == INTERRUPTED else _ERROR) + said, known, type(error).__name__)

    @classmethod
    def summarize(cls, error: BaseException, *, follows: bool = False) -> ExitStatus:
        """What to tell the other ranks while this one still ends.

        Args:
            follows: it is no cause: the loss of another rank, as it shows here.
        """
        known = math.inf if follows else time.time()
        if isinstance(error, KeyboardInterrupt):
            return cls(INTERRUPTED, f"{_INTERRUPTED}by a signal to {rank_name(_place().rank)}", known)
        error = as_resource_error(error) or error
        if isinstance(error, (*USER_ERRORS, RemoteRankError)):
            return cls(error.exit_code, _ERROR + " ".join(str(error).split()), known)
        return cls(DEFECT, _ERROR + _shortened(_text(error)), known)

    @property
    def message(self) -> str:
        """The line without what every such line begins with."""
        return self.line.removeprefix(_ERROR).removeprefix(_INTERRUPTED)

    def prefix_with(self, who: str) -> ExitStatus:
        """This outcome in the name of a rank, where it is an error of its own."""
        if self.code == INTERRUPTED or self.time == math.inf:
            return self
        return replace(self, line=f"{_ERROR}{who}: {self.message}")

    def report(self) -> int:
        """Tell the launcher, or the user where there is none; gives the exit code."""
        if folder := os.environ.get(FOLDER_VARIABLE):
            self.write(Path(folder), _place().rank)
        else:
            print(self.prefix_with(rank_name(_place().rank)).line if _place().size > 1 else self.line, file=sys.stderr)
        return self.code

    def write(self, folder: Path, rank: int) -> None:
        """Leave the outcome of a rank for the process that started it."""
        path = folder / f"{rank}.json"
        path.with_suffix(PARTIAL).write_text(json.dumps(astuple(self)), encoding="utf-8")
        path.with_suffix(PARTIAL).rename(path)

    @classmethod
    def read(cls, folder: Path, rank: int) -> ExitStatus | None:
        """The outcome that a rank left; None where it was ended before it could."""
        path = folder / f"{rank}.json"
        return cls(*json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def as_resource_error(
    error: BaseException, output: Path | None = None, go_on: str = "continue with --resume"
) -> RLHFError | None:
    """What a user can do about an error that says that memory, disk or rights are lacking; None for any other error.

    Args:
        output: the folder of the run; files elsewhere are not helped by another one.
        go_on: how the run continues when there is room again.
    """
    if isinstance(error, OSError) and error.errno in _FULL | _RIGHTS | _NO_PATH:
        named = error.filename or output
        ours = named is None or (output and Path(str(named)).absolute().is_relative_to(output.absolute()))
        if error.errno in _FULL:
            remedy = f"make room, then {go_on}" if ours else "make room there"
        elif ours:
            remedy = "choose another --output"
        else:
            remedy = "check the permissions of this path" if error.errno in _RIGHTS else "check this path"
        return RunError(f"{named}: {error.strerror}; {remedy}" if named else f"{error.strerror}; {remedy}")
    if lack := find_out_of_memory(error):
        return OutOfMemory(
            f"not enough memory ({_shortened(_text(lack), 160)}); lower the stage's micro_batch_size or set "
            "model.gradient_checkpointing=true, also with --resume (shorter data.max_*_length need a new --output)"
        )
    of_a_library = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    if of_a_library and _NO_ROOM.search(_text(error)):
        place = f"{output}: " if output else ""
        return RunError(f"{place}the disk is full ({_shortened(_text(error), 160)}); make room, then {go_on}")
    return None


def find_root_cause(outcomes: list[ExitStatus]) -> ExitStatus:
    """The one to report: what a user did comes first, for it brings down other ranks in ways that look like defects."""
    order = {USER: 0, INTERRUPTED: 1}  # then defects; a plugin's error may have any code
    return min(outcomes, key=lambda outcome: (order.get(outcome.code, 2), outcome.time))


def rank_name(rank: int) -> str:
    """What a rank of this machine is called where there are several machines."""
    return f"rank {rank} on {socket.gethostname()}"


def _place() -> ProcessInfo:
    try:
        return current_process()
    except ConfigError:  # which is the outcome
        return ProcessInfo()


def _text(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _shortened(text: str, length: int = 300) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
