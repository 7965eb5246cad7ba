"""Rows become examples: those that a stage can use are tokenized, a thousand at a time; a report counts the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from rlhf.config.schema import DataConfig, Stage, share_of
from rlhf.data.drop_reasons import (
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
)
from rlhf.data.examples import Demonstration, Example, Pair, Prompt
from rlhf.data.load_sources import LONG
from rlhf.data.prompt_encoding import control_tokens, encode_prompts, encode_replies, has_control_tokens, has_template
from rlhf.data.records import Row
from rlhf.data.report import DataReport
from rlhf.data.truncation import cut, longest_completion, without_oldest
from rlhf.reporting.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXAMPLE: dict[Stage, type[Example]] = {"sft": Demonstration, "reward": Pair, "dpo": Pair, "ppo": Prompt}
"""What each stage learns from."""
REPLIES: dict[Stage, tuple[str, ...]] = {
    "sft": ("response",),
    "reward": ("chosen", "rejected"),
    "dpo": ("chosen", "rejected"),
    "ppo": (),
}
"""The replies of a row that each stage is shown."""
_AT_ONCE = 1000  # rows tokenized in one call


def usable(rows: Sequence[Row], report: DataReport) -> list[Row]:
    """The rows that `report.stage` can use; the report counts the others."""
    return [row for row in rows if not dropped(row, _unusable(row, report.stage), report)]


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
    names = REPLIES[report.stage]
    control, templated = control_tokens(tokenizer), has_template(tokenizer, config.chat_template)

    def forged(row: Row) -> bool:
        return has_control_tokens([getattr(row, name) for name in names], control, templated=templated)

    rows = [row for row in rows if not dropped(row, forged(row) and CONTROL_TOKENS, report)]
    made: Callable[..., Example] = EXAMPLE[report.stage]
    shown = show and len(rows) >= LONG
    with progress(len(rows), f"{report.stage}: tokenizing {report.source}", enabled=shown) as bar:
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            prompts = encode_prompts(tokenizer, some, chat_template=config.chat_template)
            asked, prompts = without_oldest(tokenizer, some, prompts, config)
            replies = []
            for name in names:
                texts = [getattr(row, name) for row in some]
                found = encode_replies(
                    tokenizer, asked, texts, prompts, chat_template=config.chat_template, end_ids=end_ids
                )
                replies.append(found)
            for row, short, prompt_ids, *completions in zip(some, asked, prompts, *replies, strict=True):
                prompt_ids, completions, was_cut = cut(tokenizer, short, prompt_ids, completions, config)
                if not _unfit(row, prompt_ids, completions, config, report):
                    report.truncated += was_cut or short is not row
                    yield made(prompt_ids, *completions, row)
            bar.advance(len(some))


def _unusable(row: Row, stage: Stage) -> str | None:
    """Why the stage cannot use a row."""
    replies = [getattr(row, name) for name in REPLIES[stage]]
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
    elif longest > (most := longest_completion(row, prompt, config)):
        report.drop_long(LONG_COMPLETION, row.source, longest, most)
    elif len(known) == 2 and known[0] == known[1]:  # they differed in white space, or after the end
        report.drop(NO_DIFFERENCE, row.source)
    else:
        return False
    return True


def dropped(row: Row, reason: str | Literal[False] | None, report: DataReport) -> bool:
    """Whether there is a reason to leave a row out; the report counts it."""
    if reason:
        report.drop(reason, row.source)
    return bool(reason)
