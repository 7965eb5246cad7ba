"""Reports and cards at the end of a run: written however it ends, and a fault in them ends nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf.launchers.exit_status import ExitStatus
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.interruption import RunTermination
from tests.diagnosis.records import write_run
from tests.forks import Forks

FAULTY = """
import sys
import rlhf.diagnosis.verdict, rlhf.report.card
from rlhf.config.schema import load_config
from rlhf.trainers.run import run

def fail(*arguments):
    raise KeyError("a fault of the report")

rlhf.diagnosis.verdict.examine_run = rlhf.report.card.examine_run = fail
config = load_config(sys.argv[1], [f"output={sys.argv[2]}", "sft.max_steps=2"])
hook = sys.excepthook
run(config, stages=("sft",), accelerator="cpu")
assert sys.excepthook is hook
print("the program continues")
"""


@pytest.mark.slow
def test_fault_of_the_report_ends_no_run(rlhf: Any, forks: Forks, tmp_path: Path) -> None:
    done = forks.python("-c", FAULTY, str(rlhf.recipe), str(tmp_path / "run"), timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("the program continues")
    notes = [line for line in done.stdout.splitlines() if "a fault of the report" in line]
    assert len(notes) == 2 and "its model cards cannot be written" in notes[0]
    assert "report.html: could not be written" in notes[1] and "`rlhf report" in notes[1]
    summary = json.loads((tmp_path / "run/sft/stage.json").read_text())
    assert summary["steps"] == 2 and (tmp_path / "run/sft/model/model.safetensors").is_file()


@pytest.mark.parametrize("is_reported", [False, True])
def test_report_of_killed_ranks_is_written_by_the_process_that_started_them(tmp_path: Path, is_reported: bool) -> None:
    """If rank 0 has written it after the last record, it stays."""
    termination = RunTermination(RunDirectory(tmp_path / "run"), ("sft",))
    run = write_run(tmp_path / "run", {"sft": {"loss": [2.0, 1.0]}})
    if is_reported:
        run.directory.report.write_text("by rank 0")
        later = run.stages[0].directory.metrics.stat().st_mtime + 5
        os.utime(run.directory.report, (later, later))
    termination.conclude(ExitStatus(1, "rank 1 was killed", 0.0))
    page = run.directory.report.read_text(encoding="utf-8")
    assert (page == "by rank 0") == is_reported and ("<!DOCTYPE html>" in page) != is_reported


def test_run_that_was_refused_leaves_the_report_of_the_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"sft": {"loss": [2.0, 1.0]}})
    termination = RunTermination(run.directory, ("sft",))  # it has written nothing since
    termination.conclude(ExitStatus(2, "refused", 0.0))
    assert not run.directory.report.exists()
