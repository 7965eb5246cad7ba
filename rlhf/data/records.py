"""The canonical row, and how records of the known formats become one.

A record (column -> value, as a source yields it) and what its columns are (`rlhf.data.formats`) go in; a `Row` comes
out, or `Rejected` says why not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rlhf.data.formats import CONVERSATIONS, PROMPTS, ColumnMapping
from rlhf.data.preference_labels import NoPreferenceError, parse_finite
from rlhf.data.report import EMPTY_PROMPT, EMPTY_TEXT, PROMPTS_DIFFER, SURROGATE, describe_type

_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
_CITATION = re.compile(r"\s*\[\d+(?:\s*,\s*\d+)*\]")
_SPACES = re.compile(r"[ \t]{2,}")
_LONGEST_NAME = 20  # characters of a column or role, as shown


@dataclass(frozen=True)
class Row:
    """One usable record of a data set.

    Attributes:
        prompt: the conversation up to the reply, usually one user message; empty where `response` is a text alone.
        text: the same as plain text, for tokenizers without a chat template.
        response: the demonstration (the preferred reply where the data has none of its own); None: the record has none.
        chosen, rejected: the preferred and the dispreferred reply; None: the record is not a preference.
        source: where the record came from, for messages ("file.jsonl:17").
        undecided: why a record with two replies prefers neither of them; empty: it does, or has no two.
        margin: by how much more the preferred reply should score; None: the record's is no such number.
        record: the columns as the source has them, where they were asked for.
    """

    prompt: tuple[Message, ...]
    text: str
    response: str | None
    chosen: str | None
    rejected: str | None
    source: str
    undecided: str = ""
    margin: float | None = 0.0
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The record's columns and, where it has none of that name, what was read in them."""
        found = {name: getattr(self, name) for name in ("response", "chosen", "rejected", "source")}
        messages = [{"role": message.role, "content": message.content} for message in self.prompt]
        return {"messages": messages, **found, **self.record}


