"""The known formats of data sets, recognized by their columns alone; `ColumnsConfig` names columns that differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.config.data import Cleaning, ColumnsConfig, PreferenceLabelConfig
from rlhf.config.loader import parse_yaml
from rlhf.config.paths import is_path
from rlhf.config.types import ConfigModel
from rlhf.data.preference_labels import PreferenceRule, find_unused_label
from rlhf.data.report import describe_type
from rlhf.errors import DataError

FORMATS = (
    "prompt/chosen/rejected, chosen/rejected (Human:/Assistant: transcripts or message lists), prompt/response, "
    "prompt/completion, instruction/input/output, question/answer, messages, conversations, prompt"
)

PROMPTS = ("prompt", "question", "instruction")
RESPONSES = ("response", "completion", "answer", "output")
CONVERSATIONS = ("messages", "conversations")


@dataclass(frozen=True)
class ColumnMapping:
    """The column that holds each field of a row, None where the source has no such column; and how they are read.

    Attributes:
        decision: what says which of `first` and `second` is preferred.
        clean: what is taken out of the replies.
        led: all replies of the source begin with the assistant's name, which is no part of them.
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
    decision: PreferenceRule | None = None
    clean: tuple[Cleaning, ...] = ()
    led: bool = False

    @property
    def replies(self) -> tuple[str, ...]:
        """The columns that hold replies."""
        named = (self.chosen, self.rejected, self.first, self.second, self.response)
        return tuple(filter(None, named))

    def __str__(self) -> str:
        """`prompt: question, chosen: better, ...`: what is read as what."""
        fields = ("prompt", "input", "response", "chosen", "rejected", "first", "second", "margin", "messages", "text")
        parts = [f"{field}: {name}" for field in fields if (name := getattr(self, field))]
        parts += [f"preferred: {self.decision}"] if self.decision else []
        taken = [*self.clean, *(["speaker"] if self.led and "speaker" not in self.clean else [])]
        return ", ".join(parts + [f"without {name}" for name in taken])


def recognize_columns(
    found: Collection[str], names: ColumnsConfig, source: str, prefer: PreferenceLabelConfig | None = None
) -> ColumnMapping:
    """Match the columns of a source to the known formats; `names` wins over the usual column names.

    Raises:
        DataError: a named column is missing, no format fits the columns found, or one of them looks as if it decided
            which reply is preferred, and `prefer` does not say.
    """
    listed = ", ".join(sorted(found)) or "none"
    named = names.named()
    prefer = prefer or PreferenceLabelConfig()
    for key, name in list_named_columns(names, prefer).items():
        if name not in found:
            raise DataError(f"{source}: no column {name!r} ({key}); found: {listed}")
    if names.text:
        return ColumnMapping(text=names.text)

    def first(field: str, *usual: str) -> str | None:
        return named.get(field) or next((name for name in usual if name in found), None)

    prompt = first("prompt", *PROMPTS)
    response = first("response", *RESPONSES)
    messages = first("messages", *CONVERSATIONS)
    chosen, rejected = first("chosen", "chosen"), first("rejected", "rejected")
    if names.first:
        chosen = rejected = None  # what decides has been named
    if messages and (response or chosen or names.first) and "messages" not in named:
        messages = None  # the conversation once more, beside the columns that say which reply is which
    if messages and "prompt" not in named:
        prompt = None  # its first message once more
    columns = ColumnMapping(
        prompt=prompt,
        input="input" if prompt == "instruction" and "input" in found else None,
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
            f"{source}: columns.margin is for pairs of replies, and there are none; name their columns too "
            "(chosen and rejected, or first and second), or leave it out"
        )
    if (columns.chosen is None) != (columns.rejected is None):
        missing = "rejected" if columns.rejected is None else "chosen"
        raise DataError(
            f"{source}: a preference needs a column {missing!r} too; found: {listed}; see columns.{missing}"
        )
    if not (columns.prompt or columns.messages or columns.chosen or columns.first):
        if "text" in found:
            raise DataError(
                f"{source}: a text alone does not say where its prompt ends; give prompt and response, or set "
                f"columns.text to learn all of it in SFT; found: {listed}"
            )
        raise DataError(f"{source}: no known format fits its columns; found: {listed}; known: {FORMATS}; see `columns`")
    _check_decided(columns, prefer, found, source)
    return columns


