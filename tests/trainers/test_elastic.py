"""Every stage continues on other numbers of ranks, at other ZeRO stages, as if it had not been interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import assert_same_weights, models_of, sets, wait_for

STEPS = {"sft": 30, "reward": 30, "dpo": 30, "ppo": 16}
LEGS = [(2, 3), (4, 2), (1, 0)]
"""(ranks, ZeRO stage) of the processes that resume; the first one has one rank, at ZeRO 1."""
CASES = {f"{stage}-{lora}": (stage, lora) for stage in STEPS for lora in (0, 4)}


def keys(stage: str, run: Path, lora: int) -> list[str]:
    """Settings of a stage whose numbers rounding hardly moves: small rates, and moments that noise does not fill."""
    start = {"sft": (), "ppo": models_of(run)}.get(stage, (f"{stage}.model={run / 'sft' / 'model'}",))
    rate = {"learning_rate": 1e-4, "eps": 1e-3, "warmup": 0, "schedule": "constant"}
    settings = [f"{stage}.checkpoint_every=1", f"{stage}.{'steps' if stage == 'ppo' else 'max_steps'}={STEPS[stage]}"]
    settings += [f"{stage}.optimizer.{key}={value}" for key, value in rate.items()]
    if stage == "ppo":
        settings += [f"ppo.critic_optimizer.{key}={value}" for key, value in rate.items()]
        settings += ["ppo.minibatch_size=4", "ppo.ema=0.5"]
    else:
        settings.append(f"{stage}.epochs=10")
    if lora:
        settings += [f"lora.rank={lora}", "lora.learning_rate=1e-3"]
    return sets(*start, *settings)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stage_continues_on_other_ranks(
    rlhf: Any, finished_run: Path, model_folder: Path, tmp_path: Path, case: tuple[str, int]
) -> None:
    stage, lora = case
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    settings = keys(stage, finished_run, lora)
    rlhf(stage, "--output", whole, *settings)
    interrupt_at(1, rlhf, stage, "--output", moved, *settings)
    for ranks, zero_stage in LEGS:
        arguments = [
            "--output",
            moved,
            *settings,
            "--resume",
            "--ranks",
            ranks,
            "--set",
            f"engine.zero_stage={zero_stage}",
        ]
        done = latest_step(moved / stage)
        if ranks > 1:
            interrupt_at(done + 1, rlhf, stage, *arguments)
        else:
            assert f"{stage}: resumed after step {done}" in rlhf(stage, *arguments).stdout
        assert done < STEPS[stage]
    for model in ("model", *(("model-ema", "critic") if stage == "ppo" else ())):
        assert_same_weights(moved / stage / model, whole / stage / model, atol=1e-5)
    with pytest.raises(AssertionError, match="differs by"):
        assert_same_weights(whole / stage / "model", start_of(stage, finished_run, model_folder), atol=3e-4)
    steps = [json.loads(line) for line in (moved / stage / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if "learning_rate" in record] == list(range(1, STEPS[stage] + 1))


@pytest.mark.slow
def test_line_says_that_dropout_draws_other_numbers(rlhf: Any, finished_run: Path, tmp_path: Path) -> None:
    settings = [*keys("sft", finished_run, 0), *sets("sft.dropout=0.1")]
    interrupt_at(1, rlhf, "sft", "--output", tmp_path / "run", *settings)
    resumed = rlhf("sft", "--output", tmp_path / "run", *settings, "--resume", "--ranks", 2).stdout
    line = "sft: 1 rank wrote the checkpoint, not 2: dropout continues from the seed, so this run will not equal an "
    assert f"{line}uninterrupted one" in resumed.splitlines()


def start_of(stage: str, run: Path, model_folder: Path) -> Path:
    """The model that a stage starts from, or for the reward model another one."""
    return {"sft": model_folder, "reward": run / "reward" / "model"}.get(stage, run / "sft" / "model")


def interrupt_at(step: int, rlhf: Any, *arguments: object) -> None:
    """Run until a step is saved, and interrupt: the step that is running is finished and saved."""
    process = rlhf.forks.start("-m", "rlhf", *map(str, arguments), "--config", str(rlhf.recipe))
    folder = Path(str(arguments[2])) / str(arguments[0])
    wait_for(folder / "checkpoints" / f"step-{step:08d}", process)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, output + errors


def latest_step(folder: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-????????"))
