"""Sentences of a user's own, for reward models to score: read from lines, and scored by one model after the other.

A line is JSON, `{"prompt": ..., "reply": ...}` or `{"prompt": ..., "replies": [...]}`, or fields with tabs between
them: the prompt and one reply or more. A prompt is a text, a transcript (`Human: ... Assistant:`) or, in JSON, a list
of `{"role", "content"}`.
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
_HOW = 'write prompt, tab, reply, or {"prompt": ..., "reply": ...}'


@dataclass(frozen=True)
class ReplySet:
    """A prompt as messages, as it was written, and the replies to it; `source` is where it stands."""

    prompt: tuple[Message, ...]
    shown: str
    replies: tuple[str, ...]
    source: str


def parse_reply_set(prompt: Any, replies: Sequence[Any], source: str) -> ReplySet:
    """A prompt and its replies, as a user gives them.

    Raises:
        DataError: the prompt is none, or a reply is no text.
    """
    if not replies or not all(isinstance(reply, str) and reply.strip() for reply in replies):
        raise DataError(f"{source}: a reply is missing, or no text; {_HOW}")
    try:
        row = parse_record({"prompt": prompt}, ColumnMapping(prompt="prompt"), source)
    except RejectedRecordError as error:
        raise DataError(f"{source}: {error.reason}; {_HOW}") from error
    return ReplySet(row.prompt, row.text, tuple(reply.strip() for reply in replies), source)


def read_line(line: str, source: str) -> ReplySet:
    """The question of one line.

    Raises:
        DataError: it is of neither form.
    """
    if not line.lstrip().startswith("{"):
        prompt, *replies = line.rstrip("\r\n").split("\t")
        return parse_reply_set(prompt, [reply for reply in replies if reply], source)
    try:
        values = json.loads(line)
    except ValueError as error:
        raise DataError(f"{source}: not readable as JSON ({error}); {_HOW}") from error
    several, named = values.get("replies"), [values[key] for key in _REPLIES if key in values]
    return parse_reply_set(values.get("prompt"), several if isinstance(several, list) else named, source)


def score_replies(
    judge: RewardModel, questions: Sequence[ReplySet], *, batch_size: int, show: bool = False
) -> list[list[float]]:
    """The model's score of every reply to every question.

    Raises:
        DataError: the model's chat template refuses a prompt, or one is too long for the model with its reply.
        ModelError: a score is no finite number.
    """
    from rlhf.data.prompt_encoding import make_conversation_row

    rows: list[Row] = [
        make_conversation_row(asked.prompt, judge.prompt_format) for asked in questions for _ in asked.replies
    ]
    replies = [reply for asked in questions for reply in asked.replies]
    sources = [asked.source for asked in questions for _ in asked.replies]
    sequences = []
    for source, ids in zip(sources, judge.encode(rows, replies), strict=True):
        if ids is None:
            raise DataError(f"{source}: the chat template of {judge.name} refuses this prompt; change its roles")
        if len(ids) > judge.room:
            raise DataError(
                f"{source}: prompt and reply have {len(ids):,} tokens, and {judge.name} has room for {judge.room:,}; "
                "shorten them"
            )
        sequences.append(ids)
    said = f"{judge.name}: scoring" if show else ""
    found = iter(judge.scores(sequences, batch_size=batch_size, description=said))
    return [[next(found) for _ in asked.replies] for asked in questions]


def best_reply_probabilities(scores: Sequence[float]) -> list[float]:
    """How likely the model holds each reply to be the best: softmax, so of two replies sigmoid of the difference."""
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    return [weight / sum(weights) for weight in weights]