class RejectedRecordError(Exception):
    """A record that cannot become a row; `reason` is what the data report counts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def parse_record(record: Mapping[str, Any], columns: ColumnMapping, source: str) -> Row:
    """Build the row of one record.

    Raises:
        Rejected: the record has no prompt, or one of its columns does not hold what its name says.
    """
    if columns.text:
        return _raw(_text(record.get(columns.text), columns.text), source)
    prompt: tuple[Message, ...] = ()
    response = chosen = rejected = None
    is_conversation = False
    led = _is_led(record, columns)
    better, worse, undecided = _pair(record, columns)
    if better and worse and _has(record, better, worse):
        prompt, chosen = _context_and_reply(record, better)
        other, rejected = _context_and_reply(record, worse)
        if prompt != other:
            raise RejectedRecordError(PROMPTS_DIFFER)
        chosen, rejected = (None, None) if undecided else (chosen, rejected)
        response = chosen
        is_conversation = bool(prompt)
    if not prompt and columns.prompt:
        value = record.get(columns.prompt)
        prompt, is_conversation = _open(_messages(value, columns.prompt, asks=led)), _is_conversation(value)
        if prompt and columns.input and (more := _text(record.get(columns.input), columns.input).strip()):
            prompt = (*prompt[:-1], Message("user", f"{prompt[-1].content}\n\n{more}"))
    elif not prompt and columns.messages:
        prompt, response = _demonstration(_messages(record.get(columns.messages), columns.messages, "a list of turns"))
        is_conversation = True
    if columns.response and (response is None or _has(record, columns.response)):
        response = _context_and_reply(record, columns.response)[1]
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        raise RejectedRecordError(_no_prompt(record, columns))
    text = format_transcript(prompt) if is_conversation else format_plain_prompt(prompt)
    clean = _cleaner(columns, led=led)
    margin = _margin(record.get(columns.margin)) if columns.margin else 0.0
    return Row(prompt, text, clean(response), clean(chosen), clean(rejected), source, undecided, margin)


def _margin(value: Any) -> float | None:
    number = parse_finite(value)
    return None if number is None or number < 0 else number


def _raw(text: str, source: str) -> Row:
    """The row of a text that has no prompt; white space in it stays as it is."""
    if not text.strip():
        raise RejectedRecordError(EMPTY_TEXT)
    return Row((), "", text, None, None, source)


def _pair(record: Mapping[str, Any], columns: ColumnMapping) -> tuple[str | None, str | None, str]:
    """The columns of the preferred and the other reply, and why a record prefers neither."""
    if not (columns.first and columns.second and columns.decision):
        return columns.chosen, columns.rejected, ""
    try:
        first = columns.decision.first_is_better(record)
    except NoPreferenceError as error:
        return columns.first, columns.second, error.reason
    return (columns.first, columns.second, "") if first else (columns.second, columns.first, "")


def _is_led(record: Mapping[str, Any], columns: ColumnMapping) -> bool:
    """Whether the assistant's name before the replies is no part of them.

    All replies of the source have it, or the prompt is a conversation that lacks it at its end.
    """
    texts = [value for name in columns.replies if isinstance(value := record.get(name), str) and value.strip()]
    if not texts or not all(map(starts_with_speaker, texts)):
        return False
    prompt = record.get(columns.prompt) if columns.prompt else None
    return columns.led or (isinstance(prompt, str) and is_transcript(prompt) and not awaits_reply(prompt))


def _cleaner(columns: ColumnMapping, *, led: bool) -> Callable[[str | None], str | None]:
    """What makes of a reply the text that is learned."""

    def clean(reply: str | None) -> str | None:
        if reply and (led or ("speaker" in columns.clean and starts_with_speaker(reply))):
            reply = strip_speaker(reply)
        if reply and "citations" in columns.clean:
            reply = _SPACES.sub(" ", _CITATION.sub("", reply)).strip()
        return reply

    return clean


def _has(record: Mapping[str, Any], *names: str) -> bool:
    """Whether the record has any of the columns; readers of tables give None for those it lacks."""
    return any(record.get(name) is not None for name in names)


def _no_prompt(record: Mapping[str, Any], columns: ColumnMapping) -> str:
    """Why no prompt was found: it is empty, or is in a column that other rows of the source do not use."""
    if not _has(record, *filter(None, (columns.prompt, columns.messages, columns.chosen, columns.first))):
        present = sorted(name for name, value in record.items() if value is not None)
        if any(name in present for name in (*PROMPTS, *CONVERSATIONS, "text", "chosen")):
            return f"other columns than the source's ({', '.join(map(_short, present))})"
    return EMPTY_PROMPT


def _short(name: str) -> str:
    """A name as it can stand in a line; half characters in it cannot be printed."""
    text = " ".join(name.encode("utf-8", "replace").decode().split())
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def _text(value: Any, column: str) -> str:
    """The text of a column; an absent value counts as empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RejectedRecordError(f"{_short(column)} is {describe_type(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half a character: no tokenizer takes it, and no file holds it
        raise RejectedRecordError(SURROGATE) from error
    return value


def _is_conversation(value: Any) -> bool:
    return not isinstance(value, str) or is_transcript(value)


def _messages(value: Any, column: str, wanted: str = "text", *, asks: bool = False) -> tuple[Message, ...]:
    """Messages of a list of turns, of a Human:/Assistant: transcript, or of a lone prompt; see `turns`."""
    if value is None:
        return ()
    if isinstance(value, str):
        text = _text(value, column)
        return parse_turns(text, asks=asks) if is_transcript(text) else (Message("user", text),)
    if not isinstance(value, list | tuple):
        raise RejectedRecordError(f"{_short(column)} is {describe_type(value)}, not {wanted}")
    return tuple(_message(turn, column) for turn in value)


def _message(turn: Any, column: str) -> Message:
    name = _short(column)
    if not isinstance(turn, Mapping) or not ({"role", "content"} <= turn.keys() or {"from", "value"} <= turn.keys()):
        raise RejectedRecordError(f"{name}: a turn is not an object of role and content")
    keys = ("role", "content") if {"role", "content"} <= turn.keys() else ("from", "value")  # as ShareGPT has them
    role, content = (turn[key] for key in keys)
    if not isinstance(role, str) or role not in _ROLES:
        shown = repr(_short(role)) if isinstance(role, str) else describe_type(role)
        raise RejectedRecordError(f"{name}: unknown role {shown}")
    return Message(_ROLES[role], _text(content, f"{name}: content"))


def _open(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages without a last, empty turn of the assistant, which only asks for the reply."""
    return messages[:-1] if messages and messages[-1] == Message("assistant", "") else messages


def _context_and_reply(record: Mapping[str, Any], column: str) -> tuple[tuple[Message, ...], str]:
    """(conversation before the reply if the column repeats it, the reply)."""
    value = record.get(column)
    if value is None or (isinstance(value, str) and not _is_conversation(value)):
        return (), _text(value, column).strip()
    messages = _messages(value, column)
    if not messages or messages[-1].role != "assistant":
        raise RejectedRecordError(f"{_short(column)} does not end with the assistant's turn")
    return messages[:-1], messages[-1].content.strip()


def _demonstration(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str | None]:
    """(conversation before the last assistant message, that message); without one, all of it is a prompt."""
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=None)
    return (messages, None) if last is None else (messages[:last], messages[last].content.strip())


_PAIRS = (("Human", "Assistant"), ("USER", "ASSISTANT"))
_SPEAKER_ROLES = {"Human": "user", "USER": "user", "Assistant": "assistant", "ASSISTANT": "assistant"}
_LEAD = re.compile(r"\s*(?:Assistant|ASSISTANT):")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` is user, assistant or system."""

    role: str
    content: str


def is_transcript(text: str) -> bool:
    """Whether a text is a conversation: it begins with `Human:`, or with `USER:` and ends with `ASSISTANT:`."""
    begins, ends = text.lstrip().startswith, text.rstrip().endswith
    return begins("Human:") or (begins("USER:") and ends("ASSISTANT:"))


def awaits_reply(text: str) -> bool:
    """Whether a text ends with the assistant's name, and so asks for its reply."""
    return text.rstrip().endswith(tuple(f"{assistant}:" for _, assistant in _PAIRS))


def starts_with_speaker(reply: str) -> bool:
    """Whether a reply begins with the assistant's name."""
    return bool(_LEAD.match(reply))


def strip_speaker(reply: str) -> str:
    """A reply without the assistant's name before it."""
    return _LEAD.sub("", reply, count=1).strip()


def parse_turns(text: str, *, asks: bool = False) -> tuple[Message, ...]:
    """The turns of a transcript; the last is the assistant's and empty where the text is open.

    Args:
        asks: the assistant's name stands before the replies and not at the end of the text.
    """
    text = text.replace("\r\n", "\n")  # blank lines tell turns apart, whatever system wrote them
    human, assistant = next(pair for pair in _PAIRS if text.lstrip().startswith(f"{pair[0]}:"))
    parts = re.split(rf"(?:\A|\n\n)\s*({human}|{assistant}):", text.strip())[1:]
    found = [(name, content.strip()) for name, content in zip(parts[::2], parts[1::2], strict=True)]
    name, last = found.pop()
    if asks and name == human:
        last += f" {assistant}:"
    open_here = name == human and last.endswith(f"{assistant}:")
    found += _inline(last, human, assistant) if open_here else [(name, last)]
    return tuple(Message(_SPEAKER_ROLES[name], content) for name, content in found)


def _inline(text: str, human: str, assistant: str) -> list[tuple[str, str]]:
    """The turns in a text of the user's that ends with the assistant's name."""
    pieces = re.split(rf"(?:(?<=\s)|</s>\s*)({human}|{assistant}):", text)
    names = [human, *pieces[1::2]]
    if names[-1] == assistant and not pieces[-1] and all(one != other for one, other in pairwise(names)):
        return [(name, content.strip()) for name, content in zip(names, pieces[::2], strict=True)]
    return [(human, text.removesuffix(f"{assistant}:").rstrip())]


def format_transcript(messages: Collection[Message]) -> str:
    """`Human: ...` and `Assistant: ...` turns separated by blank lines, open for the assistant's next reply."""
    names = {"user": "Human: ", "assistant": "Assistant: ", "system": ""}
    turns = [f"{names[message.role]}{message.content}" for message in messages]
    return "\n\n".join([*turns, "Assistant:"])


def format_plain_prompt(messages: Collection[Message]) -> str:
    """A conversation without a chat template: a lone user message is used as it is, any other as a transcript."""
    alone = next(iter(messages)) if len(messages) == 1 else None
    return alone.content if alone and alone.role == "user" else format_transcript(messages)
