"""Conversations, and their forms as text: `Human: ... Assistant: ...`, with blank lines or in one line, and `USER:`.

Where turns are told apart by blank lines, only those count: a reply may speak of "Assistant:". In one line they are
told apart where the text begins with the user's name, ends with the assistant's, and the two take turns throughout;
else all of it is the user's.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

_PAIRS = (("Human", "Assistant"), ("USER", "ASSISTANT"))
_ROLES = {"Human": "user", "USER": "user", "Assistant": "assistant", "ASSISTANT": "assistant"}
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


def is_open(text: str) -> bool:
    """Whether a text ends with the assistant's name, and so asks for its reply."""
    return text.rstrip().endswith(tuple(f"{assistant}:" for _, assistant in _PAIRS))


def is_led(reply: str) -> bool:
    """Whether a reply begins with the assistant's name."""
    return bool(_LEAD.match(reply))


def without_lead(reply: str) -> str:
    """A reply without the assistant's name before it."""
    return _LEAD.sub("", reply, count=1).strip()


def turns(text: str, *, asks: bool = False) -> tuple[Message, ...]:
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
    return tuple(Message(_ROLES[name], content) for name, content in found)


def _inline(text: str, human: str, assistant: str) -> list[tuple[str, str]]:
    """The turns in a text of the user's that ends with the assistant's name."""
    pieces = re.split(rf"(?:(?<=\s)|</s>\s*)({human}|{assistant}):", text)
    names = [human, *pieces[1::2]]
    if names[-1] == assistant and not pieces[-1] and all(one != other for one, other in pairwise(names)):
        return [(name, content.strip()) for name, content in zip(names, pieces[::2], strict=True)]
    return [(human, text.removesuffix(f"{assistant}:").rstrip())]


def transcript(messages: Collection[Message]) -> str:
    """`Human: ...` and `Assistant: ...` turns separated by blank lines, open for the assistant's next reply."""
    names = {"user": "Human: ", "assistant": "Assistant: ", "system": ""}
    turns = [f"{names[message.role]}{message.content}" for message in messages]
    return "\n\n".join([*turns, "Assistant:"])


def plain_prompt(messages: Collection[Message]) -> str:
    """A conversation without a chat template: a lone user message is used as it is, any other as a transcript."""
    alone = next(iter(messages)) if len(messages) == 1 else None
    return alone.content if alone and alone.role == "user" else transcript(messages)
