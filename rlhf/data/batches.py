"""From examples to tensors and back: padding (collation), each rank's share of a global batch, completions as text.

Every batch of a loader has the same number of rows: filler rows have a mask of 0. Masks come from lengths, never
from token values, because the pad token may equal the end-of-sequence token.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from accelerators import ShapePolicy
from rlhf.data.examples import Demonstration, NumberedPair, Pair, Prompt

Batch = dict[str, Tensor]
E = TypeVar("E")
Row = TypeVar("Row")


def collate_sft(
    examples: Sequence[Demonstration],
    real: int | None = None,
    *,
    policy: ShapePolicy,
    maximum: int,
    pad_token_id: int,
    loss_on: Literal["completion", "all"] = "completion",
) -> Batch:
    """Pad demonstrations on the right; the arguments are those of all collate functions.

    Args:
        examples: B examples.
        real: number of real examples, which come first; the others are fillers. None: all are real.
        policy: rounds lengths up to the shapes that the accelerator prefers.
        maximum: maximum length of a row in tokens, prompt and completion together.
        pad_token_id: token of the padding.
        loss_on: tokens that are targets: the completion's, or all but the first of the row.

    Returns:
        input_ids, attention_mask (int64) and loss_mask (bool), all [B, T]; loss_mask marks the target tokens.
        If the policy is dynamic, also targets (int64) [N]: indices of the targets in the flattened [B * T].
    """
    rows = [example.prompt_ids + example.completion_ids for example in examples]
    input_ids, attention_mask = pad_right(rows, policy, maximum, pad_token_id)
    first_targets = [max(len(example.prompt_ids), 1) if loss_on == "completion" else 1 for example in examples]
    loss_mask = torch.arange(input_ids.shape[1]) >= torch.tensor(first_targets)[:, None]
    loss_mask &= attention_mask.bool() & _real_mask(examples, real)[:, None]
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
    return batch | {"targets": loss_mask.flatten().nonzero().flatten()} if policy.kind == "dynamic" else batch


def collate_reward(
    examples: Sequence[Pair], real: int | None = None, *, policy: ShapePolicy, maximum: int, pad_token_id: int
) -> Batch:
    """Pad pairs on the right, the chosen replies first.

    Returns:
        input_ids, attention_mask (int64), both [2B, T]: B rows with the chosen reply, then B with the rejected;
        pair_mask (bool) [B]: False for filler pairs; margins (float32) [B].
    """
    rows = [example.prompt_ids + example.chosen_ids for example in examples]
    rows += [example.prompt_ids + example.rejected_ids for example in examples]
    input_ids, attention_mask = pad_right(rows, policy, maximum, pad_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "pair_mask": _real_mask(examples, real),
        "margins": torch.tensor([example.row.margin or 0.0 for example in examples]),
    }


def collate_dpo(
    examples: Sequence[NumberedPair],
    real: int | None = None,
    *,
    policy: ShapePolicy,
    prompt: int,
    completion: int,
    pad_token_id: int,
) -> Batch:
    """Pad prompts on the left and replies on the right, so that replies begin in one column; the chosen ones first.

    Args:
        prompt, completion: maximum length of a prompt and of a reply in tokens.

    Returns:
        input_ids, attention_mask (int64), both [2B, P + A]: B rows with the chosen reply, then B with the rejected;
        completion_mask (bool) [2B, A]: the reply's tokens; number (int64) [B]; pair_mask (bool) [B]: False for filler
        pairs.
    """
    prompts = [example.prompt_ids[::-1] for example in examples] * 2
    replies = [example.chosen_ids for example in examples] + [example.rejected_ids for example in examples]
    before, before_mask = pad_right(prompts, policy, prompt, pad_token_id)
    after, after_mask = pad_right(replies, policy, completion, pad_token_id)
    return {
        "input_ids": torch.cat([before.flip(1), after], 1),
        "attention_mask": torch.cat([before_mask.flip(1), after_mask], 1),
        "completion_mask": after_mask.bool(),
        "number": torch.tensor([example.number for example in examples]),
        "pair_mask": _real_mask(examples, real),
    }


def collate_ppo(
    examples: Sequence[Prompt], real: int | None = None, *, policy: ShapePolicy, maximum: int, pad_token_id: int
) -> Batch:
    """Pad prompts on the left, so that completions begin in one column.

    Returns:
        prompt_ids, prompt_mask (int64), both [B, P]; row_mask (bool) [B]: False for filler rows.
    """
    rows = [example.prompt_ids for example in examples]
    prompt_ids, prompt_mask = pad_left(rows, policy, maximum, pad_token_id)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "row_mask": _real_mask(examples, real),
    }


class MicroBatchRows(NamedTuple):
    """The rows of one micro-batch.

    Attributes:
        examples: those after the first `real` ones are fillers.
        numbers: the places of the real ones among all examples.
    """

    examples: list[Any]
    numbers: list[int]

    @property
    def real(self) -> int:
        """The number of real examples."""
        return len(self.numbers)


class Batches(Generic[E]):
    """Global batches in a seeded order, reshuffled every epoch; `step` returns one rank's share of a batch.

    Global batch k contains positions k * batch_size to (k + 1) * batch_size of the epoch's order. Rank r takes the
    r-th of `world_size` equal slices and cuts it, in order, into micro-batches: a step sees the same rows for any
    number of ranks and micro-batches. The last batch of an epoch is completed with masked filler rows or, if batches
    are `endless`, with the first rows of the next epoch.

    If a function `length` of examples is given, the rows of a global batch are sorted, the longest first, and dealt
    out to the ranks: micro-batch m of every rank has rows of similar length, which need little padding and keep no
    rank waiting. Without `shuffle`, the whole epoch is sorted.
    """

    def __init__(
        self,
        examples: Sequence[E],
        collate: Callable[[Sequence[E], int], Batch],
        *,
        batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        endless: bool = False,
        length: Callable[[E], int] | None = None,
    ) -> None:
        self._examples = examples
        self.collate = collate
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._rank, self._world_size, self._length = rank, world_size, length
        self._share = range(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self._seed = seed
        self._shuffle = shuffle
        self._endless = endless
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return -(-len(self._examples) // self._batch_size)

    @property
    def rows(self) -> int:
        """Number of examples in an epoch."""
        return len(self._examples)

    def numbers(self, index: int) -> list[int]:
        """Return the numbers of the real rows of global batch `index`, over all ranks."""
        rows, size = len(self._examples), self._batch_size
        if self._endless:
            return [self._number(*divmod(position, rows)) for position in range(index * size, (index + 1) * size)]
        epoch, step = divmod(index, len(self))
        return [self._number(epoch, position) for position in range(step * size, min((step + 1) * size, rows))]

    def examples(self, index: int) -> list[E]:
        """Return the real examples of global batch `index`, over all ranks."""
        return [self._examples[number] for number in self.numbers(index)]

    def share(self, index: int) -> list[E]:
        """Return this rank's real examples of global batch `index`, in the order of their rows."""
        return self.examples(index)[self._share.start : self._share.stop]

    def own_numbers(self, index: int) -> list[int]:
        """Return the numbers of the rows of `share`."""
        return self.numbers(index)[self._share.start : self._share.stop]

    def _number(self, epoch: int, position: int) -> int:
        if epoch != self._epoch:
            self._order = list(range(len(self._examples)))
            if self._shuffle:
                random.Random(f"epoch {self._seed} {epoch}").shuffle(self._order)
            elif self._length:
                self._order = _longest_first(self._order, [self._length(example) for example in self._examples])
            self._epoch = epoch
        return self._order[position]

    def step(self, index: int) -> list[Batch]:
        """Return this rank's micro-batches of global batch `index`, counted from the start of the first epoch."""
        return [self.collate(rows.examples, rows.real) for rows in self.micro_batches(index)]

    def micro_batches(self, index: int) -> list[MicroBatchRows]:
        """Return the rows of each of these micro-batches."""
        rows, size = [(number, self._examples[number]) for number in self.numbers(index)], self._micro_batch_size
        positions: Sequence[int] = self._share
        if self._length:
            rows = _longest_first(rows, [self._length(example) for _, example in rows])
            positions = range(self._rank, self._batch_size, self._world_size)
        real = len(rows)
        rows += rows[-1:] * (self._batch_size - real)
        micro_batches = []
        for start in range(0, len(positions), size):
            places = positions[start : start + size]
            numbers = [rows[place][0] for place in places if place < real]
            micro_batches.append(MicroBatchRows([rows[place][1] for place in places], numbers))
        return micro_batches


