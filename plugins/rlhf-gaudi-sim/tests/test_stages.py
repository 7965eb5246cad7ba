"""The proof: rlhf's unmodified hpu backend, trainers and DeepSpeed on the simulated device, against the plain CPU.

`rlhf evaluate` on these runs compiles one graph for all its batches, and reads no value inside one. A trainer that is
wrong in one way after the other (`dynamic.py`) fails each check of the proof.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import proof
import pytest
from conftest import Run, Runs
from proof import STAGES

from rlhf.reporting.timers import is_machine_dependent

TRAINER = Path(__file__).with_name("dynamic.py")

# In eager mode all layers share the graphs of a shape: one without gradients through weights that learn, one through
# frozen weights, and two of a training pass, forward and backward. Decoding has one for each number of rows.
# SFT: evaluation, samples (decoding), training. Reward model: evaluation, training. PPO: rollout (decoding), scores of
# the trained models, scores of the frozen ones, training.
GRAPHS = {"sft": 1 + 1 + 2, "reward": 1 + 2, "ppo": 1 + 1 + 1 + 2}

Case = dict[str, Any]

OFTEN = ("lazy-zero2-1-bf16", "eager-zero3-lora-1-bf16", "eager-zero0-1-fp32")
# ZeRO stage, LoRA and ranks: any two meet in every way.
IN_BF16 = [(zero, lora, 1 + (zero + (lora > 0)) % 2) for zero, lora in product((0, 1, 2, 3), (0, 4))]
IN_FP32 = [(0, 0, 1), (1, 4, 1), (2, 0, 2), (3, 4, 2)]


def list_cases(*modes: str) -> list[Any]:
    """Return the cases of these modes; lazy mode is in bf16 alone, and refuses ZeRO 3."""
    cases = []
    for mode in modes:
        chosen = [(*case, "bf16") for case in IN_BF16 if (mode, case[0]) != ("lazy", 3)]
        chosen += [(*case, "fp32") for case in IN_FP32 if mode == "eager"]
        for zero, lora, ranks, precision in chosen:
            name = f"{mode}-zero{zero}{'-lora' * (lora > 0)}-{ranks}-{precision}"
            case = {"zero_stage": zero, "lora": lora, "ranks": ranks, "precision": precision, "eager": mode == "eager"}
            cases.append(pytest.param(case, id=name, marks=[] if name in OFTEN else [pytest.mark.slow]))
    return cases


@pytest.mark.parametrize("stage", STAGES)
class TestProof:
    """All stages in both modes, at every ZeRO stage, with and without LoRA, on one rank or on two."""

    @pytest.mark.parametrize("case", list_cases("lazy", "eager"))
    def test_losses_are_those_of_the_cpu(self, finished: Runs, case: Case, stage: str) -> None:
        actual, expected = (finished(name, **case) for name in ("hpu", "cpu"))
        assert len(actual.steps(stage)) == proof.STEPS
        if case["precision"] == "fp32":
            assert_all_numbers_are_close(actual, expected, stage)
        else:
            proof.assert_losses_are_those_of(actual, expected, stage)

    @pytest.mark.parametrize("case", list_cases("lazy"))
    def test_nothing_is_compiled_late(self, finished: Runs, case: Case, stage: str) -> None:
        """From the third step on, the evaluation at the end included."""
        proof.assert_nothing_compiled_late(finished("hpu", **case), stage)

    @pytest.mark.parametrize("case", list_cases("eager"))
    def test_the_first_step_compiles_everything(self, finished: Runs, case: Case, stage: str) -> None:
        """All but the layers at ZeRO 3, which run uncompiled."""
        run = finished("hpu", **case)
        proof.assert_the_first_step_compiles_everything(run, stage)
        proof.assert_fallbacks(run, stage, ["LlamaDecoderLayer"] if case["zero_stage"] == 3 else [])

    @pytest.mark.parametrize("case", list_cases("lazy"))
    def test_no_value_is_read_inside_a_step(self, finished: Runs, case: Case, stage: str) -> None:
        run = finished("hpu", **case)
        assert run.report["strict"]
        proof.assert_no_reads_inside_a_step(run, stage)

    @pytest.mark.parametrize("case", list_cases("lazy", "eager"))
    def test_no_operator_has_tensors_of_two_devices(self, finished: Runs, case: Case, stage: str) -> None:
        proof.assert_no_mixed_devices(finished("hpu", **case))


@pytest.mark.parametrize("stage", STAGES)
def test_graphs_of_eager_mode_are_those_of_the_hand_count(finished: Runs, stage: str) -> None:
    run = finished("hpu", eager=True, zero_stage=0, precision="fp32")
    before = STAGES[: STAGES.index(stage)]
    earlier = run.steps(before[-1])[-1]["compilations"] if before else 0
    assert run.steps(stage)[-1]["compilations"] - earlier == GRAPHS[stage]


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


def assert_all_numbers_are_close(run: proof.Run, other: proof.Run, stage: str) -> None:
    """Compare every number of every step, but for times and memory, and for a quotient of changes near rounding."""
    for actual, expected in zip(run.steps(stage), other.steps(stage), strict=True):
        keys = [key for key in expected if key not in ("stage", "time", "direction") and not is_machine_dependent(key)]
        numbers = {key: expected[key] for key in keys}
        assert {key: actual[key] for key in keys} == pytest.approx(numbers, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_in_fp32_every_number_is_that_of_the_cpu(finished: Runs, stage: str) -> None:
    runs = (finished(name, zero_stage=0, precision="fp32") for name in ("hpu", "cpu"))
    assert_all_numbers_are_close(*runs, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("zero_stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_waits_on_the_host_changes_no_number(finished: Runs, zero_stage: int, stage: str) -> None:
    """Optimizers, whose steps are taken there, and PPO's frozen models between their uses; at ZeRO 3 all weights."""
    offloaded = finished("hpu", zero_stage=zero_stage, precision="fp32", offload="all")
    assert_all_numbers_are_close(offloaded, finished("cpu", zero_stage=0, precision="fp32"), stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_adapters_on_quantized_weights_learn_as_on_the_cpu(finished: Runs, stage: str) -> None:
    how = {"zero_stage": 1, "precision": "fp32", "lora": 4, "frozen": "int4"}
    assert_all_numbers_are_close(finished("hpu", **how), finished("cpu", **how), stage)
    proof.assert_nothing_compiled_late(finished("hpu", **how), stage)


def test_the_run_says_that_it_is_a_simulation(finished: Runs) -> None:
    run = json.loads((finished("hpu", zero_stage=2).folder / "run.json").read_text())
    assert "simulation" in run["accelerator"]["device"]["software"]


def test_explain_says_that_it_is_a_simulation(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "explain", "hpu", "--json", loaded=True)
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
    done = python("-m", "rlhf", "accelerators", "check", "hpu", "--only", "quantized-weights", "--json", loaded=True)
    assert [(result["result"], result["reason"]) for result in json.loads(done.stdout)] == [("passed", "")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_the_conformance_kit_passes(python: Run, mode: str) -> None:
    eager = mode == "eager"
    done = python("-m", "rlhf", "accelerators", "check", "hpu", "--json", eager=eager, strict=not eager, fresh=True)
    results = json.loads(done.stdout)
    skipped = ["inference-weights", "sampling", "batch-invariant", *([] if eager else ["fused-layers"])]
    others = {result["check"]: result["result"] for result in results if result["result"] != "passed"}
    assert others == dict.fromkeys(skipped, "skipped")
    assert done.returncode == 0


DESCRIBED_BY_ITS_BACKEND = """
from accelerators import DeepSpeedDevice
from accelerators.backends.hpu.backend import HPU
from accelerators.testing import processes, worker

HPU.deepspeed_accelerator = lambda self: DeepSpeedDevice(self)
reports = []
worker.deepspeed(reports.append, "hpu")
for stage in range(4):
    processes.check_deepspeed_step(processes.Outcome(reports[-1]), stage)
from deepspeed.accelerator import get_accelerator

print(type(get_accelerator()).__name__, [len(losses) for losses in reports[-1]["losses"].values()])
"""


@pytest.mark.slow
def test_deepspeed_trains_on_a_device_that_only_its_backend_describes(python: Run) -> None:
    """Streams, events and generators are those of `torch.hpu`; DeepSpeed's own HPU accelerator is not used."""
    done = python("-c", DESCRIBED_BY_ITS_BACKEND, strict=False, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("DeepSpeedDevice [")


@pytest.mark.parametrize("option", ["--pairs", pytest.param("--text", marks=pytest.mark.slow)])
def test_evaluate_is_one_graph_and_has_the_cpus_numbers(
    python: Run, finished: Runs, tmp_path: Path, option: str
) -> None:
    run = finished("hpu", zero_stage=2).folder
    models: dict[str, Any] = {}
    for accelerator in ("hpu", "cpu"):
        command = ["-m", "rlhf", "evaluate", str(run), option, "heldout", "--json", "--accelerator", accelerator]
        env = {"RLHF_GAUDI_SIM_REPORT": str(tmp_path / "report.json")}
        command += ["--precision", "fp32", "--batch-size", "3"]
        done = python(*command, simulated=accelerator == "hpu", loaded=True, env=env)
        assert done.returncode == 0, done.stderr
        (models[accelerator],) = json.loads(done.stdout)["models"]
    numbers = {name: value for name, value in models["cpu"].items() if isinstance(value, float)}
    assert {name: models["hpu"][name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    counts = json.loads((tmp_path / "report.json").read_text())["counts"]
    assert (counts["compilations"], counts["breaks"]) == (1, 0) and counts["hits"] >= 1


# A trainer with faults.


def line_of(fault: str) -> str:
    lines = TRAINER.read_text().splitlines()
    return f"dynamic.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# FAULT: {fault}'))}"


@pytest.fixture(scope="module")
def spoil(python: Run, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., proof.Run]:
    """A run of SFT with these faults: spoil("shapes", ...); not strict."""
    known: dict[tuple[str, ...], proof.Run] = {}

    def run(*faults: str) -> proof.Run:
        if faults not in known:
            output = tmp_path_factory.mktemp("spoilt") / "output"
            report = output.with_name("report.json")
            env = {"RLHF_GAUDI_SIM_REPORT": str(report)}
            done = python(str(TRAINER), str(recipe), str(output), *faults, strict=False, loaded=True, env=env)
            assert done.returncode == 0, done.stderr[-2000:]
            known[faults] = proof.Run(output, json.loads(report.read_text()))
        return known[faults]

    return run


def assert_all(run: proof.Run, other: proof.Run) -> None:
    proof.assert_losses_are_those_of(run, other, "sft")
    proof.assert_nothing_compiled_late(run, "sft")
    proof.assert_no_reads_inside_a_step(run, "sft")
    proof.assert_no_mixed_devices(run)


def test_without_a_fault_all_checks_pass(spoil: Callable[..., proof.Run], finished: Runs) -> None:
    assert_all(spoil(), finished("cpu", zero_stage=2))


def test_shapes_that_follow_the_data_are_compiled_late(spoil: Callable[..., proof.Run]) -> None:
    run = spoil("shapes", "read")
    with pytest.raises(AssertionError):
        proof.assert_nothing_compiled_late(run, "sft")
    late = [event for event in run.late("sft", 2) if event["kind"] == "compilation"]
    # Each event differs from the nearest known graph in its number of tokens; that of a forward pass names its line.
    length = r"(\[4, \d+\]|start=0, end=\d+)"
    difference = re.compile(rf" is aten::\w+ {length}.*, was {length}.* at the same place")
    assert len(late) >= proof.STEPS - 2
    assert [event for event in late if not difference.search(event["difference"])] == []
    assert any("rlhf/models/forward.py:" in event["line"] for event in late)


def test_a_read_inside_a_step_is_found_with_its_line(spoil: Callable[..., proof.Run]) -> None:
    run = spoil("shapes", "read")
    with pytest.raises(AssertionError):
        proof.assert_no_reads_inside_a_step(run, "sft")
    lines = {event["line"] for event in run.report["events"] if event["kind"] == "break" and event["in_step"]}
    assert lines == {f"{TRAINER.parent}/{line_of('read')}"}


def test_tensors_of_both_devices_are_found(spoil: Callable[..., proof.Run]) -> None:
    with pytest.raises(AssertionError):
        proof.assert_no_mixed_devices(spoil("mixed", "loss"))


def test_another_loss_is_found(spoil: Callable[..., proof.Run], finished: Runs) -> None:
    with pytest.raises(AssertionError):
        proof.assert_losses_are_those_of(spoil("mixed", "loss"), finished("cpu", zero_stage=2), "sft")


@pytest.mark.parametrize("fault", ["read", "mixed", "float64"])
def test_strict_mode_stops_at_the_line(python: Run, recipe: Path, tmp_path: Path, fault: str) -> None:
    done = python(str(TRAINER), str(recipe), str(tmp_path / "output"), fault, loaded=True)
    assert done.returncode
    assert line_of(fault) in done.stderr.strip().splitlines()[-1]
