"""The columns of a source: the known formats, nested columns, preference labels, and data sets known by name.

`recognize_columns` matches the columns of a source to the known formats; `ColumnsConfig` names columns that differ.
`find_nested_columns` and `flatten` turn `question.full_text` and `answers.0.text` into columns. `known.yaml` lists data
sets that need no mapping in a recipe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.config.data import Cleaning, ColumnsConfig, PreferenceLabelConfig, normalize_label
from rlhf.config.loader import parse_yaml
from rlhf.config.paths import is_path
from rlhf.config.types import ConfigModel
from rlhf.data.report import EQUAL_SCORES, UNUSABLE_LABEL, UNUSABLE_SCORE, describe_type
from rlhf.errors import DataError

FORMATS = (
    "prompt/chosen/rejected, chosen/rejected (Human:/Assistant: transcripts or message lists), prompt/response, "
    "prompt/completion, instruction/input/output, question/answer, messages, conversations, prompt"
)

PROMPTS = ("prompt", "question", "instruction")
RESPONSES = ("response", "completion", "answer", "output")
CONVERSATIONS = ("messages", "conversations")

Values = dict[str, Any]
"""A record: column -> value."""

_MAX_KEYS = 12  # keys of an object that a message lists
LABEL_NAMES = {"label", "labels", "prefer", "preferred", "preference", "winner", "choice", "better", "best"}
LABEL_NAMES |= {"better_response_id", "better_response", "preferred_response", "preferred_id", "human_preference"}
LABEL_NAMES |= {f"score_{name}" for name in ("0", "1", "2", "a", "b")}
# Any of these words counts if the replies' columns are not called chosen and rejected, which would rank them already.
_LABEL_WORDS = {"label", "labels", "prefer", "preferred", "preference", "winner", "win", "choice", "better", "best"}
_LABEL_WORDS |= {"safer", "vote", "votes", "score", "scores", "rating", "ratings", "rank", "ranks", "ranking"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_MAX_LABELS = 5  # labels that a message lists


class NoPreferenceError(Exception):
    """A record prefers neither reply; the message is the reason, which the data report counts."""


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


@dataclass(frozen=True)
class ColumnMapping:
    """The column of each field of a row (None: the source has no such column), and how the columns are read.

    Attributes:
        preference: the rule that decides which of `first` and `second` is preferred.
        clean: kinds of text that are removed from the replies.
        speaker_in_replies: all replies of the source begin with the assistant's name, which is removed.
        template: the text to write around prompts, or empty.
    """

    prompt: str | None = None
    input: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    first: str | None = None
    second: str | None = None
    margin: str | None = None
    messages: str | None = None
    text: str | None = None
    preference: PreferenceRule | None = None
    clean: tuple[Cleaning, ...] = ()
    speaker_in_replies: bool = False
    template: str = ""

    @property
    def replies(self) -> tuple[str, ...]:
        """The columns with replies."""
        return tuple(filter(None, (self.chosen, self.rejected, self.first, self.second, self.response)))

    def __str__(self) -> str:
        """Return `prompt: question, chosen: better, ...`."""
        fields = ("prompt", "input", "response", "chosen", "rejected", "first", "second", "margin", "messages", "text")
        clauses = [f"{field}: {name}" for field in fields if (name := getattr(self, field))]
        clauses += [f"preferred: {self.preference}"] if self.preference else []
        strips_speaker = self.speaker_in_replies and "speaker" not in self.clean
        removed = [*self.clean, *(["speaker"] if strips_speaker else [])]
        return ", ".join(clauses + [f"without {name}" for name in removed])


def recognize_columns(
    present: Collection[str], names: ColumnsConfig, source: str, prefer: PreferenceLabelConfig | None = None
) -> ColumnMapping:
    """Match the columns of a source to the known formats; `names` overrides the usual column names.

    Raises:
        DataError: a named column is missing, no format fits the columns, or a column looks like a preference label
            and `prefer` does not mention it.
    """
    listed = ", ".join(sorted(present)) or "none"
    named = names.named()
    prefer = prefer or PreferenceLabelConfig()
    for key, name in list_named_columns(names, prefer).items():
        if name not in present:
            raise DataError(f"{source}: no column {name!r} ({key}); found: {listed}")
    if names.text:
        return ColumnMapping(text=names.text)

    def find_column(field: str, *usual: str) -> str | None:
        return named.get(field) or next((name for name in usual if name in present), None)

    prompt = find_column("prompt", *PROMPTS)
    response = find_column("response", *RESPONSES)
    messages = find_column("messages", *CONVERSATIONS)
    chosen, rejected = find_column("chosen", "chosen"), find_column("rejected", "rejected")
    if names.first:
        chosen = rejected = None  # `first`, `second` and `prefer` replace them
    if messages and (response or chosen or names.first) and "messages" not in named:
        messages = None  # it repeats the conversation of the columns with the replies
    if messages and "prompt" not in named:
        prompt = None  # it repeats the first message
    columns = ColumnMapping(
        prompt=prompt,
        input="input" if prompt == "instruction" and "input" in present else None,
        response=response,
        chosen=chosen,
        rejected=rejected,
        first=names.first,
        second=names.second,
        margin=names.margin,
        messages=messages,
    )
    if columns.margin and not (columns.chosen or columns.first):
        raise DataError(
            f"{source}: columns.margin needs pairs of replies, and this source has none; name their columns too "
            "(chosen and rejected, or first and second), or remove columns.margin"
        )
    if (columns.chosen is None) != (columns.rejected is None):
        missing = "rejected" if columns.rejected is None else "chosen"
        raise DataError(
            f"{source}: a preference needs a column {missing!r} too; found: {listed}; set columns.{missing}"
        )
    if not (columns.prompt or columns.messages or columns.chosen or columns.first):
        if "text" in present:
            raise DataError(
                f"{source}: a text alone does not say where its prompt ends; give prompt and response, or set "
                f"columns.text to train on all of it in SFT; found: {listed}"
            )
        raise DataError(f"{source}: no known format fits its columns; found: {listed}; known: {FORMATS}; set `columns`")
    _check_preference(columns, prefer, present, source)
    return columns


def list_named_columns(names: ColumnsConfig, prefer: PreferenceLabelConfig) -> dict[str, str]:
    """Return config key -> the column that it names."""
    keys = {f"columns.{field}": name for field, name in names.named().items()}
    if prefer.label:
        keys["prefer.label"] = prefer.label
    return keys | {f"prefer.scores.{index}": name for index, name in enumerate(prefer.scores or ())}


def _check_preference(
    columns: ColumnMapping, prefer: PreferenceLabelConfig, present: Collection[str], source: str
) -> None:
    """Raise `DataError` if the preferred reply is not specified, or specified twice."""
    if prefer.names_columns != bool(columns.first):
        raise DataError(
            f"{source}: `prefer` decides between columns.first and columns.second; set all three, or none of them"
        )
    named = {name for name in vars(columns).values() if isinstance(name, str)}
    used = named | {name.split(".")[0] for name in named}
    replies = (columns.chosen, columns.rejected)
    if columns.chosen and not prefer.nothing and (name := find_unused_label(present, used, replies)):
        raise DataError(
            f'{source}: column "{name}" looks like a preference label but would be ignored; name it in `prefer` (and '
            "the replies in columns.first, columns.second), or set prefer: none"
        )


def find_nested_columns(
    records: Iterable[Values], present: Collection[str], names: Mapping[str, str], source: str
) -> dict[str, list[str]]:
    """Return the path of each column in `names` that is inside another one: `a.b` -> `["a", "b"]`.

    A column with exactly that name, dots included, has precedence.

    Args:
        records: the readable records.
        present: the columns of the source.
        names: config key -> the column that it names.
        source: the source, for messages.

    Raises:
        DataError: no record has such a column; the message says what the records have instead.
    """
    paths = {name: name.split(".") for name in names.values() if name not in present and name.split(".")[0] in present}
    missing, examples = dict(paths), dict[str, Values]()  # not yet found, and a record to show for each
    for record in records:
        if not missing:
            break
        for name, path in list(missing.items()):
            if _follow_path(record, path)[0]:
                del missing[name]
            elif record.get(path[0]) is not None:
                examples.setdefault(name, record)
    for key, name in names.items():
        if name in missing:
            where = _describe_path_end(examples.get(name, {}), paths[name])
            raise DataError(f"{source}: no column {name!r} ({key}); {where}")
    return paths


def flatten(record: Values, paths: Mapping[str, Sequence[str]]) -> Values:
    """Return a record with a column for each of the nested ones that it has."""
    nested = {name: _follow_path(record, path) for name, path in paths.items()}
    return record | {name: value for name, (exists, value) in nested.items() if exists}


def _follow_path(value: Any, path: Sequence[str]) -> tuple[bool, Any]:
    """Return (True if the path exists, the value at its end)."""
    for key in path:
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return False, None
    return True, value


def _describe_path_end(value: Any, path: Sequence[str]) -> str:
    """Describe the last value on the path that exists."""
    depth = next(length for length in range(len(path) - 1, -1, -1) if _follow_path(value, path[:length])[0])
    name, (_, last) = ".".join(path[:depth]) or path[0], _follow_path(value, path[:depth])
    if isinstance(last, Mapping) and last:
        keys = [str(key) for key in last]
        hidden = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
        return f"{name} has the keys {', '.join(keys[:_MAX_KEYS])}{hidden}"
    if isinstance(last, list | tuple) and last:
        return f"{name} is a list of {len(last)} (the first is 0)"
    if isinstance(last, list | tuple | Mapping):
        return f"{name} is empty"
    return f"{name} is {'text' if isinstance(last, str) else describe_type(last)}"


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
    labels = list_labels(records, prefer.label)
    others = [value for value in labels if value != prefer.first]
    listed = ", ".join(labels[:_MAX_LABELS]) or "nothing"
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
    certain = (name for name in unused if name.lower() in LABEL_NAMES)
    likely = (name for name in unused if not _LABEL_WORDS.isdisjoint(map(str.lower, _WORD.findall(name))))
    return next(certain, None) or (None if set(replies) == {"chosen", "rejected"} else next(likely, None))


def check_no_reply_label(records: Iterable[Mapping[str, Any]], column: str, source: str) -> None:
    """Raise `DataError` if a true/false column marks single replies as good or bad: SFT would train on all of them."""
    labels = list_labels(records, column)
    if labels and {"true", "false"}.issuperset(labels):
        raise DataError(
            f'{source}: column "{column}" looks as if it separates good replies from bad ones but would be ignored; '
            "remove the bad replies, or set prefer: none"
        )


def list_labels(records: Iterable[Mapping[str, Any]], column: str) -> list[str]:
    """Return the different labels of a column; an empty cell of a table may be None, NaN or an empty text."""
    values = (value for record in records if isinstance(value := record.get(column), bool | int | float | str))
    labels = dict.fromkeys(map(normalize_label, values))
    return [label for label in labels if label not in ("", "nan", "NaN")]


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


class KnownDataset(ConfigModel):
    """An entry of `known.yaml`, which explains the fields."""

    name: str
    path: str | None = None
    subset: str | None = None
    revision: str | None = None
    heldout_split: str | None = None
    columns: ColumnsConfig
    prefer: PreferenceLabelConfig = PreferenceLabelConfig()
    clean: tuple[Cleaning, ...] = ()
    template: str | None = None


def find_known_dataset(name: str) -> KnownDataset | None:
    """Return the entry of a hub name, or of a local folder whose path ends with one; letter case does not matter."""
    path = Path(name)
    is_local = is_path(name)
    if is_local and not path.is_dir():
        return None
    endings = ["/".join(path.parts[-2:]), *([path.name] if is_local else [])]  # mkqa-Chinese has no owner
    datasets = load_known_datasets()
    return next((entry for ending in endings if (entry := datasets.get(ending.casefold()))), None)


@cache
def load_known_datasets() -> dict[str, KnownDataset]:
    """Load `known.yaml`; the keys are casefolded names."""
    entries = parse_yaml(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
    return {name.casefold(): KnownDataset(name=name, **entry) for name, entry in entries.items()}
