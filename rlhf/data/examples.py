"""What the stages train on: examples of token ids, one kind for each stage, and how long their parts are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhf.data.rows import Row


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


def parts(example: Example) -> list[tuple[str, list[int]]]:
    """The parts of an example: `prompt`, and `completion` in SFT, `chosen` and `rejected` of pairs."""
    found = [("prompt", example.prompt_ids)]
    if isinstance(example, Demonstration):
        found += [("completion", example.completion_ids)]
    elif isinstance(example, Pair):
        found += [("chosen", example.chosen_ids), ("rejected", example.rejected_ids)]
    return found


def percentiles(examples: Iterable[Example], *shares: float) -> dict[str, tuple[int, ...]]:
    """Tokens of each part: the smallest length that at least each share of the examples does not exceed."""
    found: dict[str, list[int]] = {}
    for example in examples:
        for name, ids in parts(example):
            found.setdefault(name, []).append(len(ids))
    ranked = {name: sorted(counts) for name, counts in found.items()}
    return {name: tuple(counts[rank(len(counts), share)] for share in shares) for name, counts in ranked.items()}


def typical(examples: Sequence[Example]) -> Example:
    """An example of median length."""
    ranked = sorted(examples, key=lambda example: sum(len(ids) for _, ids in parts(example)))
    return ranked[rank(len(ranked), 0.5)]


def rank(count: int, share: float) -> int:
    """The place, in sorted order, of the first of `count` that at least `share` of them do not exceed."""
    return max(math.ceil(share * count) - 1, 0)
