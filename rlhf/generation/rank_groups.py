"""Which ranks generate together: each alone, all in step, or several as one with a part of every layer each.

The prompts of a rank flow in; out come those that it generates for, and afterwards the completions that are its own.
Where a forward pass is collective, ranks must take the same number of steps: a team decides together when to end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlhf.engine import distributed


class Prompts(NamedTuple):
    """What a rollout starts from: all of its randomness too, so that samples do not depend on how it is cut.

    ids, mask: [B, P], padded left; uniform: [A, B] in [0, 1).
    """

    ids: Tensor
    mask: Tensor
    uniform: Tensor

    def parts(self, rows: int | None) -> list[Prompts]:
        """Parts of one size, `rows` at most, as few as that allows; None: all in one.

        The last one is filled up with copies of its last row, which end when that does.
        """
        count = -(-len(self.ids) // min(rows or len(self.ids), len(self.ids)))
        size = -(-len(self.ids) // count)
        index = torch.arange(count * size, device=self.ids.device).clamp_max(len(self.ids) - 1)
        return [
            Prompts(self.ids[part], self.mask[part], self.uniform.index_select(1, part)) for part in index.split(size)
        ]


class SingleRank:
    """This rank generates by itself, with whole weights."""

    records = True
    """Whether a step may be recorded: it calls no other rank, and its weights stay where they are."""

    def gathered(self, prompts: Prompts) -> Prompts:
        """The prompts that this rank generates for, given its own."""
        return prompts

    def own(self, rows: Tensor) -> Tensor:
        """Of a tensor with a row for each gathered prompt, the rows of this rank's own."""
        return rows

    def same(self, drawn: Tensor) -> Tensor:
        """The tokens drawn, [B], alike on all ranks that draw them."""
        return drawn

    def alive(self, finished: Tensor) -> list[int]:
        """The rows [B] to go on with; none where those of all ranks that must stay in step are finished."""
        return [row for row, ended in enumerate(finished.tolist()) if not ended]


class LockstepRanks(SingleRank):
    """All ranks of the run generate their own rows, and every forward pass is a collective."""

    records = False

    def alive(self, finished: Tensor) -> list[int]:
        going_on = int(distributed.all_sum((~finished).any().int()))
        return list(range(len(finished))) if going_on else []


class TensorParallelGroup(SingleRank):
    """Ranks that hold a part of every layer each, and generate for the prompts of all of them.

    A step is not recorded: what a recording makes of collectives differs between devices.
    """

    records = False

    def __init__(self, ranks: list[int], group: dist.ProcessGroup | None) -> None:
        """`ranks`: those of the team, in order; `group`: theirs, None where they are all."""
        self.ranks = ranks
        self.group = group
        self.size = len(ranks)
        self.position = ranks.index(distributed.world().rank)

    @classmethod
    def of(cls, size: int) -> TensorParallelGroup:
        """This rank's team, where the ranks of the run are cut into teams of `size`; all ranks must ask together."""
        world = distributed.world()
        teams = [list(range(first, first + size)) for first in range(0, world.size, size)]
        groups = [None] if len(teams) == 1 else [dist.new_group(ranks) for ranks in teams]
        return next(cls(*each) for each in zip(teams, groups) if world.rank in each[0])

    def gathered(self, prompts: Prompts) -> Prompts:
        width = torch.tensor(prompts.ids.shape[1], device=prompts.ids.device)
        dist.all_reduce(width, dist.ReduceOp.MAX, group=self.group)
        missing = (int(width) - prompts.ids.shape[1], 0)  # on the left; hidden, so it does not matter what is there
        return Prompts(
            self.all_gather(pad(prompts.ids, missing), 0),
            self.all_gather(pad(prompts.mask, missing), 0),
            self.all_gather(prompts.uniform, 1),
        )

    def own(self, rows: Tensor) -> Tensor:
        return rows.chunk(self.size)[self.position]

    def alive(self, finished: Tensor) -> list[int]:
        return [] if bool(finished.all()) else list(range(len(finished)))

    def same(self, drawn: Tensor) -> Tensor:
        # Devices may round the sums behind a draw differently from call to call, and ranks must not part ways.
        dist.broadcast(drawn, self.ranks[0], group=self.group)
        return drawn

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor:
        """The tensors of all ranks of the team, alike in shape, one after the other along `dimension`."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dimension)

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The tensor summed over the team, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor
