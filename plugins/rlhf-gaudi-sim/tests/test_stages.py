"""The proof: rlhf's unmodified hpu backend, trainers and DeepSpeed on the simulated device, against the plain CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

STAGES = ("sft", "reward", "ppo")
SETTINGS = {
    "data.max_completion_length": 16,
    "sft.max_steps": 5,
    "reward.max_steps": 5,
    "ppo.steps": 5,
    "ppo.minibatch_size": 2,
    "engine.zero_persistence_threshold": 0,
    **{f"{stage}.{key}": 4 for stage in STAGES for key in ("batch_size", "eval_rows")},
    **{f"{stage}.log_every": 1 for stage in STAGES},
    # Small ones: at the example's, the roundings of one step are large differences a few steps later.
    **{f"{part}.learning_rate": 1e-5 for part in ("sft.optimizer", "reward.optimizer")},
    **{f"ppo.{part}.learning_rate": 1e-5 for part in ("optimizer", "critic_optimizer")},
}

Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def finished(python: Run, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of a run of all stages: finished("hpu", zero_stage=2, ranks=1); made once."""
    known: dict[tuple[Any, ...], Path] = {}

    def run(
        accelerator: str, *, zero_stage: int, precision: str = "bf16", ranks: int = 1, strict: bool = False
    ) -> Path:
        key = (accelerator, zero_stage, precision, ranks, strict)
        if key not in known:
            output = tmp_path_factory.mktemp("run") / "output"
            settings = SETTINGS | {"engine.zero_stage": zero_stage, "precision": precision}
            if precision == "fp32":
                settings["ppo.sampling.top_k"] = 1
            given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
            how = ("--accelerator", accelerator, "--ranks", str(ranks), "--output", str(output))
            report = {"RLHF_GAUDI_SIM_REPORT": str(output.with_name("report.json"))}
            env = report | ({"RLHF_GAUDI_SIM_STRICT": "1"} if strict else {})
            done = python("-m", "rlhf", *how, *given, env=env)
            assert done.returncode == 0, done.stderr[-2000:]
            assert "slower" not in done.stderr  # decoding is recorded
            known[key] = output
        return known[key]

    return run


def steps(run: Path, stage: str) -> list[dict[str, Any]]:
    """The records of a stage's training steps."""
    records = [json.loads(line) for line in (run / stage / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "learning_rate" in record]


ZERO = [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 3)), 2]


@pytest.mark.parametrize("zero_stage", ZERO)
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_losses_are_those_of_the_cpu(finished: Runs, stage: str, zero_stage: int) -> None:
    found = steps(finished("hpu", zero_stage=zero_stage), stage)
    expected = steps(finished("cpu", zero_stage=zero_stage), stage)
    assert len(found) == len(expected) == 5
    for own, other in zip(found, expected):
        assert own["loss"] == pytest.approx(other["loss"], rel=2e-3), f"step {own['step']}"
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.1), f"step {own['step']}"


@pytest.mark.parametrize("stage", STAGES)
def test_in_fp32_every_number_is_that_of_the_cpu(finished: Runs, stage: str) -> None:
    """With the likeliest tokens, not drawn ones: a rounding can move a draw to the next token."""
    found, expected = (steps(finished(name, zero_stage=0, precision="fp32"), stage) for name in ("hpu", "cpu"))
    for own, other in zip(found, expected, strict=True):
        numbers = {key: other[key] for key in other if key not in ("stage", "time") and "per_second" not in key}
        assert {key: own[key] for key in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("zero_stage", ZERO)
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_compiled_late(finished: Runs, stage: str, zero_stage: int) -> None:
    """From the third step on; at ZeRO 3 from the fourth: DeepSpeed records the order of its parameters in three steps,
    and reads values on the host meanwhile."""
    compilations = [record["compilations"] for record in steps(finished("hpu", zero_stage=zero_stage), stage)]
    assert compilations[0] > 0
    assert len(set(compilations[3 if zero_stage == 3 else 2 :])) == 1, compilations


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_two_ranks_learn_what_one_does(finished: Runs, zero_stage: int) -> None:
    for stage in ("sft", "reward"):
        alone, together = (steps(finished("hpu", zero_stage=zero_stage, ranks=ranks), stage) for ranks in (1, 2))
        for one, other in zip(alone, together, strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=5e-3), f"{stage}, step {one['step']}"


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2])  # not 3: DeepSpeed reads on the host in forward, in the first steps
def test_strict_mode_lets_the_trainers_through(finished: Runs, zero_stage: int) -> None:
    report = json.loads(finished("hpu", zero_stage=zero_stage, strict=True).with_name("report.json").read_text())
    assert report["strict"]
    assert not [event for event in report["events"] if event["kind"] == "break" and event["in_step"]]
    assert report["counts"]["mixed"] == 0


def test_the_run_says_that_it_is_a_simulation(finished: Runs) -> None:
    run = json.loads((finished("hpu", zero_stage=2) / "run.json").read_text())
    assert "simulation" in run["accelerator"]["device"]["software"]


def test_explain_says_that_it_is_a_simulation(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "explain", "hpu", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "simulation" in facts["device"]["software"]
    assert facts["lazy"]
    assert facts["deepspeed"]["implementation"] == "deepspeed.accelerator.hpu_accelerator.HPU_Accelerator"
    assert {name: found["implementation"] for name, found in facts["operations"].items() if found["ok"]} == {
        "adamw": "habana-fused",
        "adamw_cpu_offload": "torch-fused",
        "clip_grad_norm": "habana-fused",
        "attention": "habana-fused",
        "graph_capture": "hpu-graphs",
    }


@pytest.mark.slow
def test_the_conformance_kit_passes(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "check", "hpu", "--json")
    results = json.loads(done.stdout)
    assert [result for result in results if result["result"] != "passed"] == []
    assert done.returncode == 0
