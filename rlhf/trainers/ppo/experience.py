"""The data of one PPO step: the sampled completions, their scores, and the inputs of the updates.

B rows of T = P + A tokens: a prompt is padded left to P columns, its completion starts at column P and is padded right
to A columns. `action_mask` is 1 on the completion's tokens, the end-of-sequence token included; rows that only fill up
the batch have none.

Rows are cut into micro-batches once, when they are drawn: rows of similar length together, without the columns that
hold only padding. Lengths are read from the device once per rollout. Under a static shape policy they are not read, and
no rows or columns are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from accelerators import ShapePolicy
from rlhf.data.batches import Batch
from rlhf.losses.log_probs import ends_with
from rlhf.models.forward import LogProbs


class MicroBatch(NamedTuple):
    """Rows of a batch that pass through a model together, and their columns around the start of completions."""

    rows: Tensor | None  # [n] indices, on the host; None: all rows, in their order
    prompt: int  # prompt columns that are kept, the last ones
    completion: int  # completion columns that are kept, the first ones

    def select(self, tensor: Tensor, completion_length: int) -> Tensor:
        """Return the micro-batch's part of a tensor [B, P + A], [B, A] or [B]; A is `completion_length`."""
        if self.rows is not None:
            tensor = tensor.index_select(0, self.rows.to(tensor.device))
        if tensor.dim() == 1:
            return tensor
        start = tensor.shape[1] - completion_length
        return tensor[:, max(start - self.prompt, 0) : start + self.completion]

    def positions(self, batch_rows: int) -> int:
        """Return the tokens of the rows, padding included, if the batch has `batch_rows` rows."""
        return (batch_rows if self.rows is None else len(self.rows)) * (self.prompt + self.completion)


def join_rows(micro_batches: Sequence[MicroBatch], outputs: Sequence[Tensor], completion_length: int) -> Tensor:
    """Put the outputs of micro-batches, [n, a] or [n] each, back into the batch's order: [B, A] or [B].

    Columns that a micro-batch left out are 0.
    """
    padded = [
        pad(output, (0, completion_length - micro_batch.completion)) if output.dim() > 1 else output
        for micro_batch, output in zip(micro_batches, outputs, strict=True)
    ]
    joined = torch.cat(padded)
    if micro_batches[0].rows is None:
        return joined
    order = torch.cat([micro_batch.rows for micro_batch in micro_batches if micro_batch.rows is not None])
    return joined.index_select(0, order.argsort().to(joined.device))


@dataclass(frozen=True)
class MicroBatcher:
    """Cuts batches into micro-batches of `size` rows, in shapes that `shapes` allows."""

    size: int
    shapes: ShapePolicy

    def lengths(self, prompt_mask: Tensor, completion_mask: Tensor) -> Tensor | None:
        """Return the tokens of each prompt and completion, [B, 2] on the host; None if padding must stay."""
        if self.shapes.kind == "static":
            return None
        return torch.tensor(torch.stack([prompt_mask.sum(1), completion_mask.sum(1)], 1).tolist())

    def cut(self, lengths: Tensor | None, *, rows: int, prompt: int, completion: int) -> tuple[MicroBatch, ...]:
        """Cut `rows` rows of `prompt` + `completion` columns, the longest rows first.

        `lengths` come from the method of that name; None keeps all rows and columns.
        """
        order = torch.arange(rows)
        if lengths is not None:
            order = lengths.sum(1).argsort(descending=True, stable=True)
        micro_batches = []
        for chosen in order.split(self.size):
            before, after = prompt, completion
            if lengths is not None:
                longest = lengths[chosen].amax(0).tolist()
                before, after = (
                    self.shapes.length(max(tokens, 1), most) for tokens, most in zip(longest, (prompt, completion))
                )
            micro_batches.append(MicroBatch(None if self.size >= rows else chosen, before, after))
        return tuple(micro_batches)


