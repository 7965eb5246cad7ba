"""Score replies with reward models: pairs with their accuracy, margins and calibration, and the user's sentences.

By its training loss, a reward model claims of two replies whose scores differ by m that the first is better with
probability sigmoid(m) (Bradley and Terry, 1952). Its confidence is that probability for the reply that it prefers, from
0.5 to 1. Margins are those of the reply that the data prefers: above 0 the model is right.

Sentences are read from lines. A line is JSON, `{"prompt": ..., "reply": ...}` or `{"prompt": ..., "replies": [...]}`,
or fields separated by tabs: the prompt and one or more replies. A prompt is a text, a transcript
(`Human: ... Assistant:`) or, in JSON, a list of `{"role", "content"}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.data.formats import ColumnMapping
from rlhf.data.records import RejectedRecordError, parse_record
from rlhf.errors import DataError
from rlhf.evaluation.rows import EvaluationRows, Measurement, encode_examples
from rlhf.utils.statistics import wilson

if TYPE_CHECKING:
    from rlhf.config.schema import Config
    from rlhf.data.records import Message
    from rlhf.evaluation.models import RewardModel

_HALVINGS = 200
_REPLIES = ("reply", "chosen", "rejected")
_FORMAT_HINT = 'write prompt, tab, reply, or {"prompt": ..., "reply": ...}'


class PairScores(NamedTuple):
    """The scores of one pair, and its place in the source."""

    source: str
    chosen: float
    rejected: float

    @property
    def margin(self) -> float:
        """Score of the chosen reply minus that of the rejected one."""
        return self.chosen - self.rejected


def measure_pairs(
    judge: RewardModel, rows: EvaluationRows, config: Config, *, batch_size: int, bins: int, show: bool = False
) -> Measurement:
    """Score all pairs that the model can read, in the order of the rows; calibration has `bins` bins of confidence.

    Raises:
        DataError: the model can read no pair.
        ModelError: a score is not finite.
    """
    examples, report = encode_examples(rows, config.data, judge, fits=True, show=show)
    replies = [example.prompt_ids + ids for example in examples for ids in (example.chosen_ids, example.rejected_ids)]
    description = f"{judge.name}: scoring" if show else ""
    scores = judge.scores(replies, batch_size=batch_size, description=description)
    pairs = zip(examples, scores[::2], scores[1::2], strict=True)
    scored = [PairScores(example.row.source, chosen, rejected) for example, chosen, rejected in pairs]
    return Measurement(summarize_pairs(scored, bins), scored, report)


def summarize_pairs(scored: Sequence[PairScores], bins: int) -> dict[str, Any]:
    """Return the numbers of docs/metrics.md."""
    margins = [pair.margin for pair in scored]
    right = sum(margin > 0 for margin in margins)
    table = bin_by_confidence(margins, bins)
    return {
        "pairs": len(scored),
        "accuracy": right / len(scored),
        "accuracy_interval": list(wilson(right, len(scored))),
        "ties": sum(margin == 0 for margin in margins),
        "chosen_score": fmean(pair.chosen for pair in scored),
        "rejected_score": fmean(pair.rejected for pair in scored),
        "margin": fmean(margins),
        "log_loss": log_loss(margins),
        "brier": brier_score(margins),
        "calibration_error": calibration_error(table),
        "temperature": fit_temperature(margins),
        "bins": [group._asdict() for group in table],
    }


class ConfidenceBin(NamedTuple):
    """Pairs of similar confidence: their mean confidence, and the share that the model ranks correctly."""

    low: float
    high: float
    pairs: int
    confidence: float
    accuracy: float


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value)) without overflow."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def bin_by_confidence(margins: Sequence[float], bins: int) -> list[ConfidenceBin]:
    """Group the pairs by confidence into `bins` of equal width between 0.5 and 1; empty bins are left out.

    A bin includes its lower bound, the last one also its upper bound. Equal scores are not correct, as in `accuracy`.
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