def example_length(example: Demonstration | Pair) -> int:
    """Return the number of tokens of the longest row of an example."""
    replies = (example.chosen_ids, example.rejected_ids) if isinstance(example, Pair) else (example.completion_ids,)
    return len(example.prompt_ids) + max(map(len, replies))


def count_padding(batch: Batch) -> Batch:
    """Count the `positions` of a batch of demonstrations or pairs, and those with a token of a real row: `present`."""
    mask, pairs = batch["attention_mask"], batch.get("pair_mask")
    real = batch["loss_mask"].any(1) if pairs is None else pairs.repeat(2)
    present = (mask * real.unsqueeze(1)).sum()
    return {"present": present, "positions": torch.full_like(present, mask.numel())}


def digest_batches(batches: Sequence[Batch]) -> int:
    """Return a CRC-32 of all tensors of some batches on the host."""
    digest = 0
    for batch in batches:
        for name in sorted(batch):
            digest = zlib.crc32(batch[name].contiguous().view(torch.uint8).numpy().tobytes(), digest)
    return digest


def pad_right(
    rows: Sequence[Sequence[int]], policy: ShapePolicy, maximum: int, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Return (token ids, mask of real tokens), both int64 [rows, T]."""
    lengths = torch.tensor([len(row) for row in rows])
    width = policy.length(int(lengths.max()), maximum)
    ids = torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in rows])
    return ids, (torch.arange(width) < lengths[:, None]).long()


def pad_left(
    rows: Sequence[Sequence[int]], policy: ShapePolicy, maximum: int, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Return what `pad_right` does, padded on the left, so that completions begin in one column."""
    ids, mask = pad_right([row[::-1] for row in rows], policy, maximum, pad_token_id)
    return ids.flip(1), mask.flip(1)


def _longest_first(rows: list[Row], lengths: Sequence[int]) -> list[Row]:
    return [rows[index] for index in sorted(range(len(rows)), key=lambda index: -lengths[index])]


def _real_mask(examples: Sequence[object], real: int | None) -> Tensor:
    return torch.arange(len(examples)) < (len(examples) if real is None else real)


def completion_ids(input_ids: Tensor, action_mask: Tensor) -> list[list[int]]:
    """Return the completion of each row as token ids; empty for filler rows.

    Args:
        input_ids: [B, P + A], completions from column P.
        action_mask: [B, A], 1 on the tokens drawn.
    """
    rows = zip(input_ids.tolist(), action_mask.tolist(), strict=True)
    return [ids[-len(mask) :][: int(sum(mask))] for ids, mask in rows]


def completion_texts(tokenizer: Any, completions: Sequence[Sequence[int]]) -> list[str]:
    """Return each completion as text, without control tokens."""
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]
