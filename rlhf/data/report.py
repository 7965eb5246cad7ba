"""What became of a source's rows: how many are used, and why the others are not.

Reading, parsing and tokenization note each row they leave out; one `DataReport` per source goes to the user.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rlhf.config.schema import Stage

DropCounts = dict[str, tuple[int, str]]
"""Reason -> (rows, where the first of them is)."""

_REASONS = 6  # named at most; a broken source may have a reason for every row
_REMEDIES = 2


def add_drop(dropped: DropCounts, reason: str, where: str, rows: int = 1) -> None:
    """Count rows that are left out; `where` is the first of them."""
    before, first = dropped.get(reason, (0, where))
    dropped[reason] = (before + rows, first)


@dataclass
class DataReport:
    """Rows of one source in one stage.

    Attributes:
        stage, source: what is reported on.
        train, heldout: rows that are used.
        unseen: rows of the stage's share that were not looked at, because a sample was asked for.
        dropped: why rows are left out.
        rows, share: rows of the source that have a prompt, and those of them that the stage may use.
        truncated: rows that are used and were too long (data.too_long: truncate).
        how: what was read as what.
        tokens: of each part of the rows, the lengths that half, 90 %, 99 % and all of them do not exceed.
        example: one of them, of median length (an `Example`, whose module imports this one); None if there is none.
        lengths: reason -> (tokens of the shortest, of the longest, the most allowed), for rows that are too long.
    """

    stage: Stage
    source: str
    train: int = 0
    heldout: int = 0
    unseen: int = 0
    rows: int = 0
    share: int = 0
    truncated: int = 0
    how: str = ""
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    example: Any = None
    dropped: DropCounts = field(default_factory=dict)
    lengths: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        """Count one row that is left out."""
        add_drop(self.dropped, reason, where)

    def drop_long(self, reason: str, where: str, tokens: int, allowed: int) -> None:
        """Count one row that is left out for its length."""
        self.drop(reason, where)
        shortest, longest, _ = self.lengths.get(reason, (tokens, tokens, allowed))
        self.lengths[reason] = (min(shortest, tokens), max(longest, tokens), allowed)

    @property
    def used(self) -> int:
        """Rows that are used, for training or evaluation."""
        return self.train + self.heldout

    @property
    def unfit(self) -> int:
        """Rows that could not be used, whatever the other sources are."""
        return sum(rows for reason, (rows, _) in self.dropped.items() if reason != LEFT_OUT_BY_WEIGHT)

    def reasons(self) -> str:
        """`3 prompt too long (first: a.jsonl:17), ...`, the most frequent first; empty where nothing was left out."""
        parts = []
        for reason, (rows, first) in self._ranked():
            details = f"first: {first}"
            if reason in self.lengths:
                shortest, longest, allowed = self.lengths[reason]
                met = f"{shortest} to {longest}" if shortest < longest else f"{longest}"
                details = f"{met} tokens, longest allowed {allowed}; {details}"
            parts.append(f"{rows} {reason} ({details})")
        more = len(parts) - _REASONS
        return ", ".join(parts[:_REASONS] + ([f"and {more} reasons more"] if more > 0 else []))

    def remedies(self) -> str:
        """What helps against the reasons that dominate: `raise data.max_prompt_length; ...`."""
        ranked = [(rows, find_remedy(reason)) for reason, (rows, _) in self._ranked()]
        most = sum(rows for rows, _ in ranked)
        dominant = [help for place, (rows, help) in enumerate(ranked) if not place or 4 * rows >= most]
        return "; ".join(list(dict.fromkeys(dominant))[:_REMEDIES])

    def _ranked(self) -> list[tuple[str, tuple[int, str]]]:
        return sorted(self.dropped.items(), key=lambda item: -item[1][0])

    def __str__(self) -> str:
        line = f"{self.stage}: {self.source}: {self.train} rows for training, {self.heldout} held out"
        line += f" of a sample; {self.unseen} more not looked at" if self.unseen else ""
        line += f"; {self.truncated} truncated" if self.truncated else ""
        return f"{line}; left out: {self.reasons()}" if self.dropped else line


def format_reports(reports: Iterable[DataReport]) -> list[str]:
    """One line per source."""
    return [str(report) for report in reports]


NOT_JSON = "not readable as JSON"
NOT_AN_OBJECT = "not an object"
OTHER_FIELDS = "row has more or fewer fields than the header"
SURROGATE = "half a character (surrogate)"
EMPTY_PROMPT = "empty prompt"
PROMPTS_DIFFER = "prompts of chosen and rejected differ"
NO_DEMONSTRATION = "no demonstration"
NO_PREFERENCE = "no preference"
EQUAL_SCORES = "no preference: equal scores"
UNUSABLE_SCORE = "no preference: a score is no number"
UNUSABLE_LABEL = "no preference: its label is neither of the two"
UNUSABLE_MARGIN = "margin is no number of 0 or more"
PROMPTLESS = "text without a prompt"
EMPTY_TEXT = "empty text"
EMPTY_RESPONSE = "empty response"
NO_DIFFERENCE = "chosen equals rejected"
CONTROL_TOKENS = "contains control tokens"
REFUSED = "refused by the chat template"
LONG_PROMPT = "prompt too long"
LONG_COMPLETION = "completion too long"
TRAINED_ON = "trained on"
PROMPT_TRAINED_ON = "prompt trained on"
LEFT_OUT_BY_WEIGHT = "left out by weight"

# Patterns, as of file names, since some reasons name a column or a role; the first that matches counts.
REMEDIES = {
    NOT_JSON: "write one JSON object a line",
    NOT_AN_OBJECT: 'write each row as an object, {"prompt": ...}',
    OTHER_FIELDS: 'put fields that hold commas or line breaks in "quotes"',
    SURROGATE: "mend the text where a character was cut in two",
    EMPTY_PROMPT: "name the column that holds the prompt in data.datasets.*.columns.prompt",
    "other columns than the source's (*)": "give rows of other columns a source of their own in data.datasets",
    PROMPTS_DIFFER: "give both the same conversation up to their last turn",
    "*: a turn is not an object of role and content": "write each turn as an object of role and content",
    "*: unknown role *": "name the roles user, assistant and system",
    "* does not end with the assistant's turn": "end both replies with a turn of the assistant",
    "* is *, not a list of turns": "give a list of role/content, or name another column in data.datasets.*.columns",
    "* is *, not text": "write it as text, or name another column in data.datasets.*.columns",
    NO_DEMONSTRATION: "name the column of the replies in data.datasets.*.columns.response, "
    "or leave sft out of this source (data.datasets.*.stages)",
    NO_PREFERENCE: "data.datasets.*.stages: leave reward out of this source, or give chosen and rejected",
    EQUAL_SCORES: "leave reward out of this source (data.datasets.*.stages), or give scores that differ",
    UNUSABLE_SCORE: "write both scores as numbers, or name other columns in data.datasets.*.prefer.scores",
    UNUSABLE_LABEL: "name the label's two values in data.datasets.*.prefer.first and prefer.second",
    UNUSABLE_MARGIN: "write the margins as numbers, or leave data.datasets.*.columns.margin out",
    PROMPTLESS: "data.datasets.*.stages: leave all but sft out of this source, or give prompt and response",
    EMPTY_TEXT: "fill in the texts, or name their column in data.datasets.*.columns.text",
    EMPTY_RESPONSE: "fill in the replies, or name their columns in data.datasets.*.columns",
    NO_DIFFERENCE: "give two replies that differ",
    CONTROL_TOKENS: "take the tokenizer's control tokens out of the replies, "
    "or set data.chat_template=false for text that is formatted already",
    REFUSED: "change the roles to those that it knows, or set data.chat_template=false",
    LONG_PROMPT: "raise data.max_prompt_length",
    LONG_COMPLETION: "raise data.max_completion_length",
    TRAINED_ON: "name rows that no stage trains on in data.datasets.*.heldout",
    PROMPT_TRAINED_ON: "name prompts that no stage trains on in data.datasets.*.heldout",
    LEFT_OUT_BY_WEIGHT: "change data.datasets.*.weight (all: every row)",
}


def find_remedy(reason: str) -> str:
    """What helps against `reason`, which must be one of the table's."""
    return next(help for pattern, help in REMEDIES.items() if fnmatchcase(reason, pattern))


def describe_type(value: object) -> str:
    """What a value is that should be text, in the user's words."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}" if value is not None else "empty"
