"""Rows that are too long, made to fit: prompts lose what is oldest, completions their end.

A conversation loses its oldest turns as wholes; its system message stays. Where one question is left and too long, its
beginning goes, token by token, and what the chat template (or `Human:`) writes around it stays. A completion that was
cut does not end with an end-of-sequence token: the model is not taught to stop there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from rlhf.config.schema import DataConfig
from rlhf.data.prompt_encoding import encode_prompts
from rlhf.data.records import Row
from rlhf.data.transcripts import Message, plain_prompt, transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = list[int] | None
_PROBES = ("a", "?")  # two questions that share no token


def longest_completion(row: Row, prompt: list[int], config: DataConfig) -> int:
    """Tokens of a completion, at most; a text without a prompt has the room of both."""
    return config.max_completion_length if row.prompt else config.max_length - len(prompt)


def without_oldest(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], prompts: Sequence[Ids], config: DataConfig
) -> tuple[list[Row], list[Ids]]:
    """The rows and their prompt ids, without so many of the oldest turns that the prompts are not too long.

    Each keeps its last question, however long that is. With data.too_long: drop, all stay as they are.
    """
    shorter = [
        _without_oldest(tokenizer, row, ids, config) if config.too_long == "truncate" else (row, ids)
        for row, ids in zip(rows, prompts, strict=True)
    ]
    return [row for row, _ in shorter], [ids for _, ids in shorter]


def cut(
    tokenizer: PreTrainedTokenizerBase, row: Row, prompt: Ids, completions: Sequence[Ids], config: DataConfig
) -> tuple[Ids, list[Ids], bool]:
    """(prompt ids without the beginning of the question, completion ids without their end, whether any were cut).

    What is not too long stays as it is, and so does all where what the template writes alone is too long, or with
    data.too_long: drop.
    """
    if config.too_long == "drop" or prompt is None:
        return prompt, list(completions), False
    fitted = prompt
    if len(prompt) > config.max_prompt_length:
        fitted = _without_beginning(tokenizer, row, prompt, config)
    most = longest_completion(row, prompt, config)
    ends = [ids and ids[:most] for ids in completions]
    return fitted, ends, (fitted, ends) != (prompt, list(completions))


def _without_oldest(tokenizer: PreTrainedTokenizerBase, row: Row, ids: Ids, config: DataConfig) -> tuple[Row, Ids]:
    while ids is not None and len(ids) > config.max_prompt_length:
        system = [message for message in row.prompt if message.role == "system"]
        turns = [message for message in row.prompt if message.role != "system"]
        later = next((place for place, turn in enumerate(turns) if place and turn.role == "user"), None)
        if later is None:
            break
        row = _with_prompt(row, (*system, *turns[later:]))
        ids = encode_prompts(tokenizer, [row], chat_template=config.chat_template)[0]
    return row, ids


def _without_beginning(tokenizer: PreTrainedTokenizerBase, row: Row, ids: list[int], config: DataConfig) -> list[int]:
    """Prompt ids of a row whose last question is too long; what is written around that shows in two other questions."""
    place = next(place for place, message in enumerate(row.prompt) if message.role == "user")
    before, after = row.prompt[:place], row.prompt[place + 1 :]
    rows = [_with_prompt(row, (*before, Message("user", probe), *after)) for probe in _PROBES]
    one, other = encode_prompts(tokenizer, rows, chat_template=config.chat_template)
    if one is None or other is None:
        return ids
    head = _shared(ids, _shared(one, other))
    tail = _shared(ids[::-1], _shared(one[::-1], other[::-1]))
    if len(head) + len(tail) >= config.max_prompt_length:
        return ids
    return [*head, *ids[len(ids) - config.max_prompt_length + len(head) :]]


def _with_prompt(row: Row, prompt: tuple[Message, ...]) -> Row:
    form = transcript if row.text == transcript(row.prompt) else plain_prompt
    return replace(row, prompt=prompt, text=form(prompt))


def _shared(one: list[int], other: list[int]) -> list[int]:
    """What both begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in pairs]
