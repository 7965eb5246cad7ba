"""fp16 with dynamic loss scaling, the precision of GPUs without bf16: trained for real, on a CPU that accepts it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.helpers import assert_same_weights


@pytest.fixture(scope="module")
def train(install, forks, rlhf, tmp_path_factory: pytest.TempPathFactory):
    """The stage directories of a run of the tiny recipe in fp16."""

    def train(*arguments: str, env: dict[str, str] | None = None) -> Path:
        output = tmp_path_factory.mktemp("half") / "run"
        command = [*arguments, "--accelerator", "halves", "--set", "precision=fp16"]
        command += ["--config", str(rlhf.recipe), "--output", str(output)]
        plugins = {"PYTHONPATH": str(install("halves")), "RLHF_PLUGINS": "rlhf-halves"}
        done = forks.run(*command, timeout=300, environment=plugins | (env or {}))
        assert done.returncode == 0, done.stderr[-4000:]
        return output

    return train


@pytest.fixture(scope="module")
def sharded(train) -> Path:
    """SFT at ZeRO 1."""
    return train("sft", "--set", "engine.zero_stage=1")


def steps(run: Path, stage: str) -> list[dict]:
    lines = (run / stage / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if "loss" in entry or "policy_loss" in entry]


@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_zero_stage_takes_the_same_steps(train, sharded, zero_stage):
    run = train("sft", "--set", f"engine.zero_stage={zero_stage}")
    assert_same_weights(run / "sft" / "model", sharded / "sft" / "model", atol=2e-3)
    for entry, expected in zip(steps(run, "sft"), steps(sharded, "sft")):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=2e-3)
        assert entry["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
        assert entry["model_loss_scale"] == 65536 and entry["skipped_steps"] == 0


def test_dpo_begins_at_its_reference(train, sharded):
    run = train("dpo", "--set", "engine.zero_stage=1", "--set", f"dpo.model={sharded / 'sft' / 'model'}")
    first, *_, last = steps(run, "dpo")
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5) and first["model_loss_scale"] == 65536
    assert last["margin"] != 0 and math.isfinite(last["grad_norm"])


@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_that_overflows_is_skipped_and_the_scale_halved(train, model_folder, zero_stage):
    run = train("--set", f"engine.zero_stage={zero_stage}", env={"HALVES_SCALE_POWER": "40"})
    assert [entry["model_loss_scale"] for entry in steps(run, "sft")] == [2.0**39, 2.0**38, 2.0**37]
    assert [entry["skipped_steps"] for entry in steps(run, "sft")] == [1, 1, 1]
    assert_same_weights(run / "sft" / "model", model_folder, atol=1e-3)  # as they were, but for the rounding to fp16
    for entry in steps(run, "ppo"):
        assert entry["actor_loss_scale"] < 2.0**40
        assert entry["critic_loss_scale"] < 2.0**40
        assert entry["skipped_steps"] == 4  # all updates
        assert entry["grad_norm"] is None  # no number: the gradient overflowed
        assert math.isfinite(entry["reward"])
