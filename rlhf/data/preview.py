"""A look at what a stage's rows became: how long they are in tokens, and one of them as the model sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlhf.data.examples import Demonstration, Pair, parts, percentiles, typical
from rlhf.data.tokenization import StageData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def lengths(data: StageData) -> dict[str, tuple[int, int, int]]:
    """Tokens of each part of the rows, trained on and held out: (median, 95th percentile, longest).

    Parts are `prompt`, and `completion` in SFT, `chosen` and `rejected` for the reward model. Each number is the
    length of a row that is there (of an even number of rows, the median is the lower of the middle two).
    """
    found = percentiles([*data.train, *data.heldout], 0.5, 0.95, 1.0)
    return {name: (median, high, longest) for name, (median, high, longest) in found.items()}


def example(data: StageData, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """A row of median length that is trained on: its parts, decoded from the tokens, control tokens among them."""
    return [
        (name, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for name, ids in parts(typical(data.train))
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
