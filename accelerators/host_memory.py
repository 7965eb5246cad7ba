"""Memory of the machine and of this process, read from the operating system without torch."""

from __future__ import annotations

import contextlib
import os
import re
import sys
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


def reset_peak_memory() -> None:
    """Reset the maximum of `resident_memory` if the system allows it."""
    with contextlib.suppress(OSError):  # no /proc, or a container that forbids it: the maximum stays
        Path("/proc/self/clear_refs").write_text("5")


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
