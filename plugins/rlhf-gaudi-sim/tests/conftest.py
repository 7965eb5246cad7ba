"""Installs the simulator for real (built by setuptools, unpacked by pip) and runs Python with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the distribution is installed."""
    base = tmp_path_factory.mktemp("gaudi-sim")
    copy, target = base / "source", base / "site"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "tests", ".*", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(copy)]
    subprocess.run(command, check=True, env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"})
    return target


@pytest.fixture(scope="session")
def python(site: Path) -> Run:
    """Run Python where the simulator is installed: python("-m", "rlhf", ..., simulated=False, env={...})."""

    def run(
        *arguments: str, simulated: bool = True, env: dict[str, str] | None = None, seconds: float = 500
    ) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("RLHF_", "PT_HPU_", "HABANA"))}
        clean |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        clean |= {"RLHF_GAUDI_SIM": "1"} if simulated else {}
        return subprocess.run(
            [sys.executable, *arguments],
            env=clean | (env or {}),
            cwd=site.parent,  # not where gaudi_sim lies as source
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    return run
