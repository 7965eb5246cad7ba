"""Statistics for comparing models: means, shares, win rates, best of n and diversity, with 95 % intervals.

Plain Python, without tensors. Completions of the same prompt are compared with each other (paired).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95
SIGNIFICANT = 3
"""Standard errors of a significant fall: more than usual, as the best of many evaluations is above its true value."""
LEAST_ROWS = SIGNIFICANT**2 + 1
"""Rows from which a fall can be significant."""
_MAX_EXPONENT = 700.0  # exp(710) is beyond a float


class Interval(NamedTuple):
    """The bounds of a confidence interval."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean, its standard error and its interval; both are None for a single value."""

    mean: float
    error: float | None
    interval: Interval | None


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with Student's interval; for differences, the paired t test's."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Estimate(mean, None, None)
    error = stdev(values, mean) / math.sqrt(count)
    reach = student_quantile(count - 1) * error
    return Estimate(mean, error, Interval(mean - reach, mean + reach))


def wilson(successes: float, count: int) -> Interval:
    """Return the interval of a share, `successes` of `count`: E. B. Wilson (1927), the score interval.

    A success may count in part: a tie counts half. Values between 0 and 1 with mean p have a variance of at most p (1 -
    p), the variance of a Bernoulli variable, so with ties the interval is too wide rather than too narrow.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, spread = successes / count, z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    reach = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return Interval(max(middle - reach, 0.0), min(middle + reach, 1.0))


def student_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided quantile of Student's distribution.

    Its distribution function has a closed form (Abramowitz and Stegun, 26.7.3 and 26.7.4), which is inverted by
    bisection.
    """
    low, high = 0.0, math.pi / 2  # bounds of the angle whose tangent is t / sqrt(degrees)
    while (angle := (low + high) / 2) not in (low, high):
        low, high = (angle, high) if _within(angle, degrees) < confidence else (low, angle)
    return math.sqrt(degrees) * math.tan(angle)


def measure_fall(before: Sequence[float], after: Sequence[float]) -> float:
    """Return by how many standard errors, under no change, paired values have fallen; 0 if none has changed.

    Of values 0 and 1 it is McNemar's statistic. It is at most the square root of the number of pairs.
    """
    falls = [old - new for old, new in zip(before, after, strict=True)]
    error = math.sqrt(sum(fall**2 for fall in falls))
    return sum(falls) / error if error else 0.0


def has_fallen_significantly(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether paired values have fallen by more than `SIGNIFICANT` standard errors."""
    return measure_fall(before, after) > SIGNIFICANT


def win_share(own: Sequence[float], other: Sequence[float]) -> float:
    """Return the share of pairs (own, other) in which `own` is higher; a tie counts half."""
    return fmean((mine > theirs) + (mine == theirs) / 2 for mine in own for theirs in other)


def expected_best(scores: Sequence[float], best_of: int, values: Sequence[float] | None = None) -> float:
    """Return the mean, over all subsets of `best_of` scores, of the highest in each, or of its value in `values`.

    Unbiased for the best of `best_of` fresh samples. With the scores in order, the i-th is the highest of
    C(i - 1, k - 1) of the C(n, k) subsets.
    """
    pairs = sorted(zip(scores, scores if values is None else values, strict=True), key=lambda pair: pair[0])
    subsets = math.comb(len(scores), best_of)
    return sum(value * (math.comb(place, best_of - 1) / subsets) for place, (_, value) in enumerate(pairs))


def best_of_kl(best_of: int) -> float:
    """Return an upper bound of KL(best of n || one sample) in nats: log n - (n - 1) / n.

    arXiv:2009.01325 states it as the value; arXiv:2401.01879 shows that it is an upper bound.
    """
    return math.log(best_of) - (best_of - 1) / best_of


def best_of_at(kl: float) -> int:
    """Return the largest n whose `best_of_kl` is at most `kl`, and at most 700 nats: nobody draws so many."""
    kl = min(kl, _MAX_EXPONENT)
    low, high = 1, 2
    while best_of_kl(high) <= kl:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if best_of_kl(middle) <= kl else (low, middle)
    return low


def distinct(completions: Sequence[Sequence[int]], length: int) -> float:
    """Return distinct n-grams of `length` tokens / all of them, over all completions together (arXiv:1510.03055).

    0 if there is no such n-gram.
    """
    runs = [tuple(ids[start : start + length]) for ids in completions for start in range(len(ids) - length + 1)]
    return len(set(runs)) / max(len(runs), 1)


def repeated(texts: Sequence[str]) -> float:
    """Return the share of texts that repeat an earlier one."""
    return 1 - len(set(texts)) / len(texts)


def perplexity(loss: float) -> float:
    """Return exp of the mean negative log-likelihood per token, or of 700 if that is smaller."""
    return math.exp(min(loss, _MAX_EXPONENT))


def _within(angle: float, degrees: int) -> float:
    """Return P(|T| < sqrt(degrees) tan(angle)) for Student's T."""
    cosine, total = math.cos(angle), 0.0
    term = cosine if degrees % 2 else 1.0
    for power in range(degrees % 2, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return (total + angle) * 2 / math.pi if degrees % 2 else total
