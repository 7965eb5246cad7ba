"""Faults at random moments: the counts that the docs show, and a few strikes of each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci" / "chaos.py"


def test_docs_show_the_kept_counts_and_nothing_is_lost() -> None:
    table = subprocess.run([sys.executable, SCRIPT, "--table"], capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert table.strip() in page
    assert all(row.endswith("| 0 |") for row in table.splitlines()[2:]), "the last column counts what was lost"


@pytest.mark.slow
def test_strikes_lose_nothing() -> None:
    command = [sys.executable, SCRIPT, "--kills", "3", "--signals", "4", "--damages", "8", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(kind in done.stdout for kind in ("SIGKILL", "file "))
