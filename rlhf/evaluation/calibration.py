"""Whether a reward model is as sure as it is right. Plain Python, no tensors.

By the loss that it was trained on, a reward model claims of two replies whose scores differ by m that the first is the
better one with probability sigmoid(m) (Bradley and Terry, 1952). Its confidence is that probability for the reply
which it prefers, from 0.5 to 1. Margins below are of the reply that is preferred in the data: above 0 it is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

_HALVINGS = 200


class Bin(NamedTuple):
    """Pairs of about the same confidence: how sure the model is of them, and of what part it is right."""

    low: float
    high: float
    pairs: int
    confidence: float
    accuracy: float


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)), of any size."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def reliability(margins: Sequence[float], bins: int) -> list[Bin]:
    """The pairs by confidence, in `bins` of equal width between 0.5 and 1; those without a pair are left out.

    A bin has its lower bound, the last its upper one too. Equal scores are not right, as in `accuracy`.
    """
    groups: dict[int, list[float]] = {}
    for margin in margins:
        place = min(int((sigmoid(abs(margin)) - 0.5) * 2 * bins), bins - 1)
        groups.setdefault(place, []).append(margin)
    return [
        Bin(
            0.5 + place / bins / 2,
            0.5 + (place + 1) / bins / 2,
            len(group),
            fmean(sigmoid(abs(margin)) for margin in group),
            fmean(margin > 0 for margin in group),
        )
        for place, group in sorted(groups.items())
    ]


def calibration_error(found: Sequence[Bin]) -> float:
    """The expected calibration error (arXiv:1706.04599): the mean over pairs of their bins' |accuracy - confidence|."""
    pairs = sum(one.pairs for one in found)
    return sum(one.pairs / pairs * abs(one.accuracy - one.confidence) for one in found)


def brier(margins: Sequence[float]) -> float:
    """The mean of (1 - P(the better reply))^2 (Brier, 1950): 0 of one that is sure and right, 0.25 of a coin."""
    return fmean(sigmoid(-margin) ** 2 for margin in margins)


def log_loss(margins: Sequence[float], scale: float = 1.0) -> float:
    """The mean of -log P(the better reply), in nats; log 2 of a coin.

    Args:
        scale: what margins are multiplied by.
    """
    return fmean(_softplus(-margin * scale) for margin in margins)


def temperature(margins: Sequence[float]) -> float | None:
    """What scores would have to be divided by for the least `log_loss`: above 1 the model is too sure of itself.

    None where no finite one is best: the model is right of all pairs, or no better than a coin. The loss is convex in
    the inverse temperature, so that where its slope is 0 it is least.
    """
    if min(margins) >= 0 or _slope(margins, 0.0) >= 0:
        return None
    low, high = 0.0, 1.0
    while _slope(margins, high) < 0:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _slope(margins, middle) < 0 else (low, middle)
    return 2 / (low + high)


def _slope(margins: Sequence[float], scale: float) -> float:
    """The derivative of `log_loss` after its scale."""
    return fmean(-margin * sigmoid(-margin * scale) for margin in margins)


def _softplus(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))
