"""The golden numbers of level `learning`: the shipped file is complete, and faults of a device are beyond its bands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.certify.fixed_state import PRECISIONS, STAGES, STEPS
from rlhf.certify.golden import (
    BLOCK,
    FILE,
    GoldenStage,
    Verdict,
    compare,
    count_comparisons,
    judge_draws,
    reach,
    read_golden,
    summarize_seeds,
    write_golden,
)
from rlhf.certify.trace import Name, Trace
from rlhf.certify.verdicts import report
from rlhf.config.schema import Stage
from rlhf.utils.statistics import student_quantile

GOLDEN = read_golden()
RECORDED = {stage: ["fp32", "bf16"] for stage in STAGES}
PHASES = {
    "sft": ["rows", "scores", "loss", "gradients", "update"],
    "reward": ["rows", "scores", "loss", "gradients", "update"],
    "dpo": ["rows", "scores", "loss", "gradients", "update"],
    "ppo": ["rows", "rollout", "scores", "advantages", "loss", "gradients", "update"],
}


@pytest.fixture(scope="module")
def golden() -> dict[Stage, GoldenStage]:
    return GOLDEN


def copy(trace: Trace) -> Trace:
    """The truth as a device's trace."""
    first = {name: tensor.clone() for name, tensor in trace.first.items()}
    return Trace(first, {name: list(values) for name, values in trace.curve.items()}, trace.ids)


def judge(
    golden: dict[Stage, GoldenStage], stage: Stage, trace: Trace, precision: str = "fp32", steps: int = STEPS
) -> list[Verdict]:
    factor = reach(golden[stage].seeds, count_comparisons(golden))
    return compare(golden[stage], trace, precision, factor, steps)


def beyond(golden: dict[Stage, GoldenStage], stage: Stage, trace: Trace, precision: str = "fp32") -> list[Verdict]:
    return [verdict for verdict in judge(golden, stage, trace, precision) if not verdict.ratio <= 1]


# --- the file


def test_golden_file_has_every_stage_phase_and_step(golden: dict[Stage, GoldenStage]) -> None:
    for stage, right in golden.items():
        assert list(dict.fromkeys(name.phase for name in right.truth.first)) == PHASES[stage]
        assert {len(values) for values in right.truth.curve.values()} == {STEPS}
        assert len(right.truth.ids) == (STEPS if stage == "ppo" else 0)


def test_golden_file_has_bands_of_these_precisions(golden: dict[Stage, GoldenStage]) -> None:
    assert {stage: list(right.bands) for stage, right in golden.items()} == RECORDED
    for right in golden.values():
        assert set(right.bands) <= set(PRECISIONS)
        for bands in right.bands.values():
            assert all(map(math.isfinite, (number for band in bands.values() for number in band)))


@pytest.mark.parametrize("stage", STAGES)
def test_bands_of_the_first_step_are_a_few_roundings_wide(golden: dict[Stage, GoldenStage], stage: Stage) -> None:
    right = golden[stage]
    factor = reach(right.seeds, count_comparisons(golden))
    for quantity, band in right.bands["fp32"].items():
        size = float(right.truth.first[quantity.name].double().square().mean().sqrt()) if quantity.block < 0 else 0.0
        if quantity.kind in ("distance", "scale") and size > 1e-6:  # others are the noise of a zero
            width = (abs(band.mean) + factor * band.spread) / (size if quantity.kind == "distance" else 1)
            assert width < 1e-4, quantity


def test_golden_file_is_small() -> None:
    assert FILE.stat().st_size < 2**20


def test_golden_file_written_again_reads_the_same(golden: dict[Stage, GoldenStage], tmp_path: Path) -> None:
    write_golden(tmp_path / "golden.safetensors", golden)
    again = read_golden(tmp_path / "golden.safetensors")
    for stage, right in golden.items():
        assert again[stage].bands == right.bands
        assert again[stage].truth.curve == right.truth.curve
        assert all(torch.equal(tensor, again[stage].truth.first[name]) for name, tensor in right.truth.first.items())


# --- the statistics


def test_student_quantile_of_a_confidence_equals_the_tables() -> None:
    assert student_quantile(15, 0.95) == pytest.approx(2.131, abs=5e-4)
    assert student_quantile(15, 0.999) == pytest.approx(4.073, abs=5e-4)


