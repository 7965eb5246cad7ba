"""Facts about the machine, read from the operating system without torch.

The cpu backend's probe and class use them; where a system does not tell, the answer is the best that it does tell.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from pathlib import Path

BF16 = ("avx512_bf16", "amx_bf16")
"""Extensions that multiply bf16."""

CPUINFO = Path("/proc/cpuinfo")
STATUS = Path("/proc/self/status")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's product name, or its architecture where the system gives no name."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(CPUINFO), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction-set extensions of the processor, as Linux names them; empty elsewhere."""
    match = re.search(r"^flags\s*:\s*(.+)$", _read(CPUINFO), re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def native_bf16() -> list[str]:
    """The processor's extensions that multiply bf16; empty where there are none."""
    return [flag for flag in BF16 if flag in cpu_flags()]


def total_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in map(_read, CGROUP_LIMITS) if text.strip().isdigit()]
    return min([machine, *limits])


def resident_memory() -> tuple[int, int]:
    """Bytes of memory that this process holds: now, and at most since the last reset.

    Where the system has no /proc, both are the most since the process began.
    """
    status = _read(STATUS)
    figures = [re.search(rf"^{key}:\s*(\d+) kB$", status, re.MULTILINE) for key in ("VmRSS", "VmHWM")]
    if figures[0] and figures[1]:
        return int(figures[0].group(1)) * 1024, int(figures[1].group(1)) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others kB
    return peak_bytes, peak_bytes


def reset_peak_memory() -> None:
    """Start the peak of `resident_memory` anew where the system allows it."""
    with contextlib.suppress(OSError):  # no /proc, or a container that forbids it: the peak stays the process's own
        Path("/proc/self/clear_refs").write_text("5")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
