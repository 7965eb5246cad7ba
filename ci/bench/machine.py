"""What a benchmark ran on, for its results file."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            model = value.strip() if key.strip() == "model name" else model
            flags = value if key.strip() == "flags" else flags
    except OSError:
        pass  # no Linux: the platform's own word stays
    native = [name for name in ("avx512_bf16", "amx_bf16") if name in flags.split()]
    return {"model": model, "cores": os.cpu_count(), "bf16": native, "system": platform.platform()}


def results_file(folder: Path, benchmark: str) -> Path:
    """Where the results of `benchmark` on this machine go."""
    return folder / "results" / f"{benchmark}-{machine()['model'].replace(' ', '-').lower()}.json"
