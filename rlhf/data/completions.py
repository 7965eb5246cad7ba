"""The completions of a rollout, as tokens and as text. Whole tensors are read on the host, which adds no shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.engine.engine import Batch


def completion_ids(sequences: Batch) -> list[list[int]]:
    """The actions in each row of `PPO.generate`'s sequences; none where a row only fills up the batch."""
    rows = zip(sequences["input_ids"].tolist(), sequences["action_mask"].tolist(), strict=True)
    return [ids[-len(mask) :][: int(sum(mask))] for ids, mask in rows]


def completion_texts(tokenizer: Any, completions: Sequence[Sequence[int]]) -> list[str]:
    """Each completion as text, without control tokens."""
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]
