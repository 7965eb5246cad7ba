"""The proof: rlhf's unmodified hpu backend, trainers and DeepSpeed on the simulated device, against the plain CPU.

`rlhf evaluate` on these runs compiles one graph for all its batches, and reads no value inside one.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import proof
import pytest
from conftest import Run, Runs
from proof import STAGES

from rlhf.reporting.timers import is_machine_dependent

CASES = [
    pytest.param(zero, lora, ranks, id=f"zero{zero}{'-lora' * (lora > 0)}-{ranks}", marks=marks)
    for ranks, lora, zero in product((1, 2), (0, 4), (0, 1, 2, 3))
    for marks in [() if (zero, lora, ranks) in {(2, 0, 1), (3, 4, 1)} else pytest.mark.slow]
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("zero_stage", "lora", "ranks"), CASES)
class TestProof:
    """All stages at every ZeRO stage in bf16, with and without LoRA, on one rank and on two."""

    def test_losses_are_those_of_the_cpu(
        self, finished: Runs, zero_stage: int, lora: int, ranks: int, stage: str
    ) -> None:
        actual, expected = (finished(name, zero_stage=zero_stage, lora=lora, ranks=ranks) for name in ("hpu", "cpu"))
        assert len(actual.steps(stage)) == proof.STEPS
        proof.assert_losses_are_those_of(actual, expected, stage)

    def test_nothing_is_compiled_late(self, finished: Runs, zero_stage: int, lora: int, ranks: int, stage: str) -> None:
        """From the third step on, the evaluation at the end included. At ZeRO 3, DeepSpeed reads values on the host in
        the first evaluation and in two steps: the third is the first whole graph, and so is the last evaluation."""
        run, zero_3 = finished("hpu", zero_stage=zero_stage, lora=lora, ranks=ranks), zero_stage == 3
        proof.assert_nothing_compiled_late(run, stage, warm_up=3 if zero_3 else 2, evaluation=not zero_3)

    def test_no_value_is_read_inside_a_step(
        self, finished: Runs, zero_stage: int, lora: int, ranks: int, stage: str
    ) -> None:
        run = finished("hpu", zero_stage=zero_stage, lora=lora, ranks=ranks)
        assert run.report["strict"] == (zero_stage < 3)
        proof.assert_no_reads_inside_a_step(run, stage, warm_up=2 if zero_stage == 3 else None)
        proof.assert_no_mixed_devices(run)


def test_proof_meets_long_and_empty_completions_and_two_epochs(finished: Runs) -> None:
    steps = finished("hpu", zero_stage=2).steps("ppo")
    assert [round(step["tokens"] / step["response_length"]) for step in steps] == [proof.BATCH] * 5
    lengths = proof.completion_lengths()
    assert min(lengths) == 1 and max(lengths) > 20
    assert proof.BATCH * 5 - proof.ROWS == 2, "rows of the next epoch"
    more = sum(step["tokens"] for step in steps) - sum(lengths)
    assert more in {first + other for first in lengths for other in lengths}


@pytest.mark.slow
def test_four_ranks_learn_what_one_does(finished: Runs) -> None:
    for stage in ("sft", "reward"):
        proof.assert_losses_are_those_of(finished("hpu", zero_stage=2, ranks=4), finished("hpu", zero_stage=2), stage)
    proof.assert_nothing_compiled_late(finished("hpu", zero_stage=2, ranks=4), "ppo")


@pytest.mark.parametrize("stage", STAGES)
def test_in_fp32_every_number_is_that_of_the_cpu(finished: Runs, stage: str) -> None:
    actual, expected = (finished(name, zero_stage=0, precision="fp32").steps(stage) for name in ("hpu", "cpu"))
    for own, other in zip(actual, expected, strict=True):
        numbers = {key: other[key] for key in other if key not in ("stage", "time") and not is_machine_dependent(key)}
        assert {key: own[key] for key in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("zero_stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_waits_on_the_host_changes_no_number(finished: Runs, zero_stage: int, stage: str) -> None:
    """Optimizers, whose steps are taken there, and PPO's frozen models between their uses; at ZeRO 3 all weights."""
    actual = finished("hpu", zero_stage=zero_stage, precision="fp32", offload="all").steps(stage)
    expected = finished("cpu", zero_stage=0, precision="fp32").steps(stage)
    for own, other in zip(actual, expected, strict=True):
        numbers = {key: other[key] for key in other if key not in ("stage", "time") and not is_machine_dependent(key)}
        assert {key: own[key] for key in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_adapters_on_quantized_weights_learn_as_on_the_cpu(finished: Runs, stage: str) -> None:
    how = {"zero_stage": 1, "precision": "fp32", "lora": 4, "frozen": "int4"}
    actual, expected = (finished(name, **how).steps(stage) for name in ("hpu", "cpu"))
    for own, other in zip(actual, expected, strict=True):
        numbers = {key: other[key] for key in other if key not in ("stage", "time") and not is_machine_dependent(key)}
        assert {key: own[key] for key in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-3)
    proof.assert_nothing_compiled_late(finished("hpu", **how), stage)


def test_the_run_says_that_it_is_a_simulation(finished: Runs) -> None:
    run = json.loads((finished("hpu", zero_stage=2).folder / "run.json").read_text())
    assert "simulation" in run["accelerator"]["device"]["software"]


def test_explain_says_that_it_is_a_simulation(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "explain", "hpu", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "simulation" in facts["device"]["software"]
    assert facts["lazy"]
    assert facts["deepspeed"]["implementation"] == "deepspeed.accelerator.hpu_accelerator.HPU_Accelerator"
    assert {name: support["implementation"] for name, support in facts["operations"].items() if support["ok"]} == {
        "adamw": "habana-fused",
        "adamw_cpu_offload": "torch-fused",
        "clip_grad_norm": "habana-fused",
        "attention": "habana-fused",
        "graph_capture": "hpu-graphs",
        "quantized_weights": "torch",
    }


def test_quantized_weights_pass_their_check(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "check", "hpu", "--only", "quantized-weights", "--json")
    assert [(result["result"], result["reason"]) for result in json.loads(done.stdout)] == [("passed", "")]


@pytest.mark.slow
def test_the_conformance_kit_passes(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "check", "hpu", "--json")
    results = json.loads(done.stdout)
    assert {result["check"]: result["result"] for result in results if result["result"] != "passed"} == {
        "inference-weights": "skipped",
        "fused-layers": "skipped",
    }
    assert done.returncode == 0


@pytest.mark.parametrize("option", ["--pairs", pytest.param("--text", marks=pytest.mark.slow)])
def test_evaluate_is_one_graph_and_has_the_cpus_numbers(
    python: Run, finished: Runs, tmp_path: Path, option: str
) -> None:
    run = finished("hpu", zero_stage=2).folder
    models: dict[str, Any] = {}
    for accelerator in ("hpu", "cpu"):
        command = ["-m", "rlhf", "evaluate", str(run), option, "heldout", "--json", "--accelerator", accelerator]
        env = {"RLHF_GAUDI_SIM_REPORT": str(tmp_path / "report.json")}
        done = python(*command, "--precision", "fp32", "--batch-size", "3", simulated=accelerator == "hpu", env=env)
        assert done.returncode == 0, done.stderr
        (models[accelerator],) = json.loads(done.stdout)["models"]
    numbers = {name: value for name, value in models["cpu"].items() if isinstance(value, float)}
    assert {name: models["hpu"][name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    counts = json.loads((tmp_path / "report.json").read_text())["counts"]
    assert (counts["compilations"], counts["breaks"]) == (1, 0) and counts["hits"] >= 1
