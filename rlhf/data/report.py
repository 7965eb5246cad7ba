"""The report of a source: how many rows are used, why the others are left out, and how to fix that.

Reading, parsing and tokenization give every row that they leave out one of the reasons below. `REMEDIES` has a remedy
for each reason; each source has one `DataReport` per stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rlhf.config.schema import Stage

NOT_JSON = "not readable as JSON"
NOT_AN_OBJECT = "not an object"
OTHER_FIELDS = "row has more or fewer fields than the header"
SURROGATE = "half a character (surrogate)"
EMPTY_PROMPT = "empty prompt"
PROMPTS_DIFFER = "prompts of chosen and rejected differ"
NO_DEMONSTRATION = "no demonstration"
NO_PREFERENCE = "no preference"
EQUAL_SCORES = "no preference: equal scores"
UNUSABLE_SCORE = "no preference: a score is not a number"
UNUSABLE_LABEL = "no preference: the label matches neither reply"
UNUSABLE_MARGIN = "margin is not a number of 0 or more"
EMPTY_TEXT = "empty text"
EMPTY_RESPONSE = "empty response"
NO_DIFFERENCE = "chosen equals rejected"
CONTROL_TOKENS = "contains control tokens"
REFUSED = "refused by the chat template"
LONG_PROMPT = "prompt too long"
LONG_COMPLETION = "completion too long"
TRAINED_ON = "also in the training data"
PROMPT_TRAINED_ON = "prompt also in the training data"

# The keys are patterns (fnmatch), because some reasons name a column or a role; the first match wins.
REMEDIES = {
    NOT_JSON: "write one JSON object per line",
    NOT_AN_OBJECT: 'write each row as an object, {"prompt": ...}',
    OTHER_FIELDS: 'put fields that contain commas or line breaks in "quotes"',
    SURROGATE: "repair the text where a character was cut in two",
    EMPTY_PROMPT: "name the column with the prompt in data.datasets.*.columns.prompt",
    "other columns than the source's (*)": "put rows with other columns into a separate source in data.datasets",
    PROMPTS_DIFFER: "give both replies the same conversation up to the last turn",
    "*: a turn is not an object of role and content": "write each turn as an object with role and content",
    "*: unknown role *": "use the roles user, assistant and system",
    "* does not end with the assistant's turn": "end both replies with a turn of the assistant",
    "* is *, not a list of turns": "give a list of role/content, or name another column in data.datasets.*.columns",
    "* is *, not text": "write it as text, or name another column in data.datasets.*.columns",
    NO_DEMONSTRATION: "name the column with the replies in data.datasets.*.columns.response, "
    "or remove sft from this source's data.datasets.*.stages",
    NO_PREFERENCE: "remove reward from this source's data.datasets.*.stages, or give chosen and rejected",
    EQUAL_SCORES: "remove reward from this source's data.datasets.*.stages, or give scores that differ",
    UNUSABLE_SCORE: "write both scores as numbers, or name other columns in data.datasets.*.prefer.scores",
    UNUSABLE_LABEL: "nothing, if these are ties; otherwise correct data.datasets.*.prefer.first and prefer.second",
    UNUSABLE_MARGIN: "write the margins as numbers, or remove data.datasets.*.columns.margin",
    EMPTY_TEXT: "fill in the texts, or name their column in data.datasets.*.columns.text",
    EMPTY_RESPONSE: "fill in the replies, or name their columns in data.datasets.*.columns",
    NO_DIFFERENCE: "give two replies that differ",
    CONTROL_TOKENS: "remove the tokenizer's control tokens from the replies, "
    "or set data.chat_template=false if the text is already formatted",
    REFUSED: "use roles that the template accepts, or set data.chat_template=false",
    LONG_PROMPT: "raise data.max_prompt_length",
    LONG_COMPLETION: "raise data.max_completion_length",
    TRAINED_ON: "name rows that no stage trains on in data.datasets.*.heldout",
    PROMPT_TRAINED_ON: "name prompts that no stage trains on in data.datasets.*.heldout",
}

DropCounts = dict[str, tuple[int, str]]
"""Reason -> (number of rows, place of the first of them)."""

_MAX_REASONS = 6  # a broken source may have another reason for every row
_MAX_REMEDIES = 2


def find_remedy(reason: str) -> str:
    """Return the remedy for `reason`, which must match a key of `REMEDIES`."""
    return next(remedy for pattern, remedy in REMEDIES.items() if fnmatchcase(reason, pattern))


def add_drop(drops: DropCounts, reason: str, source: str, rows: int = 1) -> None:
    """Add rows that are left out; `source` is the place of the first of them."""
    count, first = drops.get(reason, (0, source))
    drops[reason] = (count + rows, first)


def describe_type(value: object) -> str:
    """Return the type of a value that should be text, in the user's words."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}" if value is not None else "empty"


