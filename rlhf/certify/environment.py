"""The facts to record before a device is opened: software, machine, limits, and variables with listed prefixes."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerators
from rlhf.certify.bundle import without_secrets
from rlhf.errors import summarize_error
from rlhf.runs.directory import collect_versions
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from accelerators import Accelerator

PREFIXES = ("RLHF_", "TORCH", "OMP_", "MKL_", "DS_", "SLURM_JOB_NUM", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables of this program and its libraries that are recorded, in addition to those that a backend names."""

_LIMITS = ("NOFILE", "MEMLOCK", "STACK", "NPROC", "AS", "CORE")
_CONTAINERS = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/.singularity.d": "apptainer"}


def record_machine() -> dict[str, Any]:
    """Return the facts that need no backend, and no torch."""
    return {
        "versions": collect_versions(),
        "system": _read(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
        "kernel": platform.release(),
        "processor": f"{os.cpu_count()} x {platform.machine()}",
        "memory": _read(lambda: format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))),
        "container": ", ".join(name for path, name in _CONTAINERS.items() if Path(path).exists()) or "none found",
        "disk": {str(folder): _free(folder) for folder in (Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm"))},
        "limits": {name: _read_limit(name) for name in _LIMITS if hasattr(resource, f"RLIMIT_{name}")},
        "backends": [
            {"name": report.name, "available": report.available, "reason": report.error or report.reason}
            for report in accelerators.available()
        ],
    }


def record_backend(accelerator: Accelerator) -> dict[str, Any]:
    """Return what a backend and torch state about the device and its software, before it is bound."""
    import torch

    prefixes = (*PREFIXES, *accelerator.environment_prefixes)
    return {
        "torch": {"version": torch.__version__, "build": torch.__config__.show().splitlines()},
        "device": _read(lambda: vars(accelerator.info()) | {"peak_flops": dict(accelerator.info().peak_flops)}),
        "facts": _read(
            lambda: {name: str(fact).splitlines() for name, fact in accelerator.environment_report().items()}
        ),
        "variables": listed_variables(os.environ, prefixes),
    }


def find_commit() -> str:
    """Return the commit of rlhf's sources; "" if they are no working tree of git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def listed_variables(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables whose names begin with a prefix and are not names of secrets, sorted."""
    return {name: value for name, value in sorted(without_secrets(environ).items()) if name.startswith(prefixes)}


def _read(read: Callable[[], Any]) -> Any:
    """Return a fact, or in parentheses why it cannot be read: an environment is worth recording if it is broken."""
    try:
        return read()
    except Exception as error:
        return f"({summarize_error(error)})"


def _read_limit(name: str) -> str:
    soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return " of ".join("unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard))


def _free(folder: Path) -> str:
    return str(_read(lambda: f"{format_bytes(shutil.disk_usage(folder).free)} free"))
