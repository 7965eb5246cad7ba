"""What the replies of pairs were worth to the policy before it was trained: known beforehand, or found in every step.

Before its first step the policy is its own reference: it scores every pair that training will meet, and no other model
is loaded. What it found is kept in the stage's folder, for a stage that resumes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf.data.batches import Batches
from rlhf.data.examples import NumberedPair
from rlhf.engine import distributed
from rlhf.engine.cpu_offload import on_device
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.losses.dpo import sequence_log_probs
from rlhf.losses.log_probs import masked
from rlhf.models.forward import completion_log_probs
from rlhf.models.lora import without_adapters
from rlhf.reporting.progress import progress
from rlhf.trainers.context import StageContext
from rlhf.utils.atomic_io import PARTIAL, sync

FILE = "reference.safetensors"


class Pass(NamedTuple):
    """Batches of `rlhf.data.batches.collate_dpo`, and how many of them are used."""

    batches: Batches[NumberedPair]
    steps: int

    @property
    def numbers(self) -> list[int]:
        """Of the pairs that are met."""
        return [example.number for step in range(self.steps) for example in self.batches.examples(step)]


def reply_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probabilities of the replies of a batch, in nats: [2B], as its rows."""
    mask = batch["completion_mask"]
    found = completion_log_probs(model, batch["input_ids"], batch["attention_mask"], mask.shape[1])
    return sequence_log_probs(found.log_probs, mask)


class Precomputed:
    """The policy's own log-probabilities of all pairs, found before its first step."""

    def __init__(self, context: StageContext, policy: TrainingEngine, passes: Sequence[Pass], pairs: int) -> None:
        """`pairs`: how many there are in the data, and so how many numbers. Every rank calls it."""
        table = _kept(context, [number for one in passes for number in one.numbers], pairs)
        if table is None:
            table = _found(context, policy, passes, pairs)
            _keep(context, table)
        self._table = table.to(context.accelerator.device())

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches, each with `reference` [2B]: log-probabilities of its rows' replies."""
        return [batch | {"reference": self._table[batch["number"]].T.reshape(-1)} for batch in batches]


class Beside:
    """A model that is held beside the policy or, with LoRA, the policy without its adapters."""

    def __init__(self, context: StageContext, policy: TrainingEngine, model: nn.Module | None) -> None:
        self._policy, self._model = policy, model
        self._precision, self._boundary = context.precision, context.accelerator.step_boundary

    @torch.no_grad()
    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """As `Precomputed`."""
        return [batch | {"reference": found} for batch, found in zip(batches, self._found(batches), strict=True)]

    def _found(self, batches: Sequence[Batch]) -> list[Tensor]:
        if self._model is None:
            self._policy.engine.eval()
            with without_adapters(self._policy.module):
                return [self._score(self._policy.engine, batch) for batch in batches]
        with on_device(self._model):
            return [self._score(self._model, batch) for batch in batches]

    def _score(self, model: nn.Module, batch: Batch) -> Tensor:
        with self._precision.autocast():
            found = reply_log_probs(model, batch)
        self._boundary("dpo/reference")
        return found


@torch.no_grad()
def _found(context: StageContext, policy: TrainingEngine, passes: Sequence[Pass], pairs: int) -> Tensor:
    """[pairs, 2], of the chosen and the rejected reply; NaN of pairs that are not met. In batches of training's."""
    policy.engine.eval()
    table, met = (torch.zeros(pairs, columns, device=context.accelerator.device()) for columns in (2, 1))
    rows = sum(len(one.numbers) for one in passes)
    bars = progress(rows, "dpo: reference log-probabilities", enabled=context.world.is_main)
    with context.phases.running("scoring"), bars as bar:
        for batches, step in ((one.batches, step) for one in passes for step in range(one.steps)):
            for batch in map(context.accelerator.to_device, batches.step(step)):
                with context.precision.autocast():
                    found = reply_log_probs(policy.engine, batch).view(2, -1).T
                real = batch["pair_mask"][:, None]
                table.index_add_(0, batch["number"], masked(found, real))
                met.index_add_(0, batch["number"], real.float())
                context.accelerator.step_boundary("dpo/reference")
            bar.advance(len(batches.examples(step)))
    # Each rank has met its own share.
    return torch.where(distributed.all_sum(met) > 0, distributed.all_sum(table), torch.nan)


def _kept(context: StageContext, numbers: Sequence[int], pairs: int) -> Tensor | None:
    """What an earlier process found, where the stage goes on from a checkpoint and it holds all `numbers`."""
    path, found = context.directory.path / FILE, None
    with distributed.on_main(f"reading {path}") as main:
        if main and context.directory.latest_checkpoint and path.is_file():
            found = load_file(path)["log_probs"]
            if found.shape[0] != pairs or found[numbers].isnan().any():  # it is to be trained for longer now
                found = None
    return distributed.all_gather_objects(found)[0]


def _keep(context: StageContext, table: Tensor) -> None:
    path = context.directory.path / FILE
    with distributed.on_main(f"writing {path}") as main:
        if main:
            partial = path.with_name(path.name + PARTIAL)
            save_file({"log_probs": table.to(context.accelerator.host_device())}, partial)
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