@dataclass
class DataReport:
    """The use of one source's rows in one stage.

    Attributes:
        stage, source: the stage, and the source as the user named it.
        train, heldout: rows used for training and for evaluation.
        unseen: rows of the stage's share that were not examined, because only a sample was requested.
        dropped: reasons for rows that are left out.
        rows, share: rows of the source that have a prompt, and the number of them in the stage's share.
        truncated: rows that are used and were too long (data.too_long: truncate).
        how: the column mapping, as text.
        tokens: for each part of the rows, the lengths that half, 90 %, 99 % and all of them do not exceed.
        example: one of the rows, of median length (an `rlhf.data.examples.Example`, or its number), or None.
        by_weight: rows that the blend leaves out (data.datasets.*.weight).
        lengths: reason -> (tokens of the shortest, of the longest, maximum allowed), for rows that are too long.
    """

    stage: Stage
    source: str
    train: int = 0
    heldout: int = 0
    unseen: int = 0
    rows: int = 0
    share: int = 0
    truncated: int = 0
    by_weight: int = 0
    how: str = ""
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    example: Any = None
    dropped: DropCounts = field(default_factory=dict)
    lengths: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def drop(self, reason: str, source: str) -> None:
        """Count one row that is left out."""
        add_drop(self.dropped, reason, source)

    def drop_long(self, reason: str, source: str, tokens: int, allowed: int) -> None:
        """Count one row that is left out because it is too long."""
        self.drop(reason, source)
        shortest, longest, _ = self.lengths.get(reason, (tokens, tokens, allowed))
        self.lengths[reason] = (min(shortest, tokens), max(longest, tokens), allowed)

    @property
    def used(self) -> int:
        """Rows that are used, for training or evaluation."""
        return self.train + self.heldout

    @property
    def unusable(self) -> int:
        """Rows that are left out, but not by the weights of the sources."""
        return sum(rows for rows, _ in self.dropped.values())

    def reasons(self) -> str:
        """Return `3 prompt too long (first: a.jsonl:17), ...`, the most frequent first; empty if no row is left out."""
        clauses = []
        for reason, (rows, first) in self._ranked():
            details = f"first: {first}"
            if reason in self.lengths:
                shortest, longest, allowed = self.lengths[reason]
                tokens = f"{shortest} to {longest}" if shortest < longest else f"{longest}"
                details = f"{tokens} tokens, longest allowed {allowed}; {details}"
            clauses.append(f"{rows} {reason} ({details})")
        hidden = len(clauses) - _MAX_REASONS
        return ", ".join(clauses[:_MAX_REASONS] + ([f"and {hidden} more reasons"] if hidden > 0 else []))

    def remedies(self) -> str:
        """Return the remedies for the most frequent reasons: `raise data.max_prompt_length; ...`."""
        ranked = [(rows, find_remedy(reason)) for reason, (rows, _) in self._ranked()]
        total = sum(rows for rows, _ in ranked)
        frequent = [remedy for index, (rows, remedy) in enumerate(ranked) if not index or 4 * rows >= total]
        return "; ".join(list(dict.fromkeys(frequent))[:_MAX_REMEDIES])

    def _ranked(self) -> list[tuple[str, tuple[int, str]]]:
        return sorted(self.dropped.items(), key=lambda item: -item[1][0])

    def __str__(self) -> str:
        line = f"{self.stage}: {self.source}: {self.train} rows for training, {self.heldout} held out"
        line += f" of a sample; {self.unseen} more not examined" if self.unseen else ""
        line += f"; {self.truncated} truncated" if self.truncated else ""
        line += f"; {self.by_weight} more not used (data.datasets.*.weight)" if self.by_weight else ""
        return f"{line}; left out: {self.reasons()}" if self.dropped else line
