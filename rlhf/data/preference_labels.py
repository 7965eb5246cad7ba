"""The preferred one of two replies, by a label or by two scores.

`resolve_preference_rule` builds a source's rule from the settings; the rule's `first_is_better` decides a record.
`find_unused_label` finds a column that looks like a preference label and is not used.
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

_LABEL_NAMES = {"label", "labels", "prefer", "preferred", "preference", "winner", "choice", "better", "best"}
_LABEL_NAMES |= {"better_response_id", "better_response", "preferred_response", "preferred_id", "human_preference"}
_LABEL_NAMES |= {f"score_{name}" for name in ("0", "1", "2", "a", "b")}
# Any of these words counts if the replies' columns are not called chosen and rejected, which would rank them already.
_LABEL_WORDS = {"label", "labels", "prefer", "preferred", "preference", "winner", "win", "choice", "better", "best"}
_LABEL_WORDS |= {"safer", "vote", "votes", "score", "scores", "rating", "ratings", "rank", "ranks", "ranking"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_MAX_LABELS = 5  # labels that a message lists


class NoPreferenceError(Exception):
    """A record prefers neither reply; the data report counts `reason`."""

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
        """Return True if the label names the first reply; raise `NoPreferenceError` if it names neither."""
        value = normalize_label(record.get(self.column))
        if not value or value not in (self.first, self.second):  # an empty value is not a label
            raise NoPreferenceError(UNUSABLE_LABEL)
        return bool(value == self.first)

    def __str__(self) -> str:
        second = f", second if {self.second}" if self.second else ""
        return f"{self.column} (first if {self.first}{second})"


@dataclass(frozen=True)
class ScoreRule:
    """The reply with the higher score is the better one."""

    first: str
    second: str

    def first_is_better(self, record: Mapping[str, Any]) -> bool:
        """Compare the scores; raise `NoPreferenceError` if they are equal or one is not a number."""
        first, second = _parse_score(record.get(self.first)), _parse_score(record.get(self.second))
        if first == second:
            raise NoPreferenceError(EQUAL_SCORES)
        return first > second

    def __str__(self) -> str:
        return f"the higher of {self.first}, {self.second}"


PreferenceRule = LabelRule | ScoreRule


def resolve_preference_rule(
    prefer: PreferenceLabelConfig, records: Iterable[Mapping[str, Any]], source: str
) -> PreferenceRule | None:
    """Return the rule that decides between the two replies of a source's records, or None.

    Raises:
        DataError: no record has the label's value for the first reply, or prefer.second is missing and ambiguous.
    """
    if prefer.scores:
        return ScoreRule(*prefer.scores)
    if prefer.label is None or prefer.first is None:
        return None
    labels = dict.fromkeys(
        normalize_label(record.get(prefer.label)) for record in records if _has_label(record, prefer.label)
    )
    others = [value for value in labels if value != prefer.first]
    listed = ", ".join(map(str, list(labels)[:_MAX_LABELS])) or "nothing"
    if prefer.first not in labels and (prefer.second is None or prefer.second not in labels):
        raise DataError(
            f'{source}: column "{prefer.label}" never equals {prefer.first} (prefer.first); found: {listed}; set '
            "prefer.first to one of its values"
        )
    if prefer.second is None and len(others) > 1:
        raise DataError(
            f'{source}: column "{prefer.label}" has several values other than {prefer.first}; found: {listed}; set '
            "prefer.second to the value of the second reply (rows with other values are left out)"
        )
    return LabelRule(prefer.label, prefer.first, prefer.second or next(iter(others), ""))


def find_unused_label(present: Collection[str], used: Collection[str], replies: Collection[str | None]) -> str | None:
    """Return a column that looks like a preference label and is not used, or None.

    Args:
        present: the columns of the source.
        used: the columns that the mapping names.
        replies: the columns of the preferred and the other reply.
    """
    unused = [name for name in present if name not in used]
    certain = (name for name in unused if name.lower() in _LABEL_NAMES)
    likely = (name for name in unused if not _LABEL_WORDS.isdisjoint(map(str.lower, _WORD.findall(name))))
    return next(certain, None) or (None if set(replies) == {"chosen", "rejected"} else next(likely, None))


def check_no_reply_label(records: Iterable[Mapping[str, Any]], column: str, source: str) -> None:
    """Raise `DataError` if a true/false column marks single replies as good or bad: SFT would train on all of them."""
    labels = {normalize_label(record.get(column)) for record in records if _has_label(record, column)}
    if labels and labels <= {"true", "false"}:
        raise DataError(
            f'{source}: column "{column}" looks as if it separates good replies from bad ones but would be ignored; '
            "remove the bad replies, or set prefer: none"
        )


def _has_label(record: Mapping[str, Any], column: str) -> bool:
    """Return True if a record has a label; an empty cell of a table may be None, NaN or an empty text."""
    value = record.get(column)
    return normalize_label(value) not in ("", "nan", "NaN") and isinstance(value, bool | int | float | str)


def parse_finite(value: Any) -> float | None:
    """Return a value, or a text, as a finite number; None if it is not one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _parse_score(value: Any) -> float:
    number = parse_finite(value)
    if number is None:
        raise NoPreferenceError(UNUSABLE_SCORE)
    return number
