"""Steps of distillation are those of the plain reference: loss, gradient's norm, weights, the evaluation before."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from accelerators import Accelerator
from tests.helpers import assert_close_weights
from tests.reference import cases, expected, real

SHARDED = {"zero_stage": 3, "zero_persistence_threshold": 0}
CASES = {
    "reverse, ZeRO 1, the last batch filled up": ("llama", {}),
    "forward": ("llama", {"divergence": "forward"}),
    "three updates": ("llama", {"updates": 3}),
    "lengths cut, rows sorted": ("llama", {"engine": {"shapes": "dynamic"}}),
    "ZeRO 0, LoRA": ("llama", {"engine": {"zero_stage": 0}, "lora": cases.LORA}),
    "ZeRO 3, forward": (
        "llama",
        {"engine": SHARDED, "divergence": "forward"},
    ),
    "ZeRO 0, GPT-2, one micro-batch": ("gpt2", {"engine": {"zero_stage": 0}, "micro_batch_size": None}),
}
ROWS = 6  # the second batch of 4 lacks two; the third is of the second epoch


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_reference(accelerator: Accelerator, tmp_path: Path, name: str) -> None:
    kind, changes = CASES[name]
    config = cases.configuration("distill", **changes)
    student, teacher = cases.language_model(1, kind), cases.language_model(2, kind)
    actual = real.distilled(accelerator, config, student, teacher, ROWS, tmp_path)
    assert len(actual.steps) == config.distill.max_steps
    wanted = expected.distilled(config, student, teacher, actual.rollouts, actual.heldout)
    assert wanted.before["loss"] > 0.5 and wanted.steps[-1]["loss"] != wanted.steps[0]["loss"]
    cases.assert_same(actual, wanted)


def test_resumed_run_takes_the_later_steps(accelerator: Accelerator, tmp_path: Path) -> None:
    """Bit for bit: the same completions are drawn, from the same numbers, of the same rows."""
    config = cases.configuration("distill", max_steps=4)
    models = cases.language_model(1), cases.language_model(2)
    whole = real.distilled(accelerator, config, *models, ROWS, tmp_path / "whole")
    with contextlib.suppress(real.StopError):
        real.distilled(accelerator, config, *models, ROWS, tmp_path / "resumed", stop_before=2)
    accelerator.seed(0)  # a generator that is not restored must not stand where the checkpoint's does
    resumed = real.distilled(accelerator, config, *models, ROWS, tmp_path / "resumed")
    assert resumed.rollouts == whole.rollouts[2:]
    assert [step["loss"] for step in resumed.steps] == [step["loss"] for step in whole.steps]
    assert_close_weights(resumed.weights["model"], whole.weights["model"], atol=0)


def test_student_that_equals_its_teacher_stays(accelerator: Accelerator, tmp_path: Path) -> None:
    config = cases.configuration("distill", optimizer=cases.OPTIMIZER | {"weight_decay": 0.0})
    models = cases.language_model(1), cases.language_model(1)
    same = real.distilled(accelerator, config, *models, ROWS, tmp_path)
    assert same.before["loss"] == 0
    assert all(step["loss"] < 1e-6 and step["grad_norm"] < 1e-5 for step in same.steps)
