"""ci/test.sh rejects a misspelt package at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "test.sh"


@pytest.mark.parametrize("name", ["dat", "tests/dat", "tests/data/test_cache.py/", "tests/data/test_gone.py::test_it"])
def test_unknown_package_is_one_line_with_the_packages(name: str) -> None:
    done = subprocess.run(["bash", SCRIPT, name, "-k", "split"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {name}: no such package or file; the packages are: accelerators api ")
    assert line.endswith(" contrib/deepspeed_chat contrib/sweep ")


@pytest.mark.parametrize("name", ["data", "data/", "contrib/sweep", "contrib/sweep/"])
def test_package_is_known_with_or_without_a_slash(name: str) -> None:
    environment = os.environ | {"PYTHON": "missing"}  # stops the script at the next step
    done = subprocess.run(["bash", SCRIPT, name], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stderr.startswith("error: missing cannot be run")