def test_reach_contains_the_next_value_as_often_as_it_says() -> None:
    # One comparison with a budget of 1 in 1000: of 40,000 next values, 40 are beyond, give or take 6 (standard error).
    random = torch.Generator().manual_seed(0)
    values = torch.randn(40_000, 9, generator=random, dtype=torch.float64)
    seeds, following = values[:, :8], values[:, 8]
    beyond = (following - seeds.mean(1)).abs() > reach(8, 1) * seeds.std(1)
    assert 15 <= int(beyond.sum()) <= 65


# --- faults of a device, as changes of its numbers


def test_the_truth_itself_passes(golden: dict[Stage, GoldenStage]) -> None:
    for stage, right in golden.items():
        for precision in right.bands:
            assert not beyond(golden, stage, copy(right.truth), precision)


def scale(phase: str, factor: float) -> Callable[[Trace], None]:
    def change(trace: Trace) -> None:
        for name, tensor in trace.first.items():
            if name.phase == phase:
                tensor *= factor

    return change


def round_to_bf16(trace: Trace) -> None:
    for name, tensor in trace.first.items():
        if name.phase == "gradients":
            trace.first[name] = tensor.bfloat16().float()


def transpose(trace: Trace) -> None:
    for name, tensor in trace.first.items():
        if name.name.endswith("q_proj.weight") and name.phase == "gradients":
            trace.first[name] = tensor.T


def lose(trace: Trace) -> None:
    trace.first = {name: tensor for name, tensor in trace.first.items() if name.phase != "update"}


def spoil(trace: Trace) -> None:
    next(tensor for name, tensor in trace.first.items() if name.phase == "loss").fill_(math.nan)


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        (scale("gradients", 1.02), "gradients"),
        (scale("update", 1.1), "update"),
        (round_to_bf16, "gradients"),
        (transpose, "gradients"),
        (lose, "update"),
        (spoil, "loss"),
    ],
)
@pytest.mark.parametrize("stage", GOLDEN)
def test_compare_names_the_phase_of_a_fault(
    golden: dict[Stage, GoldenStage], stage: Stage, change: Callable[[Trace], None], phase: str
) -> None:
    trace = copy(golden[stage].truth)
    change(trace)
    first, *_ = beyond(golden, stage, trace)
    assert first.quantity.name.phase == phase


def test_compare_finds_one_wrong_token(golden: dict[Stage, GoldenStage]) -> None:
    trace = copy(golden["sft"].truth)
    ids = next(tensor for name, tensor in trace.first.items() if name.name == "input_ids")
    ids[1, 2] += 1
    (verdict,) = beyond(golden, "sft", trace)
    assert (verdict.ratio, verdict.place) == (math.inf, "element [1, 2]")
    assert verdict.here == verdict.golden + 1


def test_compare_finds_a_difference_that_begins_late(golden: dict[Stage, GoldenStage]) -> None:
    trace = copy(golden["sft"].truth)
    losses = trace.curve[Name("loss", "sft", "loss", "mean")]
    losses[60:] = [loss * 1.01 for loss in losses[60:]]
    first, *_ = beyond(golden, "sft", trace)
    assert first.place == "steps 61 to 70"


def test_compare_of_fewer_steps_leaves_later_blocks_out(golden: dict[Stage, GoldenStage]) -> None:
    trace = copy(golden["sft"].truth)
    trace.curve = {name: values[: BLOCK + 3] for name, values in trace.curve.items()}
    verdicts = judge(golden, "sft", trace, steps=BLOCK + 3)
    assert {verdict.quantity.block for verdict in verdicts} == {-1, 0}
    assert all(verdict.ratio <= 1 for verdict in verdicts)


def test_compare_finds_steps_that_reported_nothing(golden: dict[Stage, GoldenStage]) -> None:
    trace = copy(golden["sft"].truth)
    trace.curve = {name: values[:-1] for name, values in trace.curve.items()}
    found = beyond(golden, "sft", trace)
    assert {verdict.place for verdict in found} == {"steps 91 to 100"} and len(found) == len(trace.curve)
    assert report(found, "sft", "fp32")["failure"]