@dataclass(frozen=True)
class Rollout:
    """Prompts with the completions that the policy drew."""

    # the sequences
    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    action_mask: Tensor  # [B, A] float32

    # about each row
    row_mask: Tensor  # [B] False for rows that only fill up the batch
    ended: Tensor  # [B] float32: 1 if the last action is an end token

    # about each action, if generation drew it
    drawn_log_probs: Tensor | None = field(default=None, kw_only=True)  # [B, A] as generation computed them

    # how rows are cut, on the host
    micro_batches: tuple[MicroBatch, ...]
    lengths: Tensor | None = None  # see `MicroBatcher.lengths`

    @classmethod
    def join(
        cls,
        prompts: Batch,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        end_ids: Tensor | None,
        micro_batcher: MicroBatcher,
        lengths: Tensor | None = None,
        log_probs: Tensor | None = None,
    ) -> Rollout:
        """Append completions to prompts.

        Args:
            prompts: `prompt_ids`, `prompt_mask` [B, P] and `row_mask` [B]; see `rlhf.data.batches.collate_ppo`.
            completion_ids: [B, A].
            completion_mask: [B, A], 1 on the tokens drawn.
            micro_batcher: cuts the rows into micro-batches.
            end_ids: [N], the tokens that end a completion; None if every completion is known to end.
            lengths: those of `MicroBatcher.lengths`; None keeps all columns.
            log_probs: [B, A], those with which generation drew the tokens; None: it did not draw them.
        """
        rows, prompt = prompts["prompt_ids"].shape
        cut = micro_batcher.cut(lengths, rows=rows, prompt=prompt, completion=completion_ids.shape[1])
        action_mask = (completion_mask * prompts["row_mask"].unsqueeze(1)).float()
        ended = prompts["row_mask"].float() if end_ids is None else ends_with(completion_ids, action_mask, end_ids)
        return cls(
            input_ids=torch.cat([prompts["prompt_ids"], completion_ids], dim=1),
            attention_mask=torch.cat([prompts["prompt_mask"], completion_mask], dim=1),
            action_mask=action_mask,
            row_mask=prompts["row_mask"],
            ended=ended,
            micro_batches=cut,
            lengths=lengths,
            drawn_log_probs=log_probs,
        )

    @property
    def completion_length(self) -> int:
        """The number of completion columns, A."""
        return self.action_mask.shape[1]


class ForwardPass(NamedTuple):
    """The outputs of one micro-batch with their autograd graphs, for a later backward pass."""

    policy: LogProbs  # [n, a] each
    values: Tensor | None  # [n, a]; None without a critic


@dataclass(frozen=True)
class Scores:
    """The scores of a rollout by the models and reward functions; all float32 and without gradients."""

    # of each token; arbitrary where `action_mask` is 0
    log_probs: Tensor  # [B, A] of the policy that drew the tokens
    ref_log_probs: Tensor  # [B, A] of its reference
    entropy: Tensor  # [B, A] of the policy's distributions, in nats
    values: Tensor | None  # [B, A] of the critic; None without one

    # of each completion
    reward: Tensor  # [B] the weighted sum of the parts
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)  # [B] each, by the name that is recorded

    passes: tuple[ForwardPass, ...] = ()
    """The training passes behind `log_probs` and `values`, by micro-batch; empty if the update does not reuse them."""


@dataclass(frozen=True)
class Experience:
    """Sequences with the inputs of the updates; numbers of tokens are 0 where `action_mask` is 0."""

    # the sequences
    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    action_mask: Tensor  # [B, A] float32

    # outputs of policy, reference and critic at the time of sampling; values are 0 without a critic
    log_probs: Tensor  # [B, A] float32
    ref_log_probs: Tensor  # [B, A] float32
    values: Tensor  # [B, A] float32
    reward: Tensor  # [B] float32, as reported: not clipped

    # targets of the updates
    advantages: Tensor  # [B, A] float32
    returns: Tensor  # [B, A] float32
    correction: Tensor  # [B, A] float32: weight of each token in the policy's loss (`ppo.rollout.correction`)

    # how rows are cut, on the host
    micro_batches: tuple[MicroBatch, ...]
    lengths: Tensor | None = None
    passes: tuple[ForwardPass, ...] = ()  # see `Scores`; one for each of `micro_batches`

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def completion_length(self) -> int:
        """The number of completion columns, A."""
        return self.action_mask.shape[1]

    def minibatches(
        self, size: int, micro_batcher: MicroBatcher, generator: torch.Generator | None = None
    ) -> list[Experience]:
        """Split into parts of `size` rows, in an order drawn from `generator`; None keeps the order.

        If one part has all rows, it keeps the micro-batches and their forward passes.
        """
        if generator is None and size == len(self):
            return [self]
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        return [self._rows(part, micro_batcher) for part in order.split(size)]

    def split(self) -> list[Experience]:
        """Return the rows of each micro-batch, with their forward pass if there is one."""
        parts = []
        for number, micro_batch in enumerate(self.micro_batches):
            select = partial(micro_batch.select, completion_length=self.completion_length)
            parts.append(self._map(select, (), lengths=None, passes=self.passes[number : number + 1]))
        return parts

    def _rows(self, rows: Tensor, micro_batcher: MicroBatcher) -> Experience:
        """Return the rows with these indices [N], on the host, with new micro-batches."""
        lengths = None if self.lengths is None else self.lengths.index_select(0, rows)
        prompt = self.input_ids.shape[1] - self.completion_length
        cut = micro_batcher.cut(lengths, rows=len(rows), prompt=prompt, completion=self.completion_length)
        return self._map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)), cut, lengths=lengths)

    def _map(
        self,
        change: Callable[[Tensor], Tensor],
        micro_batches: tuple[MicroBatch, ...],
        *,
        lengths: Tensor | None,
        passes: tuple[ForwardPass, ...] = (),
    ) -> Experience:
        tensors = {name: change(getattr(self, name)) for name in _TENSORS}
        return Experience(**tensors, micro_batches=micro_batches, lengths=lengths, passes=passes)


_TENSORS = [item.name for item in fields(Experience) if item.name not in ("micro_batches", "lengths", "passes")]
