"""Bands of tensors, and the comparison of two steps."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.lockstep.observations import Observed, compare, measure_bands, measure_ratios
from rlhf.lockstep.rounding import SPREAD, VARIANT, PerturbedRounding


def observed(tensor: torch.Tensor, name: str = "log_probs", phase: str = "scores") -> Observed:
    return Observed(phase, "actor", name, 0, -1, tensor)


VALUES = torch.tensor([1.0, -2.0, 3.0, -4.0])
STEP = [observed(VALUES)]


def test_band_is_the_spread_times_the_largest_deviation() -> None:
    perturbed = [[observed(VALUES + deviation)] for deviation in (0.001, 0.003)]
    (band,) = measure_bands(STEP, perturbed, [], torch.float32).values()
    assert band == pytest.approx(SPREAD * 0.003, rel=1e-3)
    (band,) = measure_bands(STEP, [], [observed(VALUES + 0.01)], torch.float32).values()
    assert band == pytest.approx(VARIANT * 0.01, rel=1e-3)


def test_band_is_at_least_one_rounding_of_the_elements() -> None:
    (band,) = measure_bands(STEP, [STEP], STEP, torch.bfloat16).values()
    assert band == pytest.approx(2**-8 * math.sqrt(7.5))


def test_band_of_a_reference_is_that_of_the_policy_if_no_repetition_computes_it() -> None:
    step = [*STEP, observed(VALUES, "reference")]
    perturbed = [[observed(VALUES + 0.001), observed(VALUES, "reference")]]
    policy, reference = measure_bands(step, perturbed, [], torch.float32).values()
    assert reference == policy == pytest.approx(SPREAD * 0.001, rel=1e-3)


def test_tensor_beyond_its_band_is_described_by_its_worst_element() -> None:
    bands = {STEP[0].key: 0.1}
    assert compare(STEP, [observed(VALUES + 0.09)], bands) == []
    (difference,) = compare(STEP, [observed(VALUES + torch.tensor([0.0, 0.5, 0.0, -1.0]))], bands)
    assert (difference.element, difference.value_a, difference.value_b) == ((3,), -4.0, -5.0)
    assert difference.measure == pytest.approx(math.sqrt(1.25 / 4))
    assert difference.ratio == pytest.approx(10 * difference.measure)
    assert measure_ratios(STEP, [observed(VALUES + 0.05)], bands) == {"scores": pytest.approx(0.5)}


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_number_that_is_not_finite_on_one_side_differs(number: float) -> None:
    spoilt = VALUES.clone()
    spoilt[1] = number
    (difference,) = compare(STEP, [observed(spoilt)], {STEP[0].key: 1e9})
    assert difference.element == (1,) and difference.measure == math.inf
    assert compare([observed(spoilt)], [observed(spoilt)], {STEP[0].key: 1e-9}) == []


def test_integers_and_missing_tensors_differ_without_a_band() -> None:
    ids = [observed(torch.tensor([1, 2]), "completion_ids")]
    bands = measure_bands(ids, [], [], torch.float32)
    assert compare(ids, ids, bands) == []
    assert len(compare(ids, [observed(torch.tensor([1, 3]), "completion_ids")], bands)) == 1
    assert len(compare(STEP, [], {STEP[0].key: 1.0})) == 1


def test_perturbed_product_deviates_by_about_one_rounding() -> None:
    first = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    exact = first @ first
    with PerturbedRounding(seed=1):
        moved = first @ first
    relative = ((moved - exact) / exact).abs()
    assert 0 < float(relative.max()) < 3 * 2**-24


def test_perturbation_leaves_copies_and_views_unchanged() -> None:
    with PerturbedRounding(seed=1):
        assert torch.equal(VALUES.clone().view(2, 2).t()[0], torch.tensor([1.0, 3.0]))
