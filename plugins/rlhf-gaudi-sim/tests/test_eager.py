"""Eager mode, Gaudi's default: the stages compile what a hand count says, once, and learn what they do on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Run, Runs
from proof import STAGES
from test_stages import assert_all_numbers_are_close

# All layers share the graphs of a shape: one without gradients through weights that learn, one through frozen weights,
# and two of a training pass, forward and backward. Decoding has one for each number of rows.
# SFT: evaluation, samples (decoding), training. Reward model: evaluation, training. PPO: rollout (decoding), scores of
# the trained models, scores of the frozen ones, training.
GRAPHS = {"sft": 1 + 1 + 2, "reward": 1 + 2, "ppo": 1 + 1 + 1 + 2}

CASES = [
    pytest.param({"zero_stage": zero, "lora": lora, "ranks": ranks}, id=f"zero{zero}{'-lora' * (lora > 0)}-{ranks}")
    for zero, lora, ranks in ((0, 0, 1), (1, 4, 1), (2, 0, 2))
]


@pytest.fixture(
    params=[CASES[0], *(pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in CASES[1:])]
)
def case(request: Any) -> dict[str, Any]:
    return {"precision": "fp32", **request.param}


@pytest.mark.parametrize("stage", STAGES)
def test_every_number_is_that_of_the_cpu(finished: Runs, case: dict[str, Any], stage: str) -> None:
    assert_all_numbers_are_close(finished("hpu", eager=True, **case), finished("cpu", **case), stage)


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_step_compiles_everything(finished: Runs, case: dict[str, Any], stage: str) -> None:
    run = finished("hpu", eager=True, **case)
    counts = [step["compilations"] for step in run.steps(stage)]
    assert len(set(counts)) == 1
    assert run.late(stage, warm_up=1) == []
    assert all(step["fallbacks"] == 0 for step in run.steps(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_graphs_are_those_of_the_hand_count(finished: Runs, stage: str) -> None:
    run = finished("hpu", eager=True, zero_stage=0, precision="fp32")
    before = STAGES[: STAGES.index(stage)]
    earlier = run.steps(before[-1])[-1]["compilations"] if before else 0
    assert run.steps(stage)[-1]["compilations"] - earlier == GRAPHS[stage]


@pytest.mark.slow
def test_the_conformance_kit_passes(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "check", "hpu", "--json", eager=True, strict=False, fresh=True)
    skipped = {result["check"] for result in json.loads(done.stdout) if result["result"] != "passed"}
    assert skipped == {"inference-weights"}
    assert done.returncode == 0
