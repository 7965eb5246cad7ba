"""Facts about the processor, read from the operating system without torch."""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path

from accelerators.host import processor_quota, read_text

BF16 = ("avx512_bf16", "amx_bf16")
"""Extensions that multiply bf16."""

CPUINFO = Path("/proc/cpuinfo")


def cores() -> int:
    """Return the number of cores that this process may use: those that it may run on, or a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = processor_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_model() -> str:
    """Return the processor's product name, or its architecture if the system gives no name."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_text(CPUINFO), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Return the processor's instruction-set extensions by Linux's names; empty on other systems."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", read_text(CPUINFO), re.MULTILINE)  # of x86, of ARM
    return frozenset(match.group(1).split()) if match else frozenset()


def native_bf16() -> list[str]:
    """Return the processor's extensions that multiply bf16."""
    return [flag for flag in BF16 if flag in cpu_flags()]