def test_compare_finds_values_that_are_infinite(golden: dict[Stage, GoldenStage]) -> None:
    trace = copy(golden["sft"].truth)
    trace.curve[Name("loss", "sft", "loss", "mean")][:2] = [math.inf, -math.inf]
    found = beyond(golden, "sft", trace)
    assert "sft in fp32: loss sft loss mean, steps 1 to 10: nan" in report(found, "sft", "fp32")["failure"]
    assert found[0].ratio == math.inf, "it is the worst of all, and no ratio that compares with nothing"


@pytest.mark.parametrize("comparisons", [1, 40, 10_000])
def test_reach_of_two_seeds_is_the_closed_form(comparisons: int) -> None:
    """Student's distribution of one degree of freedom is Cauchy's; half of the alarms are on each side."""
    expected = math.tan(math.pi * (0.5 - 1e-3 / comparisons / 2)) * math.sqrt(1.5)
    assert reach(2, comparisons) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("stage", GOLDEN)
def test_report_of_no_tensors_is_a_failure_for_each(golden: dict[Stage, GoldenStage], stage: Stage) -> None:
    for truth in (golden[stage].truth, Trace()):
        first_step = compare(replace(golden[stage], truth=truth), Trace(), "fp32", 10.0, 1)
        assert first_step and all(verdict.ratio == math.inf for verdict in first_step)
        assert "the step did not report it" in report(first_step, stage, "fp32")["failure"]


def test_compare_gives_the_ratio_of_deviation_and_band() -> None:
    # Seeds' means of a number deviate by 1, 2 and 3: mean 2, standard deviation 1. A reach of 4 gives a band of 6.
    name = Name("loss", "sft", "loss")
    curve = {name._replace(part=part): [1.0] * BLOCK for part in ("mean", "size")}
    truth = Trace({name: torch.tensor(1.0)}, curve)
    seeds = [Trace({name: torch.tensor(1.0 + deviation)}, curve) for deviation in (1.0, 2.0, 3.0)]
    right = GoldenStage(truth, {"fp32": summarize_seeds(truth, seeds)}, len(seeds))
    verdict, *_ = compare(right, Trace({name: torch.tensor(10.0)}, curve), "fp32", 4.0)
    assert (verdict.here, verdict.golden, verdict.ratio) == (10.0, 1.0, pytest.approx(9 / 6))


def test_report_names_stage_tensor_and_both_values(golden: dict[Stage, GoldenStage]) -> None:
    trace = copy(golden["sft"].truth)
    name = next(name for name in trace.first if name.phase == "gradients")
    trace.first[name][0, 0] += 1.0
    facts = report(judge(golden, "sft", trace), "sft", "fp32")
    right = float(golden["sft"].truth.first[name][0, 0])
    assert facts["failure"].startswith(f"sft in fp32: {name}, element [0, 0]: {right + 1:.9g}, golden {right:.9g};")
    (row,) = [row for row in facts["rows"] if row["of band"] > 1]
    assert (row["stage"], row["phase"], row["here"]) == ("sft", "gradients", pytest.approx(right + 1))


# --- drawn completions


def draw(temperature: float) -> Trace:
    """A trace of a policy whose tokens are drawn at another temperature than they are scored."""
    random = torch.Generator().manual_seed(0)
    log_probs, entropies = [], []
    for _ in range(STEPS):
        logits = 2 * torch.randn(64, 64, generator=random)
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
        scored = logits.log_softmax(-1)
        log_probs.append(float(scored.gather(-1, drawn).mean()))
        entropies.append(-float((scored.exp() * scored).sum(-1).mean()))
    name = Name("scores", "actor", "log_probs", "mean")
    return Trace({}, {name: log_probs, name._replace(name="entropy"): entropies})


@pytest.mark.parametrize("spoiled", [[], [-3.0] * (STEPS - 1), [math.nan] * STEPS])
def test_judge_draws_needs_a_finite_number_of_each_step(spoiled: list[float]) -> None:
    trace = draw(1.0)
    trace.curve[Name("scores", "actor", "log_probs", "mean")] = spoiled
    verdict = judge_draws(trace, 5000)
    assert verdict.ratio == math.inf
    assert f"did not report {STEPS} finite numbers" in report([verdict], "ppo", "fp32")["failure"]


@pytest.mark.parametrize(("temperature", "passes"), [(1.0, True), (0.9, False), (1.1, False)])
def test_judge_draws_finds_tokens_of_another_temperature(temperature: float, passes: bool) -> None:
    assert (judge_draws(draw(temperature), 5000).ratio <= 1) is passes
