"""Redirect what this process, its libraries and its child processes print."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def redirect_fd(source: int, target: int) -> Iterator[None]:
    """Send to file descriptor `target` what is written to `source` in this block.

    A process that lacks one of them, such as one without standard output, is left unchanged.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            saved = os.dup(source)
            stack.callback(os.close, saved)
            _flush()
            os.dup2(target, source)
            stack.callback(os.dup2, saved, source)
            stack.callback(_flush)
        yield


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to standard error what Python, libraries and child processes print in this block.

    Standard output is for a command's result, which other programs may read.
    """
    with redirect_fd(1, 2), contextlib.redirect_stdout(sys.stderr):
        yield


def _flush() -> None:
    """Flush the buffers of Python and of the C library."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            stream.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)
