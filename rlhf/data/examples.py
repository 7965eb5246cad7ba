"""What the stages train on: examples of token ids, one kind for each stage, and how long their parts are."""

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
    """A pair that is known by a number while it is shuffled."""

    number: int


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer (stage ppo)."""

    prompt_ids: list[int]
    row: Row


Example = Demonstration | Pair | Prompt


class NumberedPairs(Sequence[Example]):
    """Pairs, each with its number: its place among them, counted from `first`."""

    def __init__(self, pairs: Sequence[Example], first: int = 0) -> None:
        self._pairs, self._first = pairs, first

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, at: int) -> NumberedPair: ...

    @overload
    def __getitem__(self, at: slice) -> list[NumberedPair]: ...

    def __getitem__(self, at: int | slice) -> NumberedPair | list[NumberedPair]:
        if isinstance(at, slice):
            return [self[place] for place in range(len(self))[at]]
        place = range(len(self))[at]
        return NumberedPair(**vars(self._pairs[place]), number=self._first + place)


def token_parts(example: Example) -> list[tuple[str, list[int]]]:
    """The parts of an example: `prompt`, and `completion` in SFT, `chosen` and `rejected` of pairs."""
    found = [("prompt", example.prompt_ids)]
    if isinstance(example, Demonstration):
        found += [("completion", example.completion_ids)]
    elif isinstance(example, Pair):
        found += [("chosen", example.chosen_ids), ("rejected", example.rejected_ids)]
    return found


TokenCounts = dict[str, "array[int]"]
"""Of each part, the tokens that each example has of it."""


def count_tokens(examples: Iterable[Example]) -> TokenCounts:
    """How long the parts of each example are; where examples are stored, without a look at their tokens."""
    if isinstance(examples, HasTokenCounts):
        return examples.token_counts()
    found: TokenCounts = {}
    for example in examples:
        add_token_counts(found, example)
    return found


def add_token_counts(counts: TokenCounts, example: Example) -> None:
    """Count one example more."""
    for name, ids in token_parts(example):
        counts.setdefault(name, array("i")).append(len(ids))


@runtime_checkable
class HasTokenCounts(Protocol):
    """Examples that know how long they are."""

    def token_counts(self) -> TokenCounts:
        """Of each part, the tokens that each example has of it, in their order."""


def length_quantiles(counts: TokenCounts, *shares: float) -> dict[str, tuple[int, ...]]:
    """Tokens of each part: the smallest length that at least each share of the examples does not exceed."""
    ranked = {name: sorted(lengths) for name, lengths in counts.items()}
    return {
        name: tuple(lengths[quantile_index(len(lengths), share)] for share in shares)
        for name, lengths in ranked.items()
    }


def median_index(counts: TokenCounts) -> int:
    """The place of an example of median length."""
    totals = [sum(lengths) for lengths in zip(*counts.values(), strict=True)]
    ranked = sorted(range(len(totals)), key=totals.__getitem__)
    return ranked[quantile_index(len(ranked), 0.5)]


def quantile_index(count: int, share: float) -> int:
    """The place, in sorted order, of the first of `count` that at least `share` of them do not exceed."""
    return max(math.ceil(share * count) - 1, 0)
