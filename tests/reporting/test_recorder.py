"""Records: a line of JSON and TensorBoard events for each step, each once, none lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf.reporting.recorder import Recorder, read_heldout
from rlhf.runs.directory import RunDirectory
from rlhf.runs.stage_directory import StageDirectory


@pytest.fixture
def stage(tmp_path: Path) -> StageDirectory:
    return RunDirectory(tmp_path).stage("sft")


def records(stage: StageDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stage.metrics.read_text(encoding="utf-8").split("\n") if line]


def scalars(stage: StageDirectory, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(stage.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_records_are_on_disk_before_the_recorder_is_closed(stage: StageDirectory) -> None:
    recorder = Recorder(stage)
    recorder.log(3, {"loss": 0.5, "kl": float("nan"), "reward": float("inf")})
    [record] = records(stage)
    assert record.pop("time") > 0
    assert record == {"stage": "sft", "step": 3, "loss": 0.5, "kl": None, "reward": None}
    assert scalars(stage, "sft/loss") == [(3, 0.5)]
    recorder.text("samples", 4, "What says the cow?\n*moo*")
    assert records(stage)[1]["tag"] == "samples" and records(stage)[1]["text"] == "What says the cow?\n*moo*"
    events = EventAccumulator(str(stage.tensorboard))
    events.Reload()
    assert events.Tags()["tensors"] == ["sft/samples/text_summary"]
    recorder.close()


def test_resume_drops_records_of_steps_to_be_repeated(stage: StageDirectory) -> None:
    with Recorder(stage) as recorder:
        for step in (1, 2, 3):
            recorder.log(step, {"loss": float(step)})
    with Recorder(stage, resume_step=1) as recorder:
        recorder.log(2, {"loss": 20.0})
    assert [(record["step"], record["loss"]) for record in records(stage)] == [(1, 1.0), (2, 20.0)]
    assert scalars(stage, "sft/loss") == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize("cut", [-5, -40], ids=["within a character", "within a key"])
def test_resume_drops_only_a_line_that_a_crash_cut_short(stage: StageDirectory, cut: int) -> None:
    with Recorder(stage) as recorder:
        recorder.text("completion", 1, "first\u2028second\u0085third")  # some call these the ends of lines
        recorder.log(2, {"loss": 2.0})
        recorder.text("completion", 3, "牛")
    stage.metrics.write_bytes(stage.metrics.read_bytes()[:cut])
    assert stage.started
    with Recorder(stage, resume_step=5) as recorder:
        recorder.log(6, {"loss": 6.0})
    assert [record["step"] for record in records(stage)] == [1, 2, 6]
    assert records(stage)[0]["text"] == "first\u2028second\u0085third"


def test_resume_records_evaluation_at_the_checkpoint_once(stage: StageDirectory) -> None:
    for resume_step in (None, 2):
        with Recorder(stage, resume_step=resume_step) as recorder:
            if resume_step is None:
                recorder.log(0, {"heldout_loss": 9.0})
                recorder.log(2, {"loss": 2.0})
            recorder.log(2, {"heldout_loss": 1.0})
            recorder.text("heldout_0", 2, "a sample")
    steps = [
        (record["step"], *(key for key in record if key in ("loss", "heldout_loss", "tag")))
        for record in records(stage)
    ]
    assert steps == [(0, "heldout_loss"), (2, "loss"), (2, "heldout_loss"), (2, "tag")]


def test_new_start_drops_old_records(stage: StageDirectory) -> None:
    for value in (1.0, 2.0):
        with Recorder(stage) as recorder:
            recorder.log(1, {"loss": value})
    assert [record["loss"] for record in records(stage)] == [2.0]
    assert scalars(stage, "sft/loss") == [(1, 2.0)]


def test_numbers_of_a_sample_that_are_not_finite_become_null(stage: StageDirectory) -> None:
    with Recorder(stage) as recorder:
        recorder.text("sample_0", 1, "a", {"sample": {"kl": float("nan"), "by_token": {"value": [1.0, float("inf")]}}})
    assert records(stage)[0]["sample"] == {"kl": None, "by_token": {"value": [1.0, None]}}


def test_later_evaluation_replaces_those_of_its_step_and_after(stage: StageDirectory) -> None:
    with Recorder(stage) as recorder:
        recorder.heldout(0, [{"prompt": "a", "reward": 1.0}, {"prompt": "b", "reward": 2.0}])
        for step, reward in ((2, 3.0), (4, 4.0)):
            recorder.heldout(step, [{"prompt": "a", "reward": reward}, {"prompt": "b", "reward": 0.0}])
    with Recorder(stage, resume_step=1) as recorder:
        recorder.heldout(2, [{"prompt": "a", "reward": 5.0}, {"prompt": "b", "reward": 6.0}])
    assert read_heldout(stage.heldout, 9) == {
        0: [{"prompt": "a", "reward": 1.0}, {"prompt": "b", "reward": 2.0}],
        2: [{"prompt": "a", "reward": 5.0}, {"prompt": "b", "reward": 6.0}],
    }


def test_evaluations_after_the_newest_step_are_of_an_earlier_process(stage: StageDirectory) -> None:
    with Recorder(stage) as recorder:
        for step in (0, 2, 4):
            recorder.heldout(step, [{"reward": 1.0}])
    assert [*read_heldout(stage.heldout, 3)] == [0, 2]


def test_rows_without_an_evaluation_before_training_have_their_prompts(stage: StageDirectory) -> None:
    with Recorder(stage) as recorder:
        for step in (5, 6):
            recorder.heldout(step, [{"prompt": "a", "reward": float(step)}])
    assert read_heldout(stage.heldout, 9) == {step: [{"prompt": "a", "reward": float(step)}] for step in (5, 6)}


def test_evaluation_after_one_that_a_crash_cut_short_is_read(stage: StageDirectory) -> None:
    with Recorder(stage) as recorder:
        for step in (0, 2):
            recorder.heldout(step, [{"reward": 1.0}])
    stage.heldout.write_bytes(stage.heldout.read_bytes()[:-4])
    with Recorder(stage, resume_step=1) as recorder:
        recorder.heldout(2, [{"reward": 7.0}])
    assert [rows[0]["reward"] for rows in read_heldout(stage.heldout, 9).values()] == [1.0, 7.0]


def test_other_ranks_write_nothing(stage: StageDirectory) -> None:
    with Recorder(stage, enabled=False) as recorder:
        recorder.log(1, {"loss": 1.0})
        recorder.heldout(1, [{"reward": 1.0}])
        recorder.text("samples", 1, "text")
    assert not stage.path.exists()


def test_stage_that_fails_to_start_keeps_old_records(stage: StageDirectory) -> None:
    with Recorder(stage) as recorder:
        for step in (1, 2):
            recorder.log(step, {"loss": 0.5})
    for resume_step in (None, 1):
        with Recorder(stage, resume_step=resume_step):
            pass
    assert [record["step"] for record in records(stage)] == [1, 2]
    assert [step for step, _ in scalars(stage, "sft/loss")] == [1, 2]
