"""Wait for room on a full disk, so that a run continues by itself after someone has made room.

A run says how long its writes wait (`wait_for_room`). `WaitingFile` is a file whose writes wait, and continue at the
byte at which the disk was full; `retry_when_full` repeats any other action. Other ranks wait in their next collective.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from rlhf.utils import signals
from rlhf.utils.units import format_bytes, format_seconds

_FULL = {errno.EDQUOT, errno.ENOSPC}
_INTERVAL = 1.0  # seconds between two tries

T = TypeVar("T")


class _Patience(NamedTuple):
    seconds: float
    tell: Callable[[str], None]


_patience: ContextVar[_Patience | None] = ContextVar("_patience", default=None)


@contextmanager
def wait_for_room(seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Let each write of this block wait for room for at most `seconds`, and `tell` a person what is needed."""
    token = _patience.set(_Patience(seconds, tell))
    try:
        yield
    finally:
        _patience.reset(token)


def retry_when_full(act: Callable[[], T], path: Path, needed: int = 0) -> T:
    """Return the result of `act`; while it fails because the disk is full, wait and call it again.

    A signal that asks the run to end ends the wait.

    Args:
        act: writes to `path`.
        needed: the bytes that `path` lacks at least.

    Raises:
        OSError: there is still no room, or the error is another one.
    """
    started = 0.0
    while True:
        try:
            result = act()
        except OSError as error:
            patience = _patience.get()
            if error.errno not in _FULL or not patience or not patience.seconds or signals.is_end_requested():
                raise
            if not started:
                started = time.monotonic()
                patience.tell(_describe_lack(path, needed, patience.seconds))
            if time.monotonic() - started > patience.seconds:
                raise
            time.sleep(_INTERVAL)
        else:
            if started and (patience := _patience.get()):
                waited = format_seconds(time.monotonic() - started)
                patience.tell(f"{path}: there is room again after {waited}; the run continues")
            return result


class WaitingFile(io.FileIO):
    """An unbuffered file whose writes wait for room."""

    def write(self, data: Any) -> int:
        """Write what there is room for, at least one byte, and return how much; see `retry_when_full`."""
        needed = max(memoryview(data).nbytes, os.fstat(self.fileno()).st_size - self.tell())
        return retry_when_full(lambda: super(WaitingFile, self).write(data), Path(str(self.name)), needed)


def open_waiting(path: Path) -> BinaryIO:
    """Open a file for writing bytes that wait for room."""
    return cast(BinaryIO, io.BufferedWriter(WaitingFile(path, "wb")))


def _describe_lack(path: Path, needed: int, seconds: float) -> str:
    free = shutil.disk_usage(path.parent).free
    return (
        f"{path}: the disk is full: {format_bytes(needed)} more are needed, and {format_bytes(free)} are free; make "
        f"room within {seconds:g} s (engine.disk_wait), and the run continues by itself"
    )
