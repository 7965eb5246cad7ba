"""Numbers of calibration against counts by hand and closed forms."""

from __future__ import annotations

import math

import pytest

from rlhf.evaluation.reward_scores import (
    bin_by_confidence,
    brier_score,
    calibration_error,
    fit_temperature,
    log_loss,
    sigmoid,
)


def margin(probability: float) -> float:
    """The difference of scores by which a model claims that probability of the first reply."""
    return math.log(probability / (1 - probability))


def test_sigmoid_is_finite_at_any_size() -> None:
    assert sigmoid(math.log(3)) == pytest.approx(0.75) and sigmoid(-math.log(3)) == pytest.approx(0.25)
    assert (sigmoid(1e4), sigmoid(-1e4)) == (1, 0)


def test_the_table_by_hand() -> None:
    # Five bins from 0.5 to 1: widths of 0.1. The model is sure of 0.55 (right), 0.58 (wrong: of the rejected one),
    # 0.95 three times (right, right, wrong), and once of all (right).
    margins = [margin(0.55), -margin(0.58), margin(0.95), margin(0.95), -margin(0.95), 50.0]
    low, high = bin_by_confidence(margins, 5)
    assert (low.low, low.high, low.pairs, low.accuracy) == (0.5, pytest.approx(0.6), 2, 0.5)
    assert low.confidence == pytest.approx((0.55 + 0.58) / 2)
    assert (high.low, high.high, high.pairs, high.accuracy) == (pytest.approx(0.9), 1, 4, 0.75)
    assert high.confidence == pytest.approx((3 * 0.95 + 1) / 4)
    by_hand = 2 / 6 * abs(0.5 - 0.565) + 4 / 6 * abs(0.75 - 0.9625)
    assert calibration_error([low, high]) == pytest.approx(by_hand)
    claimed = [0.55, 0.42, 0.95, 0.95, 0.05, 1]
    assert brier_score(margins) == pytest.approx(sum((1 - p) ** 2 for p in claimed) / 6)
    assert log_loss(margins) == pytest.approx(-sum(map(math.log, claimed)) / 6)


def test_lower_bound_belongs_to_its_bin() -> None:
    (first,) = bin_by_confidence([0.0], 2)
    assert (first.low, first.pairs, first.confidence, first.accuracy) == (0.5, 1, 0.5, 0)
    (second,) = bin_by_confidence([margin(0.75) + 1e-12], 2)
    assert (second.low, second.high) == (0.75, 1)
    (whole,) = bin_by_confidence([1.0, -3.0], 1)
    assert (whole.low, whole.high, whole.pairs, whole.accuracy) == (0.5, 1, 2, 0.5)


def test_a_model_that_claims_what_is_so_has_no_error() -> None:
    margins = [margin(0.8)] * 80 + [-margin(0.8)] * 20
    assert calibration_error(bin_by_confidence(margins, 10)) == pytest.approx(0)
    assert fit_temperature(margins) == pytest.approx(1)
    assert log_loss(margins) == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.2))


@pytest.mark.parametrize("scale", [0.2, 3.0, 40.0])
def test_the_temperature_undoes_a_scale(scale: float) -> None:
    margins = [margin(0.8)] * 80 + [-margin(0.8)] * 20
    assert fit_temperature([scale * one for one in margins]) == pytest.approx(scale)


def test_temperature_of_a_perfect_or_random_model_is_none() -> None:
    assert fit_temperature([0.5, 2.0]) is None
    assert fit_temperature([1.0, -1.0]) is None
    assert fit_temperature([1.0, -2.0]) is None
