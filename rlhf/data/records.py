"""Conversations, the canonical row, and the parsing of records of the known formats into rows.

`parse_record` takes a record (column -> value, as a source yields it) and its column mapping (`rlhf.data.formats`); it
returns a `Row` or raises `RejectedRecordError` with the reason.

Conversations also exist as text: `Human: ... Assistant: ...` with blank lines or on one line, and `USER:`. If blank
lines separate the turns, only they count: a reply may mention "Assistant:". On one line, the text is split into turns
only if it begins with the user's name, ends with the assistant's name, and the two alternate throughout; otherwise all
of it is the user's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rlhf.config.data import PLACEHOLDER, Cleaning
from rlhf.data.formats import CONVERSATIONS, PROMPTS, ColumnMapping, NoPreferenceError, parse_finite
from rlhf.data.report import EMPTY_PROMPT, EMPTY_TEXT, PROMPTS_DIFFER, SURROGATE, describe_type

_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
_SPEAKERS = (("Human", "Assistant"), ("USER", "ASSISTANT"))
_SPEAKER_ROLES = {"Human": "user", "USER": "user", "Assistant": "assistant", "ASSISTANT": "assistant"}
_REPLY_SPEAKER = re.compile(r"\s*(?:Assistant|ASSISTANT):")
_CITATION = re.compile(r"\s*\[\d+(?:\s*,\s*\d+)*\]")
_SPACES = re.compile(r"[ \t]{2,}")
_MAX_NAME_LENGTH = 20  # characters of a column or role in a message


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` is user, assistant or system."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """One usable record of a data set.

    Attributes:
        prompt: the conversation up to the reply, usually one user message; empty if `response` is a text alone.
        text: the prompt as plain text, for tokenizers without a chat template.
        response: the demonstration (the preferred reply if the data has only pairs), or None.
        chosen, rejected: the preferred and the dispreferred reply, or None if the record is not a preference.
        source: place of the record, for messages ("file.jsonl:17").
        undecided: the reason why a record with two replies prefers neither; otherwise empty.
        margin: how much more the preferred reply should score; None if the record's margin is not such a number.
        record: the columns as the source has them, if they were requested.
        template: the template that `text` is written in (data.datasets.*.template), or empty.
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
    template: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the record's columns, and the parsed values under names that the record does not use."""
        parsed = {name: getattr(self, name) for name in ("response", "chosen", "rejected", "source")}
        messages = [{"role": message.role, "content": message.content} for message in self.prompt]
        return {"messages": messages, **parsed, **self.record}


class RejectedRecordError(Exception):
    """A record cannot become a row; the message is the reason, which the data report counts."""


def parse_record(record: Mapping[str, Any], columns: ColumnMapping, source: str) -> Row:
    """Build the row of one record.

    Raises:
        RejectedRecordError: the record has no prompt, or the value of a column does not fit its meaning.
    """
    if columns.text:
        text = _text(record.get(columns.text), columns.text)
        if not text.strip():
            raise RejectedRecordError(EMPTY_TEXT)
        return Row((), "", text, None, None, source)  # its white space stays
    prompt: tuple[Message, ...] = ()
    response = chosen = rejected = None
    is_conversation = False
    strips_speaker = _strips_speaker(record, columns)
    better, worse, undecided = _order_replies(record, columns)
    if better and worse and _has_any(record, better, worse):
        prompt, chosen = _context_and_reply(record, better)
        other_prompt, rejected = _context_and_reply(record, worse)
        if prompt != other_prompt:
            raise RejectedRecordError(PROMPTS_DIFFER)
        chosen, rejected = (None, None) if undecided else (chosen, rejected)
        response = chosen
        is_conversation = bool(prompt)
    if not prompt and columns.prompt:
        value = record.get(columns.prompt)
        messages = _messages(value, columns.prompt, asks=strips_speaker)
        # A last, empty turn of the assistant only asks for the reply.
        prompt = messages[:-1] if messages and messages[-1] == Message("assistant", "") else messages
        is_conversation = _is_conversation(value)
        if prompt and columns.input and (suffix := _text(record.get(columns.input), columns.input).strip()):
            prompt = (*prompt[:-1], Message("user", f"{prompt[-1].content}\n\n{suffix}"))
    elif not prompt and columns.messages:
        prompt, response = _split_last_reply(
            _messages(record.get(columns.messages), columns.messages, "a list of turns")
        )
        is_conversation = True
    if columns.response and (response is None or _has_any(record, columns.response)):
        response = _context_and_reply(record, columns.response)[1]
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        raise RejectedRecordError(_missing_prompt_reason(record, columns))
    if columns.template:
        text = format_with_template(prompt, columns.template)
    else:
        text = format_transcript(prompt) if is_conversation else format_plain_prompt(prompt)
    kinds = {*columns.clean, "speaker"} if strips_speaker else columns.clean
    response, chosen, rejected = (_clean(reply, kinds) for reply in (response, chosen, rejected))
    margin: float | None = 0.0
    if columns.margin:
        number = parse_finite(record.get(columns.margin))
        margin = None if number is None or number < 0 else number
    return Row(prompt, text, response, chosen, rejected, source, undecided, margin, template=columns.template)


