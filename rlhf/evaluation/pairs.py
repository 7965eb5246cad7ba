"""A reward model on pairs of replies: how often it prefers the better one, by how much, and how well it knows that.

Rows flow in; for each model the scores of both replies flow out, and what they say of it as plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.evaluation.rows import EvaluationRows, Measurement, encode_examples
from rlhf.utils.statistics import wilson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf.config.schema import Config
    from rlhf.evaluation.models import RewardModel


class PairScores(NamedTuple):
    """The scores of one pair, and where it stands."""

    source: str
    chosen: float
    rejected: float

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


def measure_pairs(
    judge: RewardModel, found: EvaluationRows, config: Config, *, batch_size: int, bins: int, show: bool = False
) -> Measurement:
    """Score all pairs that the model can read, in the rows' order.

    Args:
        bins: of confidence, in the calibration.

    Raises:
        DataError: it can read none.
        ModelError: a score is no finite number.
    """
    kept, report = encode_examples(found, config.data, judge, fits=True, show=show)
    replies = [example.prompt_ids + ids for example in kept for ids in (example.chosen_ids, example.rejected_ids)]
    said = f"{judge.name}: scoring" if show else ""
    scores = judge.scores(replies, batch_size=batch_size, description=said)
    both = zip(kept, scores[::2], scores[1::2], strict=True)
    scored = [PairScores(example.row.source, chosen, rejected) for example, chosen, rejected in both]
    return Measurement(summarize_pairs(scored, bins), scored, report)


def summarize_pairs(scored: Sequence[PairScores], bins: int) -> dict[str, Any]:
    """What the scores say of the model."""
    margins = [one.margin for one in scored]
    right = sum(margin > 0 for margin in margins)
    table = bin_by_confidence(margins, bins)
    return {
        "pairs": len(scored),
        "accuracy": right / len(scored),
        "accuracy_interval": list(wilson(right, len(scored))),
        "ties": sum(margin == 0 for margin in margins),
        "chosen_score": fmean(one.chosen for one in scored),
        "rejected_score": fmean(one.rejected for one in scored),
        "margin": fmean(margins),
        "log_loss": log_loss(margins),
        "brier": brier_score(margins),
        "calibration_error": calibration_error(table),
        "temperature": fit_temperature(margins),
        "bins": [one._asdict() for one in table],
    }


_HALVINGS = 200


class ConfidenceBin(NamedTuple):
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


def bin_by_confidence(margins: Sequence[float], bins: int) -> list[ConfidenceBin]:
    """The pairs by confidence, in `bins` of equal width between 0.5 and 1; those without a pair are left out.

    A bin has its lower bound, the last its upper one too. Equal scores are not right, as in `accuracy`.
    """
    groups: dict[int, list[float]] = {}
    for margin in margins:
        place = min(int((sigmoid(abs(margin)) - 0.5) * 2 * bins), bins - 1)
        groups.setdefault(place, []).append(margin)
    return [
        ConfidenceBin(
            0.5 + place / bins / 2,
            0.5 + (place + 1) / bins / 2,
            len(group),
            fmean(sigmoid(abs(margin)) for margin in group),
            fmean(margin > 0 for margin in group),
        )
        for place, group in sorted(groups.items())
    ]


def calibration_error(found: Sequence[ConfidenceBin]) -> float:
    """The expected calibration error (arXiv:1706.04599): the mean over pairs of their bins' |accuracy - confidence|."""
    pairs = sum(one.pairs for one in found)
    return sum(one.pairs / pairs * abs(one.accuracy - one.confidence) for one in found)


def brier_score(margins: Sequence[float]) -> float:
    """The mean of (1 - P(the better reply))^2 (Brier, 1950): 0 of one that is sure and right, 0.25 of a coin."""
    return fmean(sigmoid(-margin) ** 2 for margin in margins)


def log_loss(margins: Sequence[float], scale: float = 1.0) -> float:
    """The mean of -log P(the better reply), in nats; log 2 of a coin.

    Args:
        scale: what margins are multiplied by.
    """
    return fmean(_softplus(-margin * scale) for margin in margins)


def fit_temperature(margins: Sequence[float]) -> float | None:
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
