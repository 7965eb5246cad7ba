"""The examples that stages train on, as token ids, and how usable rows become examples; a report counts the other rows.

Truncation (data.too_long: truncate) removes the oldest part of a prompt and the end of a completion. A conversation
loses whole turns, the oldest first; its system message stays. If the last question alone is too long, its first tokens
are removed; the text that the chat template (or `Human:`) writes around it stays. A truncated completion has no
end-of-sequence token, so the model is not taught to stop there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from rlhf.config.schema import DataConfig, Stage, share_of
from rlhf.data.load_sources import PROGRESS_MIN_ROWS
from rlhf.data.prompt_encoding import (
    compile_control_tokens,
    encode_prompts,
    encode_replies,
    find_row_format,
    format_prompt,
    has_control_tokens,
    uses_chat_template,
)
from rlhf.data.records import Message, Row
from rlhf.data.report import (
    CONTROL_TOKENS,
    EMPTY_RESPONSE,
    LONG_COMPLETION,
    LONG_PROMPT,
    NO_DEMONSTRATION,
    NO_DIFFERENCE,
    NO_PREFERENCE,
    REFUSED,
    UNUSABLE_MARGIN,
    DataReport,
)
from rlhf.data.spool import Selection
from rlhf.reporting.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1000  # rows tokenized in one call
_PROBES = ("a", "?")  # two questions that share no token
Ids = list[int] | None
"""Token ids, or None if the chat template refuses the messages."""
TokenCounts = dict[str, "array[int]"]
"""Name of a part -> number of its tokens in each example."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the reply to imitate (stage sft)."""

    prompt_ids: list[int]
    completion_ids: list[int]
    row: Row


@dataclass(frozen=True)
class Pair:
    """A prompt with a preferred and a dispreferred reply (stages reward and dpo)."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    row: Row


@dataclass(frozen=True)
class NumberedPair(Pair):
    """A pair with a number that identifies it after shuffling."""

    number: int


@dataclass(frozen=True)
class Prompt:
    """A prompt to complete (stages ppo and distill)."""

    prompt_ids: list[int]
    row: Row


Example = Demonstration | Pair | Prompt
EXAMPLE_TYPES: dict[Stage, type[Example]] = {
    "sft": Demonstration,
    "reward": Pair,
    "dpo": Pair,
    "ppo": Prompt,
    "distill": Prompt,
}
"""The class of each stage's examples."""
REPLY_FIELDS: dict[Stage, tuple[str, ...]] = {
    "sft": ("response",),
    "reward": ("chosen", "rejected"),
    "dpo": ("chosen", "rejected"),
    "ppo": (),
    "distill": (),
}
"""The replies of a row that each stage trains on."""


class NumberedPairs(Sequence[Example]):
    """Pairs with their numbers: their indices in this sequence, counted from `first`."""

    def __init__(self, pairs: Sequence[Example], first: int = 0) -> None:
        self._pairs, self._first = pairs, first

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self))[index]
        return NumberedPair(**vars(self._pairs[position]), number=self._first + position)


def list_parts(example_type: type[Example]) -> list[str]:
    """Return the parts of an example: `prompt`, and `completion` in SFT, `chosen` and `rejected` of pairs.

    The token ids of a part are in the field of its name with `_ids` added.
    """
    return [field.name.removesuffix("_ids") for field in fields(example_type) if field.name.endswith("_ids")]


def token_parts(example: Example) -> list[tuple[str, list[int]]]:
    """Return the name and the token ids of each of the parts, see `list_parts`."""
    return [(name, getattr(example, f"{name}_ids")) for name in list_parts(type(example))]


def count_tokens(examples: Iterable[Example]) -> TokenCounts:
    """Return the lengths of the parts of each example; for stored examples, without reading their tokens."""
    if hasattr(examples, "token_counts"):
        return examples.token_counts()  # type: ignore[no-any-return]
    counts: TokenCounts = {}
    for example in examples:
        add_token_counts(counts, example)
    return counts


def add_token_counts(counts: TokenCounts, example: Example) -> None:
    """Append the lengths of one more example."""
    for name, ids in token_parts(example):
        counts.setdefault(name, array("i")).append(len(ids))


