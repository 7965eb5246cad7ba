"""Which of two replies is preferred: a label says so, or two scores do.

`decision` makes of the settings what decides in a source; its `first_is_better` says it of a record. `overlooked`
finds a column that looks as if it decided and was not asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.config.data import PreferenceLabelConfig, normalize_label
from rlhf.data.report import EQUAL_SCORES, UNUSABLE_LABEL, UNUSABLE_SCORE
from rlhf.errors import DataError

_DECIDING = {"label", "labels", "prefer", "preferred", "preference", "winner", "choice", "better", "best"}
_DECIDING |= {"better_response_id", "better_response", "preferred_response", "preferred_id", "human_preference"}
_DECIDING |= {f"score_{name}" for name in ("0", "1", "2", "a", "b")}
# Where the replies' columns are not called chosen and rejected, their names do not say it: any of these words counts.
_TELLING = {"label", "labels", "prefer", "preferred", "preference", "winner", "win", "choice", "better", "best"}
_TELLING |= {"safer", "vote", "votes", "score", "scores", "rating", "ratings", "rank", "ranks", "ranking"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_SHOWN = 5  # labels that are listed


class NoPreferenceError(Exception):
    """A record that prefers neither reply; `reason` is what the data report counts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class LabelRule:
    """The value of a column names the better reply."""

    column: str
    first: str
    second: str

    def first_is_better(self, record: Mapping[str, Any]) -> bool:
        """Raises `Undecided` where the value is neither."""
        value = normalize_label(record.get(self.column))
        if not value or value not in (self.first, self.second):  # an empty one is no label
            raise NoPreferenceError(UNUSABLE_LABEL)
        return bool(value == self.first)

    def __str__(self) -> str:
        second = f", second where {self.second}" if self.second else ""
        return f"{self.column} (first where {self.first}{second})"


@dataclass(frozen=True)
class ScoreRule:
    """The reply with the higher score is the better one."""

    first: str
    second: str

    def first_is_better(self, record: Mapping[str, Any]) -> bool:
        """Raises `Undecided` where the scores are equal, or one is no number."""
        first, second = _number(record.get(self.first)), _number(record.get(self.second))
        if first == second:
            raise NoPreferenceError(EQUAL_SCORES)
        return first > second

    def __str__(self) -> str:
        return f"the higher of {self.first}, {self.second}"


PreferenceRule = LabelRule | ScoreRule


def resolve_preference_rule(
    prefer: PreferenceLabelConfig, records: Iterable[Mapping[str, Any]], source: str
) -> PreferenceRule | None:
    """What decides between the two replies of a source's records; None: nothing does.

    Raises:
        DataError: the label's value for the second reply is not given, and there are several other values than the
            first reply's, or that is in no record.
    """
    if prefer.scores:
        return ScoreRule(*prefer.scores)
    if prefer.label is None or prefer.first is None:
        return None
    found = dict.fromkeys(
        normalize_label(record.get(prefer.label)) for record in records if _is_label(record, prefer.label)
    )
    others = [value for value in found if value != prefer.first]
    listed = ", ".join(map(str, list(found)[:_SHOWN])) or "nothing"
    if prefer.first not in found and (prefer.second is None or prefer.second not in found):
        raise DataError(f"{source}: {prefer.label} is nowhere {prefer.first} (prefer.first); found: {listed}")
    if prefer.second is None and len(others) > 1:
        raise DataError(
            f"{source}: {prefer.label} has several values beside {prefer.first}; found: {listed}; say in "
            "prefer.second which is that of the second reply (others are left out)"
        )
    return LabelRule(prefer.label, prefer.first, prefer.second or next(iter(others), ""))


def find_unused_label(found: Collection[str], used: Collection[str], replies: Collection[str | None]) -> str | None:
    """A column that looks as if it decided a preference and that nothing uses.

    Args:
        replies: the columns of the preferred and the other reply.
    """
    unused = [name for name in found if name not in used]
    clear = (name for name in unused if name.lower() in _DECIDING)
    likely = (name for name in unused if not _TELLING.isdisjoint(map(str.lower, _WORD.findall(name))))
    return next(clear, None) or (None if set(replies) == {"chosen", "rejected"} else next(likely, None))


def check_no_reply_label(records: Iterable[Mapping[str, Any]], column: str, source: str) -> None:
    """Raise `DataError` where a column says by true and false which single replies are wanted: SFT would learn all."""
    labels = {normalize_label(record.get(column)) for record in records if _is_label(record, column)}
    if labels and labels <= {"true", "false"}:
        raise DataError(
            f"{source}: {column} looks as if it told wanted replies from others, and would not be asked; leave those "
            "others out, or set prefer: none if it does not"
        )


def _is_label(record: Mapping[str, Any], column: str) -> bool:
    """Whether a record has a label; an empty cell of a table may be None, NaN or an empty text."""
    value = record.get(column)
    return normalize_label(value) not in ("", "nan", "NaN") and isinstance(value, bool | int | float | str)


def parse_finite(value: Any) -> float | None:
    """The number that a value is, or that its text says; None where it is none."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _number(value: Any) -> float:
    number = parse_finite(value)
    if number is None:
        raise NoPreferenceError(UNUSABLE_SCORE)
    return number
