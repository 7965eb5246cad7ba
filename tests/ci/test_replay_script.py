"""Test ci/replay.py: some pairs of all stages are identical, and planted changes are named at their phases."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import user_environment

SCRIPT = Path(__file__).parents[2] / "ci" / "replay.py"


@pytest.mark.slow
def test_pairs_are_identical_and_changes_are_named() -> None:
    """The first six runs are one of each kind, on one rank."""
    command = [sys.executable, str(SCRIPT), "--pairs", "24", "--faults", "3", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=user_environment(), timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "24 pairs" in done.stdout and "gradients: 0 wrong" in done.stdout
    assert done.stdout.count("right ") == 3
