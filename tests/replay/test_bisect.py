"""`rlhf bisect` names the first step and phase in which two runs differ, and what differs before them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import RunError
from rlhf.replay.bisect import bisect, compare_origins, find_first_difference, list_common_stages
from rlhf.reporting.step_records import StepRecord, StepRecorder, read_steps
from rlhf.runs.directory import RunDirectory
from tests.helpers import sets
from tests.replay.test_replay import run

Change = Callable[[StepRecord], StepRecord]


def change_rank(record: StepRecord, **fields: Any) -> StepRecord:
    return replace(record, ranks=[replace(record.ranks[0], **fields)])


def change_array(name: str, place: int, value: Any) -> Change:
    def change(record: StepRecord) -> StepRecord:
        arrays = {key: array.copy() for key, array in record.ranks[0].arrays.items()}
        arrays[name][place] = value
        return change_rank(record, arrays=arrays)

    return change


def change_digest(name: str) -> Change:
    return lambda record: change_rank(record, digests=record.ranks[0].digests | {name: 1})


CHANGES: dict[str, tuple[Change, str, str]] = {
    "rows": (lambda record: change_rank(record, rows=[7, *record.ranks[0].rows[1:]]), "rows", "other rows"),
    "order of rows": (lambda record: change_rank(record, rows=record.ranks[0].rows[::-1]), "rows", "in another order"),
    "tokens of rows": (change_digest("rows"), "rows", "the same rows have other tokens"),
    "generator": (change_digest("generator"), "rollout", "another state"),
    "tokens": (change_array("ids", 2, 0), "rollout", "other tokens were drawn"),
    "log-probabilities": (change_digest("log_probs"), "rollout", "other log-probabilities"),
    "reward": (change_array("reward", 1, 9.5), "scores", "reward of row 1: "),
    "metric": (lambda record: replace(record, metrics=record.metrics | {"grad_norm": 2.5}), "gradients", "and 2.5"),
}


@pytest.fixture
def other(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "other"))


def rewrite(folder: Path, step: int, change: Change) -> None:
    """Change a step of PPO's record."""
    place = RunDirectory(folder).stage("ppo")
    records = list(read_steps(place.steps))
    recorder = StepRecorder(place, enabled=True, resume_step=None)
    recorder.begin(records[0].session)
    for record in records:
        record = change(record) if record.step == step else record
        recorder.write(record.step, record.metrics, record.ranks)
    recorder.close()


def test_copies_do_not_differ(finished_run: Path, other: Path) -> None:
    stages = list_common_stages(finished_run, other, None)
    assert stages == ["sft", "reward", "ppo"]
    assert find_first_difference(finished_run, other, stages) == (None, 9)
    assert compare_origins(finished_run, other, stages) == []


@pytest.mark.parametrize("name", CHANGES)
def test_first_difference_of_records_is_named(finished_run: Path, other: Path, name: str) -> None:
    change, phase, words = CHANGES[name]
    rewrite(other, 2, change)
    rewrite(other, 3, CHANGES["rows"][0])
    found, compared = find_first_difference(finished_run, other, ["sft", "reward", "ppo"])
    assert found and (found.stage, found.step, found.phase, compared) == ("ppo", 2, phase, 8)
    assert words in found.text


def test_numbers_within_the_tolerance_are_equal(finished_run: Path, other: Path) -> None:
    rewrite(other, 1, lambda record: replace(record, metrics={k: v * (1 + 1e-6) for k, v in record.metrics.items()}))
    assert find_first_difference(finished_run, other, ["ppo"])[0]
    assert find_first_difference(finished_run, other, ["ppo"], 1e-4)[0] is None


def test_settings_rows_models_and_versions_are_listed(finished_run: Path, other: Path) -> None:
    description = json.loads((other / "run.json").read_text())
    description["config"]["ppo"]["clip"] = 0.3
    (source,) = description["data"]
    description["data"][source]["digest"] = "0123456789abcdef"
    description["versions"]["torch"] = "1.0"
    key = next(iter(description["stages"]["ppo"]["models"]))
    description["stages"]["ppo"]["models"][key]["identity"] = {"weights": "other"}
    (other / "run.json").write_text(json.dumps(description))
    lines = "\n".join(compare_origins(finished_run, other, ["ppo"]))
    for words in (
        "setting ppo.clip: 0.2 and 0.3",
        f"rows of {source}: ",
        f"model {key} of ppo: ",
        "version of torch: ",
    ):
        assert words in lines


def test_runs_without_common_records_are_refused(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="contains no run"):
        list_common_stages(finished_run, tmp_path, None)
    with pytest.raises(RunError, match=r"have no dpo with a steps\.bin in both"):
        list_common_stages(finished_run, finished_run, "dpo")


def test_steps_of_one_run_only_are_named(finished_run: Path, other: Path) -> None:
    place = RunDirectory(other)
    place.stage("reward").steps.unlink()
    place.stage("ppo").steps.write_bytes(place.stage("ppo").steps.read_bytes()[:-9])
    result = bisect(finished_run, other, computes=False)
    assert result.found is None and result.compared == 5
    assert result.not_compared == [
        f"2 steps of ppo are compared: {finished_run} has 3, {other} has 2; what follows step 2 is damaged or still "
        "being written",
        f"reward is not compared: only {finished_run} has its records",
    ]
    assert bisect(finished_run, other, "sft", computes=False).not_compared == []
    place.stage("ppo").steps.write_bytes(b"")
    with pytest.raises(RunError, match=r"no step of both runs can be read: 0 steps of ppo .* its content is damaged"):
        bisect(finished_run, other, "ppo", computes=False)


@pytest.mark.slow
def test_step_is_computed_again_for_both(rlhf: Any, finished_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    rlhf("sft", "--output", output, *sets("sft.optimizer.betas=[0.5, 0.95]"))
    done = run("bisect", finished_run, output, "--json")
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    # The first step of Adam is the same with any beta, but for rounding; the loss of the third is the first that shows.
    assert (summary["stage"], summary["step"], summary["phase"]) == ("sft", 3, "loss")
    assert summary["origins"] == ["setting sft.optimizer.betas.0: 0.9 and 0.5"]
    assert (summary["computed"]["step"], summary["computed"]["phase"]) == (1, "update")
