"""Columns that look like two replies, or like the choice between them, in a source that names neither.

Training on one of them would imitate losing replies, so it is refused; the error shows the settings to use instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rlhf.data.formats import LABEL_NAMES, PROMPTS, ColumnMapping, list_labels
from rlhf.errors import DataError

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*|\d+")
_ORDERS = (("a", "b"), ("1", "2"), ("0", "1"), ("first", "second"), ("left", "right"))
_REPLY_WORDS = {"answer", "response", "reply", "completion", "output", "candidate", "generation", "conversation", "ref"}
_SCORE_WORDS = {"score", "rating", "reward", "winner", "votes", "rank"}
_CHOICE_WORDS = {"prefer", "preferred", "preference", "winner", "better", "safer"}
_MAX_LABELS = 5  # labels that a message lists


def check_reply_columns(
    columns: ColumnMapping, present: Sequence[str], records: Iterable[Mapping[str, Any]], source: str
) -> None:
    """Raise `DataError` if a source without pairs has columns for two replies, or for the choice next to one reply.

    Args:
        columns: the mapping of a source without a preference.
        present: the columns of the source.
        records: the readable records.
        source: the source, for messages.
    """
    used = {name.split(".")[0] for name in vars(columns).values() if isinstance(name, str) and name}
    unused = [name for name in present if name not in used]
    choice = next((name for name in unused if _looks_like_choice(name)), None)
    if pair := _find_pair(present, _REPLY_WORDS):
        raise DataError(_describe_pair(pair, choice, _find_pair(unused, _SCORE_WORDS), columns, records, source))
    if columns.response and choice:
        raise DataError(
            f'{source}: column "{choice}" looks as if it chooses between replies but would be ignored, and '
            f'SFT would imitate every "{columns.response}", losing ones too; name both replies in columns.first and '
            "columns.second and the choice in prefer, or set prefer: none"
        )


def _looks_like_choice(name: str) -> bool:
    words = set(map(str.lower, _WORD.findall(name)))
    return name.lower() in LABEL_NAMES - {"label"} or not _CHOICE_WORDS.isdisjoint(words)


def _find_pair(names: Collection[str], words: set[str]) -> tuple[str, str] | None:
    """Return two names that differ in one part alone, such as answer_a and answer_b, and have one of the words."""
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for name in names:
        parts = tuple(part.lower() for part in _WORD.findall(name))
        if not words.isdisjoint(parts):
            for place, part in enumerate(parts):
                groups.setdefault((*parts[:place], "", *parts[place + 1 :]), {})[part] = name
    for members in groups.values():
        for first, second in _ORDERS:
            if set(members) == {first, second}:
                return members[first], members[second]
    return None


def _describe_pair(
    pair: tuple[str, str],
    choice: str | None,
    scores: tuple[str, str] | None,
    columns: ColumnMapping,
    records: Iterable[Mapping[str, Any]],
    source: str,
) -> str:
    first, second = map(_quote, pair)
    prompt = f"prompt: {_quote(columns.prompt)}, " if columns.prompt and columns.prompt not in PROMPTS else ""
    looks, advice = f"{first} and {second} look like two replies", ""
    if scores:
        prefer = f"{{scores: [{_quote(scores[0])}, {_quote(scores[1])}]}}"
        looks += f", and {scores[0]} and {scores[1]} like their scores"
    elif choice:
        labels = list_labels(records, choice)
        values = _match_labels(pair, labels)
        prefer = f"{{label: {_quote(choice)}, first: {_quote(values[0])}, second: {_quote(values[1])}}}"
        looks += f", and {choice} like the choice between them ({', '.join(labels[:_MAX_LABELS]) or 'empty'})"
        advice = "" if values[0] != "..." else f" with the values of {choice} in place of the dots"
    else:
        prefer, advice = "{label: ..., first: ..., second: ...}", " with the column that says which is better"
    lines = f"{{path: {_quote(source)}, columns: {{{prompt}first: {first}, second: {second}}}, prefer: {prefer}}}"
    return f"{source}: {looks}; set data.datasets to {lines}{advice}, or prefer: none to ignore this"


def _match_labels(pair: tuple[str, str], labels: Sequence[str]) -> tuple[str, str]:
    """Return the labels of the two replies, or dots if that is not certain (1 and 0 may mean either)."""
    parts = [[part.lower() for part in _WORD.findall(name)] for name in pair]
    first, second = next(pair for pair in zip(*parts, strict=True) if pair[0] != pair[1])
    endings = {label: [part.lower() for part in _WORD.findall(label)][-1:] for label in labels}
    matches = [[label for label in labels if endings[label] == [part]] for part in (first, second)]
    if [len(group) for group in matches] == [1, 1]:
        return matches[0][0], matches[1][0]
    return "...", "..."


def _quote(text: str) -> str:
    """Return a text as YAML between braces."""
    return text if text == "..." or _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
