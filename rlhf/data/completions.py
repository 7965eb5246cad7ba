"""The completions of a rollout, as tokens and as text. Whole tensors are read on the host, which adds no shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def completion_ids(input_ids: Tensor, action_mask: Tensor) -> list[list[int]]:
    """Return the completion of each row as token ids; none if a row only fills up the batch.

    Args:
        input_ids: [B, P + A], completions from column P.
        action_mask: [B, A], 1 on the tokens drawn.
    """
    rows = zip(input_ids.tolist(), action_mask.tolist(), strict=True)
    return [ids[-len(mask) :][: int(sum(mask))] for ids, mask in rows]


def completion_texts(tokenizer: Any, completions: Sequence[Sequence[int]]) -> list[str]:
    """Return each completion as text, without control tokens."""
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]
