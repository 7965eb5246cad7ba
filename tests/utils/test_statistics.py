"""Statistics of judging models, against closed forms, tables, hand counts and all subsets."""

import json
import math
from itertools import combinations
from statistics import NormalDist, fmean

import pytest

from rlhf.utils.statistics import (
    best_of_at,
    best_of_kl,
    distinct,
    estimate,
    expected_best,
    has_fallen_significantly,
    repeated,
    student_quantile,
    wilson,
    win_share,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # Of one and two degrees the inverse has a closed form; the others are of printed tables.
    [
        (1, math.tan(0.475 * math.pi)),
        (2, 0.95 * math.sqrt(2 / (1 - 0.95**2))),
        (3, 3.182446),
        (4, 2.776445),
        (9, 2.262157),
        (30, 2.042272),
        (99, 1.984217),
        (5000, 1.960439),
    ],
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, abs=2e-6)


def test_a_mean_has_the_interval_of_the_paired_t_test() -> None:
    estimated = estimate([1.0, 2.0, 3.0, 4.0, 10.0])  # deviation sqrt(50 / 4), over sqrt(5)
    assert estimated.mean == 4 and estimated.error == pytest.approx(math.sqrt(2.5))
    assert estimated.interval == pytest.approx((4 - 2.776445 * math.sqrt(2.5), 4 + 2.776445 * math.sqrt(2.5)), abs=1e-5)
    assert estimate([3.0]) == (3.0, None, None)


@pytest.mark.parametrize("successes", [0, 3, 7.5, 20])
def test_wilson_bounds_are_where_the_score_test_just_accepts(successes: float) -> None:
    z = NormalDist().inv_cdf(0.975)
    for bound in wilson(successes, 20):
        if 0 < bound < 1:
            assert abs(successes / 20 - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / 20))


def test_fall_is_sure_beyond_three_standard_errors_over_the_same_rows() -> None:
    """Of 0 and 1 it is McNemar's test without continuity correction: (lost - won) / sqrt(lost + won)."""
    for lost, won in ((9, 0), (10, 0), (19, 4), (20, 4), (0, 30)):
        before = [1] * lost + [0] * won + [1] * 50
        after = [0] * lost + [1] * won + [1] * 50
        assert has_fallen_significantly(before, after) == ((lost - won) / math.sqrt(lost + won) > 3)
    falls = [0.5, 1.5] * 10  # mean 1, root mean square sqrt(1.25): 20 / (sqrt(1.25) sqrt(20)) = 4
    assert has_fallen_significantly(falls, [0.0] * 20) and not has_fallen_significantly(falls[:10], [0.0] * 10)  # 2.83
    assert not has_fallen_significantly([1.0] * 20, [1.0] * 20) and not has_fallen_significantly([], [])


def test_wilsons_interval_is_the_published_one() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # R. G. Newcombe (1998), table I
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(20, 20)[1] == 1


def test_a_tie_is_half_a_win() -> None:
    assert win_share([1], [0]) == 1 and win_share([0], [1]) == 0 and win_share([1], [1]) == 0.5
    assert win_share([1, 3], [2, 3]) == (0 + 0 + 1 + 0.5) / 4


@pytest.mark.parametrize("best_of", range(1, 7))
def test_the_expected_best_is_the_mean_over_all_subsets(best_of: int) -> None:
    scores = [0.3, -1.0, 2.5, 2.5, 0.0, 7.0]
    assert expected_best(scores, best_of) == pytest.approx(fmean(map(max, combinations(scores, best_of))))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_value_of_the_best_is_the_mean_over_all_subsets(size: int) -> None:
    scores, values = [0.3, -1.0, 2.0, 0.9, 1.5], [1.0, 0.0, 0.0, 1.0, 1.0]
    pairs = list(zip(scores, values))
    expected = fmean(max(subset)[1] for subset in combinations(pairs, size))
    assert expected_best(scores, size, values) == pytest.approx(expected)


def test_the_kl_of_the_best_of_n_is_bounded_by_its_closed_form() -> None:
    assert best_of_kl(1) == 0
    assert best_of_kl(16) == pytest.approx(1.835089, abs=1e-6)  # log 16 - 15/16
    # Of a continuous score, the best of n has density n u^(n - 1) in the score's rank u, and the bound is attained.
    steps = 200_000
    ranks = [(step + 0.5) / steps for step in range(steps)]
    assert fmean(4 * u**3 * math.log(4 * u**3) for u in ranks) == pytest.approx(best_of_kl(4), abs=1e-6)


def test_the_largest_n_of_a_kl_is_the_last_that_keeps_to_it() -> None:
    assert best_of_at(0) == 1
    for best_of in (2, 3, 7, 16, 1000):
        assert best_of_at(best_of_kl(best_of)) == best_of
        assert best_of_at(best_of_kl(best_of) - 1e-9) == best_of - 1


@pytest.mark.parametrize("kl", [1e4, 1e6, math.inf])
def test_the_largest_n_of_the_kl_of_a_ruined_policy_is_a_number_that_can_be_written(kl: float) -> None:
    assert best_of_at(kl) == best_of_at(700.0)
    assert best_of_kl(best_of_at(kl)) == pytest.approx(700.0)
    assert len(json.dumps(best_of_at(kl))) < 310


def test_distinct_counts_runs_of_tokens_over_all_completions() -> None:
    both = [[1, 2, 1, 2], [2, 1]]
    assert distinct(both, 1) == 2 / 6
    assert distinct(both, 2) == 2 / 4  # 12 21 12 | 21
    assert distinct(both, 3) == 2 / 2  # 121 212
    assert distinct(both, 5) == 0


def test_repeated_is_the_share_of_earlier_texts() -> None:
    assert repeated(["a", "b", "a", "a"]) == 0.5
    assert repeated(["a"]) == 0
