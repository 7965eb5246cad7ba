"""Tokenize the usable rows of a stage, in batches; a report counts the others. Rows that are too long are truncated.

Truncation (data.too_long: truncate) removes the oldest part of a prompt and the end of a completion. A conversation
loses whole turns, the oldest first; its system message stays. If the last question alone is too long, its first tokens
are removed; the text that the chat template (or `Human:`) writes around it stays. A truncated completion has no
end-of-sequence token, so the model is not taught to stop there.
"""

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
"""The class of each stage's examples."""
REPLY_FIELDS: dict[Stage, tuple[str, ...]] = {
    "sft": ("response",),
    "reward": ("chosen", "rejected"),
    "dpo": ("chosen", "rejected"),
    "ppo": (),
}
"""The replies of a row that each stage trains on."""
_BATCH = 1000  # rows tokenized in one call
_PROBES = ("a", "?")  # two questions that share no token
Ids = list[int] | None
"""Token ids, or None if the chat template refuses the messages."""


def filter_usable(rows: Sequence[Row], report: DataReport) -> list[Row]:
    """Return the rows that `report.stage` can use; the report counts the others."""
    return [row for row in rows if not record_drop(row, _unusable_reason(row, report.stage), report)]


def encode_rows(
    rows: Sequence[Row],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: DataReport,
    end_ids: Sequence[int] | None = None,
    *,
    show: bool = False,
) -> Iterator[Example]:
    """Yield the examples of the rows that fit, in order; the report counts the others."""
    names = REPLY_FIELDS[report.stage]
    control, templated = compile_control_tokens(tokenizer), uses_chat_template(tokenizer, config.chat_template)

    def is_forged(row: Row) -> bool:
        return has_control_tokens([getattr(row, name) for name in names], control, templated=templated)

    rows = [row for row in rows if not record_drop(row, is_forged(row) and CONTROL_TOKENS, report)]
    make_example: Callable[..., Example] = EXAMPLE_TYPES[report.stage]
    shows_bar = show and len(rows) >= PROGRESS_MIN_ROWS
    with progress(len(rows), f"{report.stage}: tokenizing {report.source}", enabled=shows_bar) as bar:
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            prompts = encode_prompts(tokenizer, batch, chat_template=config.chat_template)
            shortened, prompts = drop_oldest_turns(tokenizer, batch, prompts, config)
            replies = []
            for name in names:
                texts = [getattr(row, name) for row in batch]
                encoded = encode_replies(
                    tokenizer, shortened, texts, prompts, chat_template=config.chat_template, end_ids=end_ids
                )
                replies.append(encoded)
            for row, short, prompt_ids, *completions in zip(batch, shortened, prompts, *replies, strict=True):
                prompt_ids, completions, was_cut = truncate_ids(tokenizer, short, prompt_ids, completions, config)
                if not _drop_unfit(row, prompt_ids, completions, config, report):
                    report.truncated += was_cut or short is not row
                    yield make_example(prompt_ids, *completions, row)
            bar.advance(len(batch))


def _unusable_reason(row: Row, stage: Stage) -> str | None:
    """Return the reason why the stage cannot use a row, or None."""
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


def _drop_unfit(row: Row, prompt: Ids, completions: list[Ids], config: DataConfig, report: DataReport) -> bool:
    """Return True if the tokens of a row cannot be used; the report counts the reason."""
    encoded = [ids for ids in completions if ids is not None]
    longest = max(map(len, encoded), default=0)
    if prompt is None or len(encoded) < len(completions):
        report.drop(REFUSED, row.source)
    elif len(prompt) > config.max_prompt_length:
        report.drop_long(LONG_PROMPT, row.source, len(prompt), config.max_prompt_length)
    elif longest > (limit := max_completion_tokens(row, prompt, config)):
        report.drop_long(LONG_COMPLETION, row.source, longest, limit)
    elif len(encoded) == 2 and encoded[0] == encoded[1]:  # the texts differ in white space, or after the end
        report.drop(NO_DIFFERENCE, row.source)
    else:
        return False
    return True


