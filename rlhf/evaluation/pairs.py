"""A reward model on pairs of replies: how often it prefers the better one, by how much, and how well it knows that.

Rows flow in; for each model the scores of both replies flow out, and what they say of it as plain numbers.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.evaluation import calibration
from rlhf.evaluation.rows import Measured, Rows, examples
from rlhf.utils.statistics import wilson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf.config.schema import Config
    from rlhf.evaluation.models import Judge


class Scored(NamedTuple):
    """The scores of one pair, and where it stands."""

    source: str
    chosen: float
    rejected: float

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


def measure(judge: Judge, found: Rows, config: Config, *, batch_size: int, bins: int, show: bool = False) -> Measured:
    """Score all pairs that the model can read, in the rows' order.

    Args:
        bins: of confidence, in the calibration.

    Raises:
        DataError: it can read none.
        ModelError: a score is no finite number.
    """
    kept, report = examples(found, config.data, judge, fits=True, show=show)
    replies = [example.prompt_ids + ids for example in kept for ids in (example.chosen_ids, example.rejected_ids)]
    said = f"{judge.name}: scoring" if show else ""
    scores = judge.scores(replies, batch_size=batch_size, description=said)
    both = zip(kept, scores[::2], scores[1::2], strict=True)
    scored = [Scored(example.row.source, chosen, rejected) for example, chosen, rejected in both]
    return Measured(numbers(scored, bins), scored, report)


def numbers(scored: Sequence[Scored], bins: int) -> dict[str, Any]:
    """What the scores say of the model."""
    margins = [one.margin for one in scored]
    right = sum(margin > 0 for margin in margins)
    table = calibration.reliability(margins, bins)
    return {
        "pairs": len(scored),
        "accuracy": right / len(scored),
        "accuracy_interval": list(wilson(right, len(scored))),
        "ties": sum(margin == 0 for margin in margins),
        "chosen_score": fmean(one.chosen for one in scored),
        "rejected_score": fmean(one.rejected for one in scored),
        "margin": fmean(margins),
        "log_loss": calibration.log_loss(margins),
        "brier": calibration.brier(margins),
        "calibration_error": calibration.calibration_error(table),
        "temperature": calibration.temperature(margins),
        "bins": [one._asdict() for one in table],
    }
