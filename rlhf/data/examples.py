"""The examples that stages train on, as token ids: one class per kind of stage, and the lengths of their parts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload, runtime_checkable

from rlhf.data.records import Row


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
    """A prompt to complete (stage ppo)."""

    prompt_ids: list[int]
    row: Row


Example = Demonstration | Pair | Prompt


class NumberedPairs(Sequence[Example]):
    """Pairs with their numbers: their indices in this sequence, counted from `first`."""

    def __init__(self, pairs: Sequence[Example], first: int = 0) -> None:
        self._pairs, self._first = pairs, first

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> NumberedPair: ...

    @overload
    def __getitem__(self, index: slice) -> list[NumberedPair]: ...

    def __getitem__(self, index: int | slice) -> NumberedPair | list[NumberedPair]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self))[index]
        return NumberedPair(**vars(self._pairs[position]), number=self._first + position)


def token_parts(example: Example) -> list[tuple[str, list[int]]]:
    """Return the parts of an example: `prompt`, and `completion` in SFT, `chosen` and `rejected` of pairs."""
    parts = [("prompt", example.prompt_ids)]
    if isinstance(example, Demonstration):
        parts += [("completion", example.completion_ids)]
    elif isinstance(example, Pair):
        parts += [("chosen", example.chosen_ids), ("rejected", example.rejected_ids)]
    return parts


TokenCounts = dict[str, "array[int]"]
"""Name of a part -> number of its tokens in each example."""


def count_tokens(examples: Iterable[Example]) -> TokenCounts:
    """Return the lengths of the parts of each example; for stored examples, without reading their tokens."""
    if isinstance(examples, HasTokenCounts):
        return examples.token_counts()
    counts: TokenCounts = {}
    for example in examples:
        add_token_counts(counts, example)
    return counts


def add_token_counts(counts: TokenCounts, example: Example) -> None:
    """Append the lengths of one more example."""
    for name, ids in token_parts(example):
        counts.setdefault(name, array("i")).append(len(ids))


@runtime_checkable
class HasTokenCounts(Protocol):
    """Examples that know their lengths."""

    def token_counts(self) -> TokenCounts:
        """Return the number of tokens of each part, in the order of the examples."""


def length_quantiles(counts: TokenCounts, *shares: float) -> dict[str, tuple[int, ...]]:
    """Return for each part the smallest lengths that at least these shares of the examples do not exceed."""
    ranked = {name: sorted(lengths) for name, lengths in counts.items()}
    return {
        name: tuple(lengths[quantile_index(len(lengths), share)] for share in shares)
        for name, lengths in ranked.items()
    }


def median_index(counts: TokenCounts) -> int:
    """Return the index of an example of median length."""
    totals = [sum(lengths) for lengths in zip(*counts.values(), strict=True)]
    ranked = sorted(range(len(totals)), key=totals.__getitem__)
    return ranked[quantile_index(len(ranked), 0.5)]


def quantile_index(count: int, share: float) -> int:
    """Return the index, in sorted order, of the first of `count` values that at least `share` of them do not exceed."""
    return max(math.ceil(share * count) - 1, 0)
