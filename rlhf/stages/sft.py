"""Stage 1, supervised fine-tuning: raise the likelihood of demonstrations.

Demonstrations flow in; a causal language model and its held-out perplexity, before and after, flow out.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor, nn

from rlhf.data.batches import Batches, collate_sft
from rlhf.data.tokenization import StageData
from rlhf.engine import distributed
from rlhf.engine.statistics import Numbers
from rlhf.engine.training import Batch, TrainingEngine
from rlhf.models.forward import model_inputs
from rlhf.models.loading import Loader
from rlhf.objectives.tokens import token_log_probs
from rlhf.stages.context import StageContext
from rlhf.stages.leaving import leave
from rlhf.stages.loop import measure_once, run_steps, sum_over


def negative_log_likelihood(model: nn.Module, batch: Batch) -> Tensor:
    """Summed over the target tokens of a batch (`loss_mask` [B, T] marks them): a scalar, in nats."""
    logits = model(**model_inputs(model, batch["input_ids"], batch["attention_mask"])).logits
    log_probs = token_log_probs(logits[:, :-1], batch["input_ids"][:, 1:])
    return -(log_probs * batch["loss_mask"][:, 1:]).sum()


def run(context: StageContext, load: Loader, tokenizer: Any, data: StageData) -> dict[str, Any]:
    """Train what `load` gives on `data.train`, save the model, and return the stage's summary."""
    settings = context.config.sft
    micro = settings.micro_batch(context.world.size, section="sft")
    collate = partial(
        collate_sft,
        pad_token_id=tokenizer.pad_token_id,
        policy=context.shapes,
        maximum=context.config.data.max_length,
        loss_on=settings.loss_on,
    )
    batches = context.batches(data.train, collate, batch_size=settings.batch_size, micro_batch_size=micro)
    held_out = context.evaluation_batches(data.heldout, collate, settings, rows=micro)
    total_steps = settings.total_steps(len(batches))
    engine = context.engine(
        "sft",
        load,
        settings.optimizer,
        total_steps=total_steps,
        batch_size=settings.batch_size,
        micro_batch_size=micro,
    )

    def step(index: int) -> Numbers:
        micro_batches = [context.accelerator.to_device(batch) for batch in batches.step(index)]
        # Targets of the whole global batch: the loss is a mean over them, however rows are split.
        total = distributed.all_sum(sum(batch["loss_mask"][:, 1:].sum() for batch in micro_batches).float())

        def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            tokens = (batch["attention_mask"] * batch["loss_mask"].any(-1, keepdim=True)).sum()  # of real rows
            return negative_log_likelihood(model, batch) / total.clamp_min(1), {"tokens": tokens}

        rates = engine.rates
        numbers = engine.step(micro_batches, loss).read()
        return numbers | rates | {"grad_norm": engine.grad_norm()}

    def measure(when: str) -> Numbers:
        found = {"perplexity": perplexity(context, engine, held_out, when)}
        context.recorder.log(engine.steps, {f"heldout_{key}": value for key, value in found.items()})
        return found

    before = measure_once(context, lambda: measure("before"))
    run_steps(
        context,
        total_steps=total_steps,
        step=step,
        engines={"model": engine},
        settings=settings,
        unit="tokens",
        shown=("loss",),
    )
    after = measure("after")
    leave(context, engine, tokenizer)
    return {"before": before, "after": after, "steps": total_steps, "parameters": engine.parameter_counts}


def perplexity(context: StageContext, engine: TrainingEngine, held_out: Batches, when: str) -> float:
    """exp of the mean negative log-likelihood per target token of the held-out rows."""

    def statistics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"nll": negative_log_likelihood(model, batch), "targets": batch["loss_mask"][:, 1:].sum()}

    numbers = sum_over(context, engine, held_out, f"perplexity {when}", statistics)
    return math.exp(min(numbers["nll"] / max(numbers["targets"], 1), 700))  # exp(710) is beyond a float
