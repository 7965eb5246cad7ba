"""The canonical row, and how records of the known formats become one.

A record (column -> value, as a source yields it) goes in; a `Row` comes out, or `Rejected` says why not.
The formats are recognized by their columns alone; `ColumnsConfig` names columns that differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.config import ColumnsConfig
from rlhf.data.reasons import EMPTY_PROMPT, PROMPTS_DIFFER, SURROGATE, kind_of
from rlhf.errors import DataError

FORMATS = (
    "prompt/chosen/rejected, chosen/rejected (Human:/Assistant: transcripts or message lists), prompt/response, "
    "prompt/completion, instruction/input/output, question/answer, messages, prompt"
)

_PROMPT_COLUMNS = ("prompt", "question", "instruction")
_RESPONSE_COLUMNS = ("response", "completion", "answer", "output")
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
_TURN = re.compile(r"(?:\A|\n\n)\s*(Human|Assistant):")
_LONGEST_NAME = 20  # characters of a column or role, as shown
# Columns of files that are often met, of no format known here: what they are and what to do.
_UNKNOWN = {
    "conversations": "conversations (ShareGPT): each turn has from/value; rename them to messages with role/content",
    "text": "a text alone does not say where its prompt ends; give prompt and response",
}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` is user, assistant or system."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """One usable record of a data set.

    Attributes:
        prompt: the conversation up to the reply, usually one user message.
        text: the same as plain text, for tokenizers without a chat template.
        response: the demonstration (the preferred reply where the data has none of its own); None: the record has none.
        chosen, rejected: the preferred and the dispreferred reply; None: the record is not a preference.
        source: where the record came from, for messages ("file.jsonl:17").
    """

    prompt: tuple[Message, ...]
    text: str
    response: str | None
    chosen: str | None
    rejected: str | None
    source: str


class Rejected(Exception):
    """A record that cannot become a row; `reason` is what the data report counts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Columns:
    """The column that holds each field of a row; None: the source has no such column."""

    prompt: str | None = None
    input: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    messages: str | None = None


def recognize(found: Collection[str], names: ColumnsConfig, source: str) -> Columns:
    """Match the columns of a source to the known formats; `names` wins over the usual column names.

    Raises:
        DataError: a named column is missing, or no format fits the columns found.
    """
    listed = ", ".join(sorted(found)) or "none"
    named = {field: name for field, name in names.model_dump().items() if name}
    for field, name in named.items():
        if name not in found:
            raise DataError(f"{source}: no column {name!r} (columns.{field}); found: {listed}")

    def first(field: str, *usual: str) -> str | None:
        return named.get(field) or next((name for name in usual if name in found), None)

    prompt = first("prompt", *_PROMPT_COLUMNS)
    response = first("response", *_RESPONSE_COLUMNS)
    chosen, rejected, messages = first("chosen", "chosen"), first("rejected", "rejected"), first("messages", "messages")
    if messages and (response or chosen) and "messages" not in named:
        messages = None  # the conversation once more, beside the columns that say which reply is which
    if messages and "prompt" not in named:
        prompt = None  # its first message once more
    columns = Columns(
        prompt=prompt,
        input="input" if prompt == "instruction" and "input" in found else None,
        response=response,
        chosen=chosen,
        rejected=rejected,
        messages=messages,
    )
    if (columns.chosen is None) != (columns.rejected is None):
        missing = "rejected" if columns.rejected is None else "chosen"
        raise DataError(
            f"{source}: a preference needs a column {missing!r} too; found: {listed}; see columns.{missing}"
        )
    if not (columns.prompt or columns.messages or columns.chosen):
        for name, advice in _UNKNOWN.items():
            if name in found:
                raise DataError(f"{source}: {advice}; found: {listed}")
        raise DataError(f"{source}: no known format fits its columns; found: {listed}; known: {FORMATS}; see `columns`")
    return columns