def record_drop(row: Row, reason: str | Literal[False] | None, report: DataReport) -> bool:
    """Return True if there is a reason to leave a row out; the report counts it."""
    if reason:
        report.drop(reason, row.source)
    return bool(reason)


def max_completion_tokens(row: Row, prompt: list[int], config: DataConfig) -> int:
    """Return the maximum length of a completion in tokens; a text without a prompt may use data.max_length."""
    return config.max_completion_length if row.prompt else config.max_length - len(prompt)


def drop_oldest_turns(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], prompts: Sequence[Ids], config: DataConfig
) -> tuple[list[Row], list[Ids]]:
    """Return the rows and their prompt ids without the oldest turns of prompts that are too long.

    Each prompt keeps its last question, however long it is. With data.too_long: drop, nothing changes.
    """
    shortened = [
        _shorten_conversation(tokenizer, row, ids, config) if config.too_long == "truncate" else (row, ids)
        for row, ids in zip(rows, prompts, strict=True)
    ]
    return [row for row, _ in shortened], [ids for _, ids in shortened]


def truncate_ids(
    tokenizer: PreTrainedTokenizerBase, row: Row, prompt: Ids, completions: Sequence[Ids], config: DataConfig
) -> tuple[Ids, list[Ids], bool]:
    """Return (prompt ids without the question's beginning, completion ids without their end, True if any were cut).

    Nothing changes if all parts fit, if the template's own text is too long already, or with data.too_long: drop.
    """
    if config.too_long == "drop" or prompt is None:
        return prompt, list(completions), False
    short_prompt = prompt
    if len(prompt) > config.max_prompt_length:
        short_prompt = _shorten_question(tokenizer, row, prompt, config)
    limit = max_completion_tokens(row, prompt, config)
    short_completions = [ids and ids[:limit] for ids in completions]
    return short_prompt, short_completions, (short_prompt, short_completions) != (prompt, list(completions))


def _shorten_conversation(
    tokenizer: PreTrainedTokenizerBase, row: Row, ids: Ids, config: DataConfig
) -> tuple[Row, Ids]:
    while ids is not None and len(ids) > config.max_prompt_length:
        system = [message for message in row.prompt if message.role == "system"]
        turns = [message for message in row.prompt if message.role != "system"]
        next_question = next((index for index, turn in enumerate(turns) if index and turn.role == "user"), None)
        if next_question is None:
            break
        row = _replace_prompt(row, (*system, *turns[next_question:]))
        ids = encode_prompts(tokenizer, [row], chat_template=config.chat_template)[0]
    return row, ids


def _shorten_question(tokenizer: PreTrainedTokenizerBase, row: Row, ids: list[int], config: DataConfig) -> list[int]:
    """Remove the first tokens of a question that is too long.

    The tokens around the question are those that prompts with two other questions have in common.
    """
    index = next(index for index, message in enumerate(row.prompt) if message.role == "user")
    before, after = row.prompt[:index], row.prompt[index + 1 :]
    rows = [_replace_prompt(row, (*before, Message("user", probe), *after)) for probe in _PROBES]
    first, second = encode_prompts(tokenizer, rows, chat_template=config.chat_template)
    if first is None or second is None:
        return ids
    head = _common_prefix(ids, _common_prefix(first, second))
    tail = _common_prefix(ids[::-1], _common_prefix(first[::-1], second[::-1]))
    if len(head) + len(tail) >= config.max_prompt_length:
        return ids
    return [*head, *ids[len(ids) - config.max_prompt_length + len(head) :]]


def _replace_prompt(row: Row, prompt: tuple[Message, ...]) -> Row:
    format_text = format_transcript if row.text == format_transcript(row.prompt) else format_plain_prompt
    return replace(row, prompt=prompt, text=format_text(prompt))


def _common_prefix(first: list[int], second: list[int]) -> list[int]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return [token for token, _ in pairs]