def _order_replies(record: Mapping[str, Any], columns: ColumnMapping) -> tuple[str | None, str | None, str]:
    """Return (column of the preferred reply, column of the other, the reason if the record prefers neither)."""
    if not (columns.first and columns.second and columns.preference):
        return columns.chosen, columns.rejected, ""
    try:
        first_is_better = columns.preference.first_is_better(record)
    except NoPreferenceError as error:
        return columns.first, columns.second, str(error)
    return (columns.first, columns.second, "") if first_is_better else (columns.second, columns.first, "")


def _strips_speaker(record: Mapping[str, Any], columns: ColumnMapping) -> bool:
    """Return True if the assistant's name before the replies is not part of them.

    This holds if all replies of the source have it, or if the prompt is a conversation that does not end with it.
    """
    replies = [value for name in columns.replies if isinstance(value := record.get(name), str) and value.strip()]
    if not replies or not all(map(starts_with_speaker, replies)):
        return False
    prompt = record.get(columns.prompt) if columns.prompt else None
    return columns.speaker_in_replies or (
        isinstance(prompt, str) and _is_transcript(prompt) and not _awaits_reply(prompt)
    )


def _clean(reply: str | None, kinds: Collection[Cleaning]) -> str | None:
    """Return a reply of the source as it is trained on."""
    if reply and "speaker" in kinds and starts_with_speaker(reply):
        reply = _REPLY_SPEAKER.sub("", reply, count=1).strip()
    if reply and "citations" in kinds:
        reply = _SPACES.sub(" ", _CITATION.sub("", reply)).strip()
    return reply


def _has_any(record: Mapping[str, Any], *names: str) -> bool:
    """Return True if the record has any of the columns; readers of tables give None for a missing value."""
    return any(record.get(name) is not None for name in names)


def _missing_prompt_reason(record: Mapping[str, Any], columns: ColumnMapping) -> str:
    """Return the reason for a missing prompt: it is empty, or in a column that other rows of the source do not use."""
    if not _has_any(record, *filter(None, (columns.prompt, columns.messages, columns.chosen, columns.first))):
        present = sorted(name for name, value in record.items() if value is not None)
        if any(name in present for name in (*PROMPTS, *CONVERSATIONS, "text", "chosen")):
            return f"other columns than the source's ({', '.join(map(_shorten, present))})"
    return EMPTY_PROMPT


def _shorten(name: str) -> str:
    """Return a name for a message: one short line, unprintable surrogates replaced."""
    text = " ".join(name.encode("utf-8", "replace").decode().split())
    return text if len(text) <= _MAX_NAME_LENGTH else f"{text[:_MAX_NAME_LENGTH]}..."


def _text(value: Any, column: str) -> str:
    """Return the text of a column; an absent value counts as empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RejectedRecordError(f"{_shorten(column)} is {describe_type(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # an unpaired surrogate: neither tokenizers nor files accept it
        raise RejectedRecordError(SURROGATE) from error
    return value


def _is_conversation(value: Any) -> bool:
    return not isinstance(value, str) or _is_transcript(value)


def _messages(value: Any, column: str, expected: str = "text", *, asks: bool = False) -> tuple[Message, ...]:
    """Return the messages of a list of turns, of a Human:/Assistant: transcript (`_parse_turns`), or of a prompt."""
    if value is None:
        return ()
    if isinstance(value, str):
        text = _text(value, column)
        return _parse_turns(text, asks=asks) if _is_transcript(text) else (Message("user", text),)
    if not isinstance(value, list | tuple):
        raise RejectedRecordError(f"{_shorten(column)} is {describe_type(value)}, not {expected}")
    return tuple(_message(turn, column) for turn in value)


def _message(turn: Any, column: str) -> Message:
    name = _shorten(column)
    if not isinstance(turn, Mapping) or not ({"role", "content"} <= turn.keys() or {"from", "value"} <= turn.keys()):
        raise RejectedRecordError(f"{name}: a turn is not an object of role and content")
    keys = ("role", "content") if {"role", "content"} <= turn.keys() else ("from", "value")  # ShareGPT's keys
    role, content = (turn[key] for key in keys)
    if not isinstance(role, str) or role not in _ROLES:
        shown = repr(_shorten(role)) if isinstance(role, str) else describe_type(role)
        raise RejectedRecordError(f"{name}: unknown role {shown}")
    return Message(_ROLES[role], _text(content, f"{name}: content"))


def _context_and_reply(record: Mapping[str, Any], column: str) -> tuple[tuple[Message, ...], str]:
    """Return (conversation before the reply if the column repeats it, the reply)."""
    value = record.get(column)
    if value is None or (isinstance(value, str) and not _is_conversation(value)):
        return (), _text(value, column).strip()
    messages = _messages(value, column)
    if not messages or messages[-1].role != "assistant":
        raise RejectedRecordError(f"{_shorten(column)} does not end with the assistant's turn")
    return messages[:-1], messages[-1].content.strip()


def _split_last_reply(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str | None]:
    """Return (conversation before the last assistant message, that message); without one, all of it is a prompt."""
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=None)
    return (messages, None) if last is None else (messages[:last], messages[last].content.strip())


def _is_transcript(text: str) -> bool:
    """Return True if a text is a conversation: it begins with `Human:`, or with `USER:` and ends with `ASSISTANT:`."""
    begins, ends = text.lstrip().startswith, text.rstrip().endswith
    return begins("Human:") or (begins("USER:") and ends("ASSISTANT:"))


def _awaits_reply(text: str) -> bool:
    """Return True if a text ends with the assistant's name, which asks for a reply."""
    return text.rstrip().endswith(tuple(f"{assistant}:" for _, assistant in _SPEAKERS))