def parse(record: Mapping[str, Any], columns: Columns, source: str) -> Row:
    """Build the row of one record.

    Raises:
        Rejected: the record has no prompt, or one of its columns does not hold what its name says.
    """
    prompt: tuple[Message, ...] = ()
    response = chosen = rejected = None
    is_conversation = False
    if columns.chosen and columns.rejected and _has(record, columns.chosen, columns.rejected):
        prompt, chosen = _context_and_reply(record, columns.chosen)
        other, rejected = _context_and_reply(record, columns.rejected)
        if prompt != other:
            raise Rejected(PROMPTS_DIFFER)
        response = chosen
        is_conversation = bool(prompt)
    if not prompt and columns.prompt:
        value = record.get(columns.prompt)
        prompt, is_conversation = _open(_messages(value, columns.prompt)), _is_conversation(value)
        if prompt and columns.input and (more := _text(record.get(columns.input), columns.input).strip()):
            prompt = (*prompt[:-1], Message("user", f"{prompt[-1].content}\n\n{more}"))
    elif not prompt and columns.messages:
        prompt, response = _demonstration(_messages(record.get(columns.messages), columns.messages, "a list of turns"))
        is_conversation = True
    if columns.response and (response is None or _has(record, columns.response)):
        response = _context_and_reply(record, columns.response)[1]
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        raise Rejected(_no_prompt(record, columns))
    text = transcript(prompt) if is_conversation else plain_prompt(prompt)
    return Row(prompt, text, response, chosen, rejected, source)


def _has(record: Mapping[str, Any], *names: str) -> bool:
    """Whether the record has any of the columns; readers of tables give None for those it lacks."""
    return any(record.get(name) is not None for name in names)


def _no_prompt(record: Mapping[str, Any], columns: Columns) -> str:
    """Why no prompt was found: it is empty, or is in a column that other rows of the source do not use."""
    if not _has(record, *filter(None, (columns.prompt, columns.messages, columns.chosen))):
        present = sorted(name for name, value in record.items() if value is not None)
        if any(name in present for name in (*_PROMPT_COLUMNS, *_UNKNOWN, "messages", "chosen")):
            return f"other columns than the source's ({', '.join(map(_short, present))})"
    return EMPTY_PROMPT


def transcript(messages: Collection[Message]) -> str:
    """`Human: ...` and `Assistant: ...` turns separated by blank lines, open for the assistant's next reply."""
    names = {"user": "Human: ", "assistant": "Assistant: ", "system": ""}
    turns = [f"{names[message.role]}{message.content}" for message in messages]
    return "\n\n".join([*turns, "Assistant:"])


def plain_prompt(messages: Collection[Message]) -> str:
    """A conversation without a chat template: a lone user message is used as it is, any other as a transcript."""
    alone = next(iter(messages)) if len(messages) == 1 else None
    return alone.content if alone and alone.role == "user" else transcript(messages)


def _short(name: str) -> str:
    """A name as it can stand in a line; half characters in it cannot be printed."""
    text = " ".join(name.encode("utf-8", "replace").decode().split())
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def _text(value: Any, column: str) -> str:
    """The text of a column; an absent value counts as empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Rejected(f"{_short(column)} is {kind_of(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half a character: no tokenizer takes it, and no file holds it
        raise Rejected(SURROGATE) from error
    return value


def _is_conversation(value: Any) -> bool:
    return not isinstance(value, str) or value.lstrip().startswith("Human:")


def _messages(value: Any, column: str, wanted: str = "text") -> tuple[Message, ...]:
    """Messages of a list of {role, content}, of a Human:/Assistant: transcript, or of a lone prompt."""
    if value is None:
        return ()
    if isinstance(value, str):
        text = _text(value, column)
        return _turns(text) if _is_conversation(text) else (Message("user", text),)
    if not isinstance(value, list | tuple):
        raise Rejected(f"{_short(column)} is {kind_of(value)}, not {wanted}")
    return tuple(_message(turn, column) for turn in value)


def _message(turn: Any, column: str) -> Message:
    name = _short(column)
    if isinstance(turn, Mapping) and "role" not in turn and {"from", "value"} <= turn.keys():
        raise Rejected(f"{name}: turns have from/value (ShareGPT)")
    if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
        raise Rejected(f"{name}: a turn is not an object of role and content")
    role = turn["role"]
    if not isinstance(role, str) or role not in _ROLES:
        shown = repr(_short(role)) if isinstance(role, str) else kind_of(role)
        raise Rejected(f"{name}: unknown role {shown}")
    return Message(_ROLES[role], _text(turn["content"], f"{name}: content"))


def _turns(text: str) -> tuple[Message, ...]:
    parts = _TURN.split(text.strip())[1:]
    named = zip(parts[::2], parts[1::2], strict=True)
    return tuple(Message(_ROLES[name.lower()], content.strip()) for name, content in named)


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
        raise Rejected(f"{_short(column)} does not end with the assistant's turn")
    return messages[:-1], messages[-1].content.strip()


def _demonstration(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str | None]:
    """(conversation before the last assistant message, that message); without one, all of it is a prompt."""
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=None)
    return (messages, None) if last is None else (messages[:last], messages[last].content.strip())
