"""The folder of a run, or of its stage, is deleted while the run writes to it: one line, no bug report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import RunError
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.interruption import RunTermination
from tests.forks import Forks

SCRIPT = """
import shutil, sys
import rlhf.cli
from rlhf.trainers import supervised

deleted, recipe, output = sys.argv[1:]
step = supervised.SFTTrainer.step

def delete(self, index):
    if index == 1:
        shutil.rmtree(deleted)
    return step(self, index)

supervised.SFTTrainer.step = delete
sys.argv = ["rlhf", "sft", "--config", recipe, "--output", output, "--set", "sft.max_steps=3", "--accelerator", "cpu"]
rlhf.cli.main()
"""


@pytest.mark.parametrize("deleted", [".", pytest.param("sft", marks=pytest.mark.slow)], ids=["the run", "the stage"])
def test_folder_that_is_deleted_during_the_run_is_named(rlhf: Any, forks: Forks, tmp_path: Path, deleted: str) -> None:
    output = tmp_path / "run"
    done = forks.python("-c", SCRIPT, str(output / deleted), str(rlhf.recipe), str(output), timeout=300)
    assert done.returncode == 2, done.stderr
    line = f"rlhf: error: {output / deleted}: was deleted or moved while the run wrote to it; start it again"
    assert done.stderr.splitlines() == [line], "and no traceback of a library's thread"


def test_lost_rank_of_a_run_that_rank_0_has_removed_is_no_deletion(tmp_path: Path) -> None:
    """Rank 0 removes a run that was interrupted before its first step; its peers then lose the connection."""
    termination = RunTermination(RunDirectory(tmp_path / "run"), ["sft"])
    with pytest.raises(RuntimeError, match="closed by peer"), termination.notice_deletion():
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    with pytest.raises(RunError, match="was deleted or moved"), termination.notice_deletion():
        (tmp_path / "run" / "run.json").read_text()