def starts_with_speaker(reply: str) -> bool:
    """Return True if a reply begins with the assistant's name."""
    return bool(_REPLY_SPEAKER.match(reply))


def _parse_turns(text: str, *, asks: bool = False) -> tuple[Message, ...]:
    """Split a transcript into turns; if the text awaits a reply, the last turn is the assistant's and empty.

    Args:
        text: a transcript, see `_is_transcript`.
        asks: the assistant's name stands before the replies instead of at the end of the text.
    """
    text = text.replace("\r\n", "\n")  # blank lines separate turns, whichever system wrote them
    human, assistant = next(pair for pair in _SPEAKERS if text.lstrip().startswith(f"{pair[0]}:"))
    pieces = re.split(rf"(?:\A|\n\n)\s*({human}|{assistant}):", text.strip())[1:]
    turns = [(name, content.strip()) for name, content in zip(pieces[::2], pieces[1::2], strict=True)]
    name, content = turns.pop()
    if asks and name == human:
        content += f" {assistant}:"
    is_inline = name == human and content.endswith(f"{assistant}:")
    turns += _split_inline(content, human, assistant) if is_inline else [(name, content)]
    return tuple(Message(_SPEAKER_ROLES[name], content) for name, content in turns)


def _split_inline(text: str, human: str, assistant: str) -> list[tuple[str, str]]:
    """Return the turns in a user's text that ends with the assistant's name."""
    pieces = re.split(rf"(?:(?<=\s)|</s>\s*)({human}|{assistant}):", text)
    names = [human, *pieces[1::2]]
    if names[-1] == assistant and not pieces[-1] and all(name != following for name, following in pairwise(names)):
        return [(name, content.strip()) for name, content in zip(names, pieces[::2], strict=True)]
    return [(human, text.removesuffix(f"{assistant}:").rstrip())]


def format_transcript(messages: Collection[Message]) -> str:
    """Return `Human: ...` and `Assistant: ...` turns, separated by blank lines, with the assistant's turn next."""
    names = {"user": "Human: ", "assistant": "Assistant: ", "system": ""}
    turns = [f"{names[message.role]}{message.content}" for message in messages]
    return "\n\n".join([*turns, "Assistant:"])


def format_plain_prompt(messages: Collection[Message]) -> str:
    """Return a conversation as text without a chat template: a single user message unchanged, else a transcript."""
    single = next(iter(messages)) if len(messages) == 1 else None
    return single.content if single and single.role == "user" else format_transcript(messages)


def format_with_template(messages: Collection[Message], template: str) -> str:
    """Return a conversation with the template around each question; replies follow theirs, blank lines separate turns.

    Args:
        messages: the conversation, usually one question.
        template: a text with `{prompt}` in it.
    """
    turns: list[str] = []
    previous = ""
    for message in messages:
        if message.role == "assistant" and previous == "user":
            turns[-1] = append_reply(turns[-1], message.content)
        else:
            is_question = message.role == "user"
            turns.append(template.replace(PLACEHOLDER, message.content) if is_question else message.content)
        previous = message.role
    return "\n\n".join(turns)


def append_reply(text: str, reply: str) -> str:
    """Return a prompt and the reply to it, with a space between them unless the prompt ends in white space."""
    space = "" if not text or text[-1:].isspace() else " "
    return f"{text}{space}{reply}"
