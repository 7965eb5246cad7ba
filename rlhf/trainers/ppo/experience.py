"""What one rollout leaves for training: the sequences, what the models made of them, and what to learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from accelerators import ShapePolicy
from rlhf.generation.micro_batches import parts


@dataclass(frozen=True)
class Experience:
    """B sequences of T = P + A tokens; a prompt is padded left to P columns, completions start at column P.

    Masks are 1 on completion tokens that were drawn, the end-of-sequence token included; rows that only
    fill up the batch have none. Everything else is 0 where the mask is 0.
    """

    # the sequences
    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    action_mask: Tensor  # [B, A] float32

    # what the policy, its reference and the critic made of them when they were drawn; without a critic, values are 0
    log_probs: Tensor  # [B, A] float32
    ref_log_probs: Tensor  # [B, A] float32
    values: Tensor  # [B, A] float32
    scores: Tensor  # [B] float32, as they are reported: not clipped

    # what to learn from them
    advantages: Tensor  # [B, A] float32
    returns: Tensor  # [B, A] float32

    lengths: Tensor | None = None  # see `rlhf.generation.micro_batches.lengths`

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def completion_length(self) -> int:
        """A, the columns of completions."""
        return self.action_mask.shape[1]

    def rows(self, index: Tensor) -> Experience:
        """The rows that `index` [N], on the host, names."""
        return self._each(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def split(self, size: int, generator: torch.Generator | None = None) -> list[Experience]:
        """Parts of `size` rows, in an order drawn from `generator`, or as they are."""
        if generator is None and size == len(self):
            return [self]
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        return [self.rows(part) for part in order.split(size)]

    def micro_batches(self, size: int, policy: ShapePolicy) -> list[Experience]:
        """Split into parts of `size` rows of similar length, without padding columns."""
        length = self.completion_length
        prompt = self.input_ids.shape[1] - length
        found = parts(self.lengths, rows=len(self), prompt=prompt, completion=length, size=size, policy=policy)
        without = replace(self, lengths=None)
        return [without._each(partial(part.of, completion_length=length)) for part in found]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Experience:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return Experience(**{name: None if tensor is None else change(tensor) for name, tensor in tensors.items()})
