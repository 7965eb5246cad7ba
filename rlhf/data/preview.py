"""A look at what a stage's rows became: how long they are in tokens, and one of them as the model sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rlhf.data.tokenization import Demonstration, Example, Pair, StageData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def lengths(data: StageData) -> dict[str, tuple[int, int, int]]:
    """Tokens of each part of the rows, trained on and held out: (median, 95th percentile, longest).

    Parts are `prompt`, and `completion` in SFT, `chosen` and `rejected` for the reward model. Each number is the
    length of a row that is there (of an even number of rows, the median is the lower of the middle two).
    """
    found: dict[str, list[int]] = {}
    for example in [*data.train, *data.heldout]:
        for name, ids in _parts(example):
            found.setdefault(name, []).append(len(ids))
    return {name: (_rank(counts, 0.5), _rank(counts, 0.95), max(counts)) for name, counts in found.items()}


def example(data: StageData, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """A row of median length that is trained on: its parts, decoded from the tokens, control tokens among them."""
    ranked = sorted(data.train, key=lambda example: sum(len(ids) for _, ids in _parts(example)))
    typical = ranked[(len(ranked) - 1) // 2]
    return [
        (name, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for name, ids in _parts(typical)
    ]


def learned(data: StageData, *, loss_on: Literal["completion", "all"] = "completion") -> tuple[str, ...]:
    """The parts whose tokens carry the loss of SFT, or whose scores that of the reward model; none in PPO.

    Args:
        loss_on: sft.loss_on.
    """
    first = data.train[0]
    if isinstance(first, Demonstration):
        return ("prompt", "completion") if loss_on == "all" else ("completion",)
    return ("chosen", "rejected") if isinstance(first, Pair) else ()


def _parts(example: Example) -> list[tuple[str, list[int]]]:
    parts = [("prompt", example.prompt_ids)]
    if isinstance(example, Demonstration):
        parts += [("completion", example.completion_ids)]
    elif isinstance(example, Pair):
        parts += [("chosen", example.chosen_ids), ("rejected", example.rejected_ids)]
    return parts


def _rank(counts: Sequence[int], part: float) -> int:
    """The smallest count that at least this part of them does not exceed."""
    return sorted(counts)[math.ceil(part * len(counts)) - 1]