def calibration_error(bins: Sequence[ConfidenceBin]) -> float:
    """Return the expected calibration error (arXiv:1706.04599): the mean over pairs of |accuracy - confidence|."""
    pairs = sum(group.pairs for group in bins)
    return sum(group.pairs / pairs * abs(group.accuracy - group.confidence) for group in bins)


def brier_score(margins: Sequence[float]) -> float:
    """Return the mean of (1 - P(the better reply))^2 (Brier, 1950): 0 if certain and right, 0.25 for a coin."""
    return fmean(sigmoid(-margin) ** 2 for margin in margins)


def log_loss(margins: Sequence[float]) -> float:
    """Return the mean of -log P(the better reply), in nats; log 2 for a coin."""
    return fmean(_softplus(-margin) for margin in margins)


def fit_temperature(margins: Sequence[float]) -> float | None:
    """Return the divisor of the scores that minimizes `log_loss`; above 1 the model is overconfident.

    None if no finite value is best: the model is right for all pairs, or no better than a coin. The loss is convex in
    the inverse temperature, so it is smallest at slope 0.
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
    """Return the derivative of `log_loss` with respect to its scale."""
    return fmean(-margin * sigmoid(-margin * scale) for margin in margins)


def _softplus(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


class ReplySet(NamedTuple):
    """A prompt as messages and as written, and its replies; `source` is its place in the input."""

    prompt: tuple[Message, ...]
    shown: str
    replies: tuple[str, ...]
    source: str


def parse_reply_set(prompt: Any, replies: Sequence[Any], source: str) -> ReplySet:
    """Return a user's prompt with its replies.

    Raises:
        DataError: the prompt is missing or invalid, or a reply is not a text.
    """
    if not replies or not all(isinstance(reply, str) and reply.strip() for reply in replies):
        raise DataError(f"{source}: a reply is missing, or not a text; {_FORMAT_HINT}")
    try:
        row = parse_record({"prompt": prompt}, ColumnMapping(prompt="prompt"), source)
    except RejectedRecordError as error:
        raise DataError(f"{source}: {error}; {_FORMAT_HINT}") from error
    return ReplySet(row.prompt, row.text, tuple(reply.strip() for reply in replies), source)


def read_line(line: str, source: str) -> ReplySet:
    """Parse one line.

    Raises:
        DataError: the line has neither form.
    """
    if not line.lstrip().startswith("{"):
        prompt, *replies = line.rstrip("\r\n").split("\t")
        return parse_reply_set(prompt, [reply for reply in replies if reply], source)
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: not readable as JSON ({error}); {_FORMAT_HINT}") from error
    several, named = values.get("replies"), [values[key] for key in _REPLIES if key in values]
    return parse_reply_set(values.get("prompt"), several if isinstance(several, list) else named, source)


def score_replies(
    model: RewardModel, questions: Sequence[ReplySet], *, batch_size: int, show: bool = False
) -> list[list[float]]:
    """Return the model's score of every reply in every set.

    Raises:
        DataError: the model's chat template refuses a prompt, or a prompt with its reply is too long for the model.
        ModelError: a score is not finite.
    """
    from rlhf.data.prompt_encoding import make_conversation_row

    sequences = []
    for prompt, _, replies, source in questions:
        row = make_conversation_row(prompt, model.prompt_format)
        for ids in model.encode([row] * len(replies), replies):
            if ids is None:
                raise DataError(f"{source}: the chat template of {model.name} refuses this prompt; change its roles")
            if len(ids) > model.max_length:
                raise DataError(
                    f"{source}: prompt and reply have {len(ids):,} tokens, but {model.name} accepts "
                    f"{model.max_length:,}; shorten them"
                )
            sequences.append(ids)
    description = f"{model.name}: scoring" if show else ""
    scores = iter(model.scores(sequences, batch_size=batch_size, description=description))
    return [[next(scores) for _ in reply_set.replies] for reply_set in questions]


def best_reply_probabilities(scores: Sequence[float]) -> list[float]:
    """Return the probability that each reply is the best: softmax, which for two replies is sigmoid(difference)."""
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    return [weight / sum(weights) for weight in weights]
