"""The stages whose rows say what is right: one skeleton, filled in with what each learns and how it is measured.

A model, rows and an `Objective` flow in; the trained model, and what it does with held-out rows before and after,
flow out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from rlhf.config.schema import EpochConfig
from rlhf.data.batches import Batches, padding, tokens_of
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.engine.metric_sums import Metrics, padding_share
from rlhf.models.flops import Texts
from rlhf.models.loading import ModelLoader
from rlhf.trainers.context import StageContext
from rlhf.trainers.loop import Found, run_steps
from rlhf.trainers.outputs import leave, say_what_is_left


@dataclass(frozen=True)
class Objective:
    """What one stage learns, and how its model is measured.

    `loss(model, batch, total)` of a micro-batch is its part of the mean over the global batch, and sums of statistics;
    `total` is the sum of `count(batch)` over all micro-batches of all ranks. `averages` makes a step's numbers of the
    sums, of which `unit` is one that gives the rate; `shown` appear beside the progress.
    `prepare` adds to a step's micro-batches, on the device, what the loss needs of other models than the trained one.
    `evaluate(context, engine, held_out, when)` measures the model; `when` is for display.
    """

    loss: Callable[[nn.Module, Batch, Tensor], tuple[Tensor, Batch]]
    count: Callable[[Batch], Tensor]
    evaluate: Callable[[StageContext, TrainingEngine, Batches, str], Metrics]
    unit: str
    shown: tuple[str, ...]
    averages: Callable[[Metrics], Metrics] = lambda sums: sums
    prepare: Callable[[Sequence[Batch]], Sequence[Batch]] = lambda batches: batches


class Supervised:
    """A stage's batches and its engine; `run` trains."""

    def __init__(self, context: StageContext, load: ModelLoader, collate: Any, data: StageData) -> None:
        name = context.directory.name
        self.context = context
        self.settings: EpochConfig = getattr(context.config, name)
        settings, micro = self.settings, self.settings.micro_batch(context.world.size, section=name)
        sizes = {"batch_size": settings.batch_size, "micro_batch_size": micro}
        self.batches = context.batches(data.train, collate, **sizes, length=tokens_of)
        self.held_out = context.evaluation_batches(data.heldout, collate, settings, rows=micro, length=tokens_of)
        self.total_steps = settings.total_steps(len(self.batches))
        (role,) = (role for role, placement in context.placements.items() if placement.role.trained)
        self.engine = context.engine(
            role,
            load,
            settings.optimizer,
            total_steps=self.total_steps,
            batch_size=settings.batch_size,
            micro_batch_size=micro,
        )

    def run(self, objective: Objective, tokenizer: Any) -> dict[str, Any]:
        """Train the model, save it, and return the stage's summary."""
        context, engine = self.context, self.engine

        def step(index: int) -> Metrics:
            batches: Sequence[Batch] = [context.accelerator.to_device(batch) for batch in self.batches.step(index)]
            with context.phases("training"):
                batches = objective.prepare(batches)
                # Of the whole global batch: the loss is a mean over it, however rows are split.
                total = distributed.all_sum(sum(objective.count(batch) for batch in batches).float())
                rates = engine.rates
                sums = engine.step(batches, lambda model, batch: objective.loss(model, batch, total))
            for batch in batches:
                sums.add(**read(batch), **padding(batch))
            found = sums.read()
            texts = Texts(*(found.pop(f"read_{name}") for name in Texts._fields))
            context.phases.count_work("training", tokens=texts.tokens, flops=arithmetic(context, texts))
            share = padding_share({key: found.pop(key) for key in ("present", "positions")})
            return objective.averages(found) | rates | {"padding_share": share, "grad_norm": engine.grad_norm()}

        summary = run_steps(
            context,
            total_steps=self.total_steps,
            step=step,
            measure=lambda when: Found(objective.evaluate(context, engine, self.held_out, when)),
            leave=lambda folder: leave(context, engine, tokenizer, folder),
            engines={"model": engine},
            settings=self.settings,
            unit=objective.unit,
            shown=objective.shown,
            epoch=len(self.batches),
        )
        say_what_is_left(context, engine)
        return summary | {"parameters": engine.parameter_counts}


def read(batch: Batch) -> Batch:
    """Sums of what the model reads of a batch's real rows, as `Texts` has them, under names that begin with read."""
    real = batch["loss_mask"].any(1) if "loss_mask" in batch else batch["pair_mask"].repeat(2)
    lengths = batch["attention_mask"].sum(1) * real
    foretold = batch.get("loss_mask", batch.get("completion_mask"))  # a scalar head is read at every token
    outputs = lengths if foretold is None else foretold.sum(1) * real
    return {"read_tokens": lengths.sum(), "read_pairs": (lengths**2).sum(), "read_outputs": outputs.sum()}


def arithmetic(context: StageContext, texts: Texts) -> float | None:
    """Operations of a step over these texts: an update and, in dpo with the reference beside, its forward pass."""
    if context.products is None:
        return None
    trained, *frozen = context.products.values()
    beside = context.directory.name == "dpo" and context.config.dpo.reference == "beside"
    scored = frozen[0] if frozen else replace(trained, adapters=0)
    return trained.update(texts) + (scored.forward(texts) if beside else 0)
