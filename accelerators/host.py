"""The host of this process: its memory, read from the operating system without torch, and its output streams."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

STATUS = Path("/proc/self/status")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def total_memory() -> int:
    """Return the bytes that this process may use: the machine's, or its control group's limit if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in map(read_text, CGROUP_LIMITS) if text.strip().isdigit()]
    return min([machine, *limits])


def resident_memory() -> tuple[int, int]:
    """Return the bytes that this process uses: now, and the maximum since the last reset.

    On a system without /proc, both are the maximum since the process started.
    """
    status = read_text(STATUS)
    now, peak = (re.search(rf"^{key}:\s*(\d+) kB$", status, re.MULTILINE) for key in ("VmRSS", "VmHWM"))
    if now and peak:
        return int(now.group(1)) * 1024, int(peak.group(1)) * 1024
    import resource

    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bytes_used = maximum if sys.platform == "darwin" else maximum * 1024  # macOS counts bytes, others kB
    return bytes_used, bytes_used


def reset_peak_memory() -> bool:
    """Reset the maximum of `resident_memory`; return whether the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # no /proc, or a container that forbids it: the maximum stays
        return False
    return True


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


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
