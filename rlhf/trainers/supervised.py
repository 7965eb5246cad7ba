"""The trainer of stages whose rows say what is right: fine-tuning, the reward model, DPO.

`SupervisedTrainer` has their batches, step, checkpoints and results; each of them adds its loss and its evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.schema import EpochConfig
from rlhf.data.batches import count_padding, example_length
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.engine.metric_sums import Metrics, MetricSums, padding_share
from rlhf.models.flops import TextLengths
from rlhf.reporting.progress import progress
from rlhf.trainers.context import ModelLoader, StageContext
from rlhf.trainers.outputs import log_outputs, save_outputs
from rlhf.trainers.trainer import EvalResult


class SupervisedTrainer:
    """A model that learns from rows; a `rlhf.trainers.trainer.Trainer`.

    A stage defines `count`, `loss` and `evaluate`, and if it needs them `average` and `prepare`.
    """

    unit: str
    displayed: tuple[str, ...]

    def __init__(self, context: StageContext, load: ModelLoader, tokenizer: Any, collate: Any, data: StageData) -> None:
        """Load the model and prepare the batches; `collate` makes a micro-batch, see `rlhf.data.batches`."""
        name = context.directory.name
        self.context, self.tokenizer, self._data = context, tokenizer, data
        self.settings: EpochConfig = getattr(context.config, name)
        settings, micro = self.settings, self.settings.micro_batch(context.world.size, section=name)
        sizes = {"batch_size": settings.batch_size, "micro_batch_size": micro}
        self.batches = context.batches(data.train, collate, **sizes, length=example_length)
        self.held_out = context.evaluation_batches(data.heldout, collate, settings, rows=micro, length=example_length)
        self.epoch_steps = len(self.batches)
        self.total_steps = settings.total_steps(self.epoch_steps)
        (role,) = (role for role, placement in context.placements.items() if placement.role.trained)
        self.engine = context.engine(role, load, settings.optimizer, total_steps=self.total_steps, **sizes)

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """The model, by the name that checkpoints use."""
        return {"model": self.engine}

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets in a micro-batch; the loss is a mean over those of the global batch."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a micro-batch's part of the mean over all `total` targets, and sums of statistics."""
        raise NotImplementedError

    def average(self, sums: Metrics) -> Metrics:
        """Return a step's metrics, given the sums of `loss` over all ranks."""
        return sums

    def prepare(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add to a step's micro-batches, on the device, what `loss` needs from other models."""
        return batches

    def evaluate(self, when: str) -> EvalResult:
        """Measure the model on the held-out rows."""
        raise NotImplementedError

    def step(self, index: int) -> Metrics:
        """Take one optimizer step on global batch `index`."""
        context, engine = self.context, self.engine
        batches: Sequence[Batch] = [context.accelerator.to_device(batch) for batch in self.batches.step(index)]
        with context.phases("training"):
            batches = self.prepare(batches)
            # Of the whole global batch: the loss is a mean over it, however rows are split.
            total = distributed.all_sum(torch.stack([self.count(batch) for batch in batches]).sum().float())
            rates = engine.rates
            sums = engine.step(batches, lambda model, batch: self.loss(model, batch, total))
        for batch in batches:
            sums.add(**text_sums(batch), **count_padding(batch))
        totals = sums.read()
        texts = TextLengths(*(totals.pop(f"read_{name}") for name in TextLengths._fields))
        context.phases.count_work("training", tokens=texts.tokens, flops=self._flops(texts))
        share = padding_share({key: totals.pop(key) for key in ("present", "positions")})
        return self.average(totals) | rates | {"padding_share": share, "grad_norm": engine.grad_norm()}

    @torch.no_grad()
    def sum_over_heldout(
        self, description: str, statistics: Callable[[nn.Module, Batch], dict[str, Tensor]]
    ) -> Metrics:
        """Return the sums of `statistics(model, batch)` over all held-out batches; show `description` meanwhile."""
        context, name = self.context, self.context.directory.name
        self.engine.engine.eval()
        sums = MetricSums()
        bars = progress(self.held_out.rows, f"{name}: {description}", enabled=context.world.is_main)
        with context.phases.running("evaluation"), bars as bar:
            for index in range(len(self.held_out)):
                for batch in self.held_out.step(index):
                    batch = context.accelerator.to_device(batch)
                    with context.precision.autocast():
                        batch_sums = statistics(self.engine.engine, batch)
                    context.accelerator.step_boundary(f"{name}/evaluate")
                    sums.add(**batch_sums)
                bar.advance(len(self.held_out.examples(index)))
        return sums.read()

    def save(self, folder: Path) -> None:
        """Save the model."""
        save_outputs(self.context, self.engine, self.tokenizer, folder)

    def summarize(self) -> dict[str, Any]:
        """Log what was saved and return the summary's entries about the model and the data."""
        log_outputs(self.context, self.engine)
        return {"parameters": self.engine.parameter_counts, **self._data.summary}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs in addition to the engine: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""

    def _flops(self, texts: TextLengths) -> float | None:
        """Return the operations of an update on these texts, and of a live reference's forward pass if there is one."""
        context = self.context
        if context.model_flops is None:
            return None
        trained, *frozen = context.model_flops.values()
        live = context.directory.name == "dpo" and context.config.dpo.reference == "beside"
        scored = frozen[0] if frozen else replace(trained, adapters=0)
        return trained.update(texts) + (scored.forward(texts) if live else 0)


def text_sums(batch: Batch) -> Batch:
    """Return the sums of `TextLengths` over a batch's real rows, with the prefix `read_`."""
    real = batch["loss_mask"].any(1) if "loss_mask" in batch else batch["pair_mask"].repeat(2)
    lengths = batch["attention_mask"].sum(1) * real
    targets = batch.get("loss_mask", batch.get("completion_mask"))  # a scalar head is read at every token
    outputs = lengths if targets is None else targets.sum(1) * real
    return {"read_tokens": lengths.sum(), "read_pairs": (lengths**2).sum(), "read_outputs": outputs.sum()}
