"""Score the user's sentences with reward models, read from lines.

A line is JSON, `{"prompt": ..., "reply": ...}` or `{"prompt": ..., "replies": [...]}`, or fields separated by tabs: the
prompt and one or more replies. A prompt is a text, a transcript (`Human: ... Assistant:`) or, in JSON, a list of
`{"role", "content"}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.data.formats import ColumnMapping
from rlhf.data.records import RejectedRecordError, parse_record
from rlhf.errors import DataError

if TYPE_CHECKING:
    from rlhf.data.records import Message, Row
    from rlhf.evaluation.models import RewardModel

_REPLIES = ("reply", "chosen", "rejected")
_FORMAT_HINT = 'write prompt, tab, reply, or {"prompt": ..., "reply": ...}'


@dataclass(frozen=True)
class ReplySet:
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
        raise DataError(f"{source}: {error.reason}; {_FORMAT_HINT}") from error
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
    except ValueError as error:
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

    rows: list[Row] = [
        make_conversation_row(reply_set.prompt, model.prompt_format)
        for reply_set in questions
        for _ in reply_set.replies
    ]
    replies = [reply for reply_set in questions for reply in reply_set.replies]
    sources = [reply_set.source for reply_set in questions for _ in reply_set.replies]
    sequences = []
    for source, ids in zip(sources, model.encode(rows, replies), strict=True):
        if ids is None:
            raise DataError(f"{source}: the chat template of {model.name} refuses this prompt; change its roles")
        if len(ids) > model.max_length:
            raise DataError(
                f"{source}: prompt and reply have {len(ids):,} tokens, but {model.name} accepts {model.max_length:,}; "
                "shorten them"
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