def length_quantiles(counts: TokenCounts, *shares: float) -> dict[str, tuple[int, ...]]:
    """Return for each part the smallest lengths that at least these shares of the examples do not exceed."""
    ranked = {name: sorted(lengths) for name, lengths in counts.items()}
    return {
        name: tuple(lengths[_quantile_index(len(lengths), share)] for share in shares)
        for name, lengths in ranked.items()
    }


def median_index(counts: TokenCounts) -> int:
    """Return the index of an example of median length."""
    totals = [sum(lengths) for lengths in zip(*counts.values(), strict=True)]
    ranked = sorted(range(len(totals)), key=totals.__getitem__)
    return ranked[_quantile_index(len(ranked), 0.5)]


def _quantile_index(count: int, share: float) -> int:
    """Return the index, in sorted order, of the first of `count` values that at least `share` of them do not exceed."""
    return max(math.ceil(share * count) - 1, 0)


def filter_usable(rows: Sequence[Row], report: DataReport) -> Sequence[Row]:
    """Return the rows that `report.stage` can use; the report counts the others."""
    return drop_rows(rows, lambda row: _unusable_reason(row, report.stage), report)


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

    rows = drop_rows(rows, lambda row: is_forged(row) and CONTROL_TOKENS, report)
    make_example: Callable[..., Example] = EXAMPLE_TYPES[report.stage]
    shows_bar = show and len(rows) >= PROGRESS_MIN_ROWS
    with progress(len(rows), f"{report.stage}: tokenizing {report.source}", enabled=shows_bar) as bar:
        for start in range(0, len(rows), _BATCH):
            batch = list(rows[start : start + _BATCH])
            prompts = encode_prompts(tokenizer, batch, chat_template=config.chat_template)
            pairs = [_drop_oldest_turns(tokenizer, row, ids, config) for row, ids in zip(batch, prompts, strict=True)]
            shortened, prompts = [row for row, _ in pairs], [ids for _, ids in pairs]
            encode = partial(encode_replies, tokenizer, shortened, chat_template=config.chat_template, end_ids=end_ids)
            replies = [encode([getattr(row, name) for row in batch], prompts) for name in names]
            for row, short, prompt_ids, *completions in zip(batch, shortened, prompts, *replies, strict=True):
                prompt_ids, completions, was_cut = truncate_ids(tokenizer, short, prompt_ids, completions, config)
                if not _drop_unfit(row, prompt_ids, completions, config, report):
                    report.truncated += was_cut or short is not row
                    yield make_example(prompt_ids, *completions, row)
            bar.advance(len(batch))


def _unusable_reason(row: Row, stage: Stage) -> str | None:
    """Return the reason why the stage cannot use a row, or None."""
    replies = [getattr(row, name) for name in REPLY_FIELDS[stage]]
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


def drop_rows(
    rows: Sequence[Row], find_reason: Callable[[Row], str | Literal[False] | None], report: DataReport
) -> Sequence[Row]:
    """Return the rows that there is no reason to leave out; the report counts the others."""
    kept = array("q")
    for index, row in enumerate(rows):
        if reason := find_reason(row):
            report.drop(reason, row.source)
        else:
            kept.append(index)
    return Selection(rows, kept)


def max_completion_tokens(row: Row, prompt: list[int], config: DataConfig) -> int:
    """Return the maximum length of a completion in tokens; a text without a prompt may use data.max_length."""
    return config.max_completion_length if row.prompt else config.max_length - len(prompt)


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


def _drop_oldest_turns(tokenizer: PreTrainedTokenizerBase, row: Row, ids: Ids, config: DataConfig) -> tuple[Row, Ids]:
    """Return the row and its prompt ids without the oldest turns of a prompt that is too long.

    It keeps its last question, however long it is. With data.too_long: drop, nothing changes.
    """
    while config.too_long == "truncate" and ids is not None and len(ids) > config.max_prompt_length:
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
    return replace(row, prompt=prompt, text=format_prompt(prompt, find_row_format(row)))


def _common_prefix(first: list[int], second: list[int]) -> list[int]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return [token for token, _ in pairs]
