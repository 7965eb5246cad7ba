"""`rlhf replay` computes a recorded step again, bit for bit, and refuses what it cannot repeat."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import ConfigError, RunError
from rlhf.replay.replay import find_step
from rlhf.reporting.step_records import StepRecorder, read_steps
from rlhf.runs.directory import RunDirectory
from tests.helpers import sets, user_environment


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process: a fork that leaves its parent's frames would delete the job's folder."""
    command = [sys.executable, "-m", "rlhf", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=user_environment(), timeout=600)


def fingerprint(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def copied(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "distill"])
def test_a_step_equals_its_record_and_the_run_is_not_touched(
    finished_run: Path, finished_distill: Path, stage: str
) -> None:
    folder = finished_distill if stage == "distill" else finished_run
    before = fingerprint(folder)
    done = run("replay", folder, "--stage", stage, "--step", 2)
    assert done.returncode == 0 and "equals the record bit for bit" in done.stdout, done.stderr
    assert fingerprint(folder) == before


@pytest.mark.slow
def test_a_step_that_was_not_taken_is_found_again_with_its_origin(rlhf: Any, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = rlhf("sft", "--output", output, *sets("sft.optimizer.learning_rate=1e30"), check=False)
    assert done.returncode == 2 and "are not finite at step 2" in done.stderr, done.stderr
    (kept,) = (output / "sft" / "not-finite").iterdir()
    done = run("replay", output, "--step", 2)
    origin = json.loads(kept.read_text())
    assert done.returncode == 0, done.stderr
    assert f"not finite are in the {origin['quantity']} of {origin['layer']}" in done.stdout
    assert f"the run kept its rows in {kept}" in done.stdout
    kept.write_text(json.dumps(origin | {"layer": "model.layers.7"}))
    done = run("replay", output, "--step", 2)
    assert done.returncode == 3 and "began elsewhere" in done.stdout


@pytest.mark.slow
def test_a_change_is_named_at_the_first_phase_that_moves(finished_run: Path, tmp_path: Path) -> None:
    options = ("--stage", "sft", "--step", 2, "--change", "sft.optimizer.learning_rate=0.5", "--json")
    record = tmp_path / "step.json"
    done = run("replay", finished_run, *options, "--record", record)
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert summary["equal"] and {item["phase"] for item in summary["moved"]} == {"update"}
    kept = json.loads(record.read_text())
    assert {entry["phase"] for entry in kept["tensors"]} == {"rows", "scores", "loss", "gradients", "update"}


@pytest.mark.slow
def test_a_record_that_was_changed_differs(copied: Path) -> None:
    place = RunDirectory(copied).stage("sft")
    records = list(read_steps(place.steps))
    recorder = StepRecorder(place, enabled=True, resume_step=None)
    recorder.begin(records[0].session)
    for record in records:
        recorder.write(record.step, record.metrics | {"grad_norm": 1.5}, record.ranks)
    recorder.close()
    done = run("replay", copied, "--stage", "sft", "--step", 1)
    assert done.returncode == 3 and "first in gradients: grad_norm is" in done.stdout, done.stderr


def test_unknown_steps_stages_and_folders_are_refused(finished_run: Path, tmp_path: Path) -> None:
    for arguments, error, words in [
        ((finished_run, 9, "ppo"), RunError, "has steps 1 to 3, and not step 9"),
        ((finished_run, 1, None), ConfigError, "has steps of sft, reward, ppo; choose with --stage"),
        ((finished_run, 1, "dpo"), RunError, "has no dpo/steps.bin"),
        ((finished_run, 1, "pposs"), ConfigError, "no stage 'pposs'"),
        ((tmp_path, 1, None), RunError, "contains no run"),
    ]:
        with pytest.raises(error, match=words):
            find_step(*arguments)


def test_a_file_without_a_folder_is_refused_before_anything_is_computed(rlhf: Any, finished_run: Path) -> None:
    arguments = ("replay", finished_run, "--stage", "ppo", "--step", 2, "--record", "absent/s.json")
    done = rlhf(*arguments, check=False, recipe=None)
    assert done.returncode == 2 and "--record absent/s.json: its folder is missing" in done.stderr


def test_an_edited_description_is_noticed(copied: Path) -> None:
    find_step(copied, 2, "ppo")
    description = json.loads((copied / "run.json").read_text())
    description["config"]["ppo"]["clip"] = 0.31
    (copied / "run.json").write_text(json.dumps(description))
    with pytest.raises(RunError, match=r"run\.json: has other settings .*ppo\.clip \(0\.2, now 0\.31\).*--change"):
        find_step(copied, 2, "ppo")
    find_step(copied, 2, "sft")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 2}, r"step 1 was taken with other settings than step 2, .*ranks \(2, then 1\)"),
        ({"versions": {"rlhf": "0.0.1"}}, "recorded by rlhf 0.0.1"),
    ],
)
def test_other_sessions_are_refused(copied: Path, changes: dict[str, Any], words: str) -> None:
    place = RunDirectory(copied).stage("sft")
    records = list(read_steps(place.steps))
    place.steps.unlink()
    for record in records[:2]:
        recorder = StepRecorder(place, enabled=True, resume_step=record.step - 1 if record.step > 1 else None)
        is_changed = record.step == (2 if "versions" in changes else 1)
        recorder.begin({**record.session, **(changes if is_changed else {})})
        recorder.write(record.step, record.metrics, record.ranks)
        recorder.close()
    with pytest.raises(RunError, match=words):
        find_step(copied, 2, "sft")