def list_named_columns(names: ColumnsConfig, prefer: PreferenceLabelConfig) -> dict[str, str]:
    """Key of the settings -> the column that it names."""
    keys = {f"columns.{field}": name for field, name in names.named().items()}
    if prefer.label:
        keys["prefer.label"] = prefer.label
    return keys | {f"prefer.scores.{place}": name for place, name in enumerate(prefer.scores or ())}


def _check_decided(columns: ColumnMapping, prefer: PreferenceLabelConfig, found: Collection[str], source: str) -> None:
    """Raise `DataError` where it is not said, or said twice, which of two replies is preferred."""
    if prefer.names_columns != bool(columns.first):
        raise DataError(
            f"{source}: `prefer` decides between columns.first and columns.second; give all three, or none of them"
        )
    named = {name for name in vars(columns).values() if isinstance(name, str)}
    used = named | {name.split(".")[0] for name in named}
    replies = (columns.chosen, columns.rejected)
    if columns.chosen and not prefer.nothing and (name := find_unused_label(found, used, replies)):
        raise DataError(
            f"{source}: {name} looks like what decides which reply is preferred, and would not be asked; name it in "
            "`prefer` (and the replies in columns.first, columns.second), or set prefer: none if it does not decide"
        )


Values = dict[str, Any]
_MOST = 12  # keys of an object that are named


def flatten_nested_columns(
    records: Sequence[Values | None], found: Collection[str], names: Mapping[str, str], source: str
) -> list[Values | None]:
    """The records with a column for each nested one in `names`; absent where a record does not reach it.

    Args:
        records: None for one that cannot be read.
        found: the columns of the source.
        names: key of the settings -> the column that it names.

    Raises:
        DataError: no record has such a column; it says what is there instead.
    """
    nested = {name: name.split(".") for name in names.values() if name not in found and name.split(".")[0] in found}
    if not nested:
        return list(records)
    flat: list[Values | None] = []
    reached = set()
    for record in records:
        if record is None:
            flat.append(None)
            continue
        values = dict(record)
        for name, parts in nested.items():
            there, value = _follow(record, parts)
            if there:
                reached.add(name)
                values[name] = value
        flat.append(values)
    for key, name in names.items():
        if name in nested and name not in reached:
            whole = (record for record in records if record is not None)
            holder = next((record for record in whole if record.get(nested[name][0]) is not None), {})
            raise DataError(f"{source}: no column {name!r} ({key}); {_instead(holder, nested[name])}")
    return flat


def _follow(value: Any, parts: Sequence[str]) -> tuple[bool, Any]:
    """(whether the path leads somewhere, what is there)."""
    for part in parts:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False, None
    return True, value


def _instead(value: Any, parts: Sequence[str]) -> str:
    """What is found at the last place that the path leads to."""
    at = next(length for length in range(len(parts) - 1, -1, -1) if _follow(value, parts[:length])[0])
    place, (_, held) = ".".join(parts[:at]) or parts[0], _follow(value, parts[:at])
    if isinstance(held, Mapping) and held:
        keys = [str(key) for key in held]
        more = f" and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
        return f"{place} holds {', '.join(keys[:_MOST])}{more}"
    if isinstance(held, list | tuple) and held:
        return f"{place} is a list of {len(held)}, counted from 0"
    if isinstance(held, list | tuple | Mapping):
        return f"{place} is empty"
    return f"{place} is {'text' if isinstance(held, str) else describe_type(held)}"


class KnownDataset(ConfigModel):
    """How a data set of a known name is read; the fields are explained in `known.yaml`."""

    name: str
    path: str | None = None
    subset: str | None = None
    revision: str | None = None
    heldout_split: str | None = None
    columns: ColumnsConfig
    prefer: PreferenceLabelConfig = PreferenceLabelConfig()
    clean: tuple[Cleaning, ...] = ()


def find_known_dataset(name: str) -> KnownDataset | None:
    """What is known of a hub name, or of a folder here whose path ends in one; letter case does not count."""
    path = Path(name)
    here = is_path(name)
    if here and not path.is_dir():
        return None
    ends = ["/".join(path.parts[-2:]), *([path.name] if here else [])]  # mkqa-Chinese is nobody's
    return next((found for end in ends if (found := load_known_datasets().get(end.casefold()))), None)


@cache
def load_known_datasets() -> dict[str, KnownDataset]:
    """All of `known.yaml`, by names without letter case."""
    entries = parse_yaml(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
    return {name.casefold(): KnownDataset(name=name, **entry) for name, entry in entries.items()}
