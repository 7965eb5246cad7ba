"""Micro-batches of drawn sequences: rows of like length together, and columns that hold nothing but padding left out.

Lengths are read from the device once a rollout; where all shapes are to be the same, they are not read, and rows and
columns stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accelerators import ShapePolicy


class Part(NamedTuple):
    """A micro-batch of sequences of P + A columns: some rows, and the columns around the start of completions."""

    rows: Tensor | None  # [n], on the host; None: all, in their order
    prompt: int  # columns of prompts that are kept, the last ones
    completion: int  # columns of completions that are kept, the first ones

    def of(self, tensor: Tensor, completion_length: int) -> Tensor:
        """What the micro-batch has of [B, P + A], of [B, A] (A is `completion_length`) or of [B]."""
        if self.rows is not None:
            tensor = tensor.index_select(0, self.rows.to(tensor.device))
        if tensor.dim() == 1:
            return tensor
        start = tensor.shape[1] - completion_length
        return tensor[:, max(start - self.prompt, 0) : start + self.completion]

    def positions(self, rows: int) -> int:
        """Tokens that a pass over it computes, padding included; `rows`: of the batch that it is a part of."""
        return (rows if self.rows is None else len(self.rows)) * (self.prompt + self.completion)


def lengths(prompt_mask: Tensor, completion_mask: Tensor, policy: ShapePolicy) -> Tensor | None:
    """[B, 2] on the host: tokens of each prompt and completion; None where padding may not be left out."""
    if policy.kind == "static":
        return None
    return torch.tensor(torch.stack([prompt_mask.sum(1), completion_mask.sum(1)], 1).tolist())


def parts(
    found: Tensor | None, *, rows: int, prompt: int, completion: int, size: int, policy: ShapePolicy
) -> list[Part]:
    """Micro-batches of `size` rows, the longest rows first; always the same for the same lengths.

    Args:
        found: what `lengths` gave of the `rows` rows, of `prompt` + `completion` columns.
    """
    order = torch.arange(rows)
    if found is not None:
        order = found.sum(1).argsort(descending=True, stable=True)
    made = []
    for chosen in order.split(size):
        before, after = prompt, completion
        if found is not None:
            longest = found[chosen].amax(0).tolist()
            before, after = (policy.length(max(n, 1), most) for n, most in zip(longest, (prompt, completion)))
        made.append(Part(None if size >= rows else chosen, before, after))
    return made


def together(parts: Sequence[Part], tensors: Sequence[Tensor], completion_length: int) -> Tensor:
    """What micro-batches gave, [n, a] or [n] each, as the rows of the batch: [B, A] or [B], 0 in columns left out."""
    whole = [
        torch.nn.functional.pad(tensor, (0, completion_length - part.completion)) if tensor.dim() > 1 else tensor
        for part, tensor in zip(parts, tensors, strict=True)
    ]
    joined = torch.cat(whole)
    if parts[0].rows is None:
        return joined
    order = torch.cat([part.rows for part in parts if part.rows is not None])
    return joined.index_select(0, order.argsort().to(joined.device))
