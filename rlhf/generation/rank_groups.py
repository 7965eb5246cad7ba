"""The ranks that generate together: each rank alone, all in lockstep, or a group with a part of every layer per rank.

A rank group maps a rank's prompts to those that it generates for, and the completions back to the rank's prompts. If
a forward pass is collective, the ranks must take the same number of steps, so the group decides when generation ends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlhf.engine import distributed


class PromptBatch(NamedTuple):
    """The input of a rollout, with all of its randomness, so that samples do not depend on how the rows are split.

    ids, mask: [B, P], padded left; uniform: [A, B] in [0, 1); copies: so many rows after each other have one prompt.
    """

    ids: Tensor
    mask: Tensor
    uniform: Tensor
    copies: int = 1

    def split(self, rows: int | None) -> list[PromptBatch]:
        """Split into as few batches of equal size as possible, of at most `rows` rows; None: one batch.

        The last batch is filled up with copies of its last row, which end when that row does.
        """
        count = -(-len(self.ids) // min(rows or len(self.ids), len(self.ids)))
        size = -(-len(self.ids) // count)
        indices = torch.arange(count * size, device=self.ids.device).clamp_max(len(self.ids) - 1)
        copies = self.copies if size % self.copies == 0 else 1
        return [
            PromptBatch(self.ids[part], self.mask[part], self.uniform.index_select(1, part), copies)
            for part in indices.split(size)
        ]


class SingleRank:
    """This rank generates alone, with whole weights."""

    can_capture = True
    """True if a step may be captured: it calls no other rank, and its weights stay at their addresses."""

    def gather_prompts(self, prompts: PromptBatch) -> PromptBatch:
        """Return the prompts that this rank generates for, given its prompts."""
        return prompts

    def select_own(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's prompts, from a tensor with a row for each gathered prompt."""
        return rows

    def synchronize(self, drawn: Tensor) -> Tensor:
        """Return the drawn tokens, [B], identical on all ranks that draw them."""
        return drawn

    def active_rows(self, finished: Tensor) -> list[int]:
        """Return the rows of `finished`, [B], to continue with; none if all ranks that step together are finished."""
        return [row for row, ended in enumerate(finished.tolist()) if not ended]


class LockstepRanks(SingleRank):
    """All ranks of the run generate their own rows, and every forward pass is a collective."""

    can_capture = False

    def active_rows(self, finished: Tensor) -> list[int]:
        """Return all rows until the rows of every rank are finished."""
        unfinished_ranks = int(distributed.all_sum((~finished).any().int()))
        return list(range(len(finished))) if unfinished_ranks else []


class TensorParallelGroup(SingleRank):
    """A group in which each rank has a part of every layer, and all generate for the prompts of all.

    A step is not captured: devices differ in how they replay collectives.
    """

    can_capture = False

    def __init__(self, ranks: list[int], group: dist.ProcessGroup | None) -> None:
        """Create the group of `ranks`, in order; `group` is their process group, None if they are all ranks."""
        self.ranks = ranks
        self.group = group
        self.size = len(ranks)
        self.position = ranks.index(distributed.world().rank)

    @classmethod
    def create(cls, size: int) -> TensorParallelGroup:
        """Split the ranks of the run into groups of `size` and return this rank's group; a collective of all ranks."""
        world = distributed.world()
        all_ranks = [list(range(first, first + size)) for first in range(0, world.size, size)]
        groups = [None] if len(all_ranks) == 1 else [dist.new_group(ranks) for ranks in all_ranks]
        return next(cls(ranks, group) for ranks, group in zip(all_ranks, groups) if world.rank in ranks)

    def gather_prompts(self, prompts: PromptBatch) -> PromptBatch:
        """Return the prompts of all ranks of the group, padded to the longest."""
        width = torch.tensor(prompts.ids.shape[1], device=prompts.ids.device)
        dist.all_reduce(width, dist.ReduceOp.MAX, group=self.group)
        missing = (int(width) - prompts.ids.shape[1], 0)  # on the left; masked, so the values do not matter
        return PromptBatch(
            self.all_gather(pad(prompts.ids, missing), 0),
            self.all_gather(pad(prompts.mask, missing), 0),
            self.all_gather(prompts.uniform, 1),
            prompts.copies,
        )

    def select_own(self, rows: Tensor) -> Tensor:
        """Return this rank's slice of the gathered rows."""
        return rows.chunk(self.size)[self.position]

    def active_rows(self, finished: Tensor) -> list[int]:
        """Return all rows until every row of the group is finished."""
        return [] if bool(finished.all()) else list(range(len(finished)))

    def synchronize(self, drawn: Tensor) -> Tensor:
        """Return the tokens that the first rank of the group drew.

        Devices may round the logits' sums differently from call to call, and the ranks must not diverge.
        """
        dist.broadcast(drawn, self.ranks[0], group=self.group)
        return drawn

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor:
        """Return the tensors of all ranks of the group, equal in shape, concatenated along `dimension`."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dimension)

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over the group, in place, and return it."""
        dist.all_reduce(tensor, group=self.group)
        return tensor
