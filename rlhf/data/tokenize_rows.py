"""Rows become examples: those that a stage can use are tokenized, a thousand at a time; a report counts the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from rlhf.config.schema import DataConfig, Stage, share_of
from rlhf.data.examples import Demonstration, Example, Pair, Prompt
from rlhf.data.load_sources import PROGRESS_MIN_ROWS
from rlhf.data.prompt_encoding import (
    compile_control_tokens,
    encode_prompts,
    encode_replies,
    has_control_tokens,
    uses_chat_template,
)
from rlhf.data.records import Message, Row, format_plain_prompt, format_transcript
from rlhf.data.report import (
    CONTROL_TOKENS,
    EMPTY_RESPONSE,
    LONG_COMPLETION,
    LONG_PROMPT,
    NO_DEMONSTRATION,
    NO_DIFFERENCE,
    NO_PREFERENCE,
    PROMPTLESS,
    REFUSED,
    UNUSABLE_MARGIN,
    DataReport,
)
from rlhf.reporting.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


EXAMPLE_TYPES: dict[Stage, type[Example]] = {"sft": Demonstration, "reward": Pair, "dpo": Pair, "ppo": Prompt}
"""What each stage learns from."""
REPLY_FIELDS: dict[Stage, tuple[str, ...]] = {
    "sft": ("response",),
    "reward": ("chosen", "rejected"),
    "dpo": ("chosen", "rejected"),
    "ppo": (),
}
"""The replies of a row that each stage is shown."""
_AT_ONCE = 1000  # rows tokenized in one call


def filter_usable(rows: Sequence[Row], report: DataReport) -> list[Row]:
    """The rows that `report.stage` can use; the report counts the others."""
    return [row for row in rows if not record_drop(row, _unusable(row, report.stage), report)]


def encode_rows(
    rows: Sequence[Row],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: DataReport,
    end_ids: Sequence[int] | None = None,
    *,
    show: bool = False,
) -> Iterator[Example]:
    """Examples of the rows that fit, in their order, made as they are asked for; the report counts the others."""
    names = REPLY_FIELDS[report.stage]
    control, templated = compile_control_tokens(tokenizer), uses_chat_template(tokenizer, config.chat_template)

    def forged(row: Row) -> bool:
        return has_control_tokens([getattr(row, name) for name in names], control, templated=templated)

    rows = [row for row in rows if not record_drop(row, forged(row) and CONTROL_TOKENS, report)]
    made: Callable[..., Example] = EXAMPLE_TYPES[report.stage]
    shown = show and len(rows) >= PROGRESS_MIN_ROWS
    with progress(len(rows), f"{report.stage}: tokenizing {report.source}", enabled=shown) as bar:
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            prompts = encode_prompts(tokenizer, some, chat_template=config.chat_template)
            asked, prompts = drop_oldest_turns(tokenizer, some, prompts, config)
            replies = []
            for name in names:
                texts = [getattr(row, name) for row in some]
                found = encode_replies(
                    tokenizer, asked, texts, prompts, chat_template=config.chat_template, end_ids=end_ids
                )
                replies.append(found)
            for row, short, prompt_ids, *completions in zip(some, asked, prompts, *replies, strict=True):
                prompt_ids, completions, was_cut = truncate_ids(tokenizer, short, prompt_ids, completions, config)
                if not _unfit(row, prompt_ids, completions, config, report):
                    report.truncated += was_cut or short is not row
                    yield made(prompt_ids, *completions, row)
            bar.advance(len(some))


def _unusable(row: Row, stage: Stage) -> str | None:
    """Why the stage cannot use a row."""
    replies = [getattr(row, name) for name in REPLY_FIELDS[stage]]
    if not row.prompt and stage != "sft":
        return PROMPTLESS
    if None in replies and row.undecided:
        return row.undecided
    if None in replies:
        return NO_DEMONSTRATION if stage == "sft" else NO_PREFERENCE
    if "" in replies:
        return EMPTY_RESPONSE
    if share_of(stage) == "reward" and row.chosen == row.rejected:
        return NO_DIFFERENCE
    if stage == "reward" and row.margin is None:
        return UNUSABLE_MARGIN
    return None


def _unfit(
    row: Row, prompt: list[int] | None, completions: list[list[int] | None], config: DataConfig, report: DataReport
) -> bool:
    """Whether the tokens of a row cannot be used; the report then says why."""
    known = [ids for ids in completions if ids is not None]
    longest = max(map(len, known), default=0)
    if prompt is None or len(known) < len(completions):
        report.drop(REFUSED, row.source)
    elif len(prompt) > config.max_prompt_length:
        report.drop_long(LONG_PROMPT, row.source, len(prompt), config.max_prompt_length)
    elif longest > (most := max_completion_tokens(row, prompt, config)):
        report.drop_long(LONG_COMPLETION, row.source, longest, most)
    elif len(known) == 2 and known[0] == known[1]:  # they differed in white space, or after the end
        report.drop(NO_DIFFERENCE, row.source)
    else:
        return False
    return True


def record_drop(row: Row, reason: str | Literal[False] | None, report: DataReport) -> bool:
    """Whether there is a reason to leave a row out; the report counts it."""
    if reason:
        report.drop(reason, row.source)
    return bool(reason)


Ids = list[int] | None
_PROBES = ("a", "?")  # two questions that share no token


def max_completion_tokens(row: Row, prompt: list[int], config: DataConfig) -> int:
    """Tokens of a completion, at most; a text without a prompt has the room of both."""
    return config.max_completion_length if row.prompt else config.max_length - len(prompt)


def drop_oldest_turns(
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


def truncate_ids(
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
    most = max_completion_tokens(row, prompt, config)
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
    form = format_transcript if row.text == format_transcript(row.prompt) else format_plain_prompt
    return replace(row, prompt=prompt, text=form(prompt))


def _shared(one: list[int], other: list[int]) -> list[int]:
    """What both begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in pairs]
