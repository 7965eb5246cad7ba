"""What a benchmark ran on, for its results file."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from accelerators import host


def machine() -> dict[str, Any]:
    return {
        "model": host.cpu_model(),
        "cores": host.cores(),
        "bf16": host.native_bf16(),
        "system": platform.platform(),
    }


def results_file(folder: Path, benchmark: str) -> Path:
    """Where the results of `benchmark` on this machine go."""
    return folder / "results" / f"{benchmark}-{host.cpu_model().replace(' ', '-').lower()}.json"
