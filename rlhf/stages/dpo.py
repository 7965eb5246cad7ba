"""DPO: raise the preferred reply of each pair over the other, measured against the policy as it was (arXiv:2305.18290).

Preference pairs flow in; a causal language model flows out, with what it makes of held-out pairs, before and after:
its implicit reward of a reply is beta log (policy / reference), and needs no reward model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from rlhf.config import DPOConfig
from rlhf.data.batches import Batches, collate_dpo
from rlhf.data.tokenization import StageData
from rlhf.engine import distributed
from rlhf.engine.statistics import Numbers
from rlhf.engine.training import Batch, TrainingEngine
from rlhf.models.loading import Loader
from rlhf.objectives.preferences import preference_losses
from rlhf.stages.context import StageContext
from rlhf.stages.leaving import leave
from rlhf.stages.loop import measure_once, run_steps, sum_over
from rlhf.stages.references import Beside, Pass, Precomputed, reply_log_probs

MEANS = ("accuracy", "margin", "drift", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob")
"""What is recorded of the pairs, of a step's and of those held out: means over them."""


def run(context: StageContext, load: Loader, tokenizer: Any, data: StageData) -> dict[str, Any]:
    """Train what `load` gives on `data.train`, save the model, and return the stage's summary."""
    settings, limits = context.config.dpo, context.config.data
    micro = settings.micro_batch(context.world.size, section="dpo")
    collate = partial(
        collate_dpo,
        policy=context.shapes,
        prompt=limits.max_prompt_length,
        completion=limits.max_completion_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    pairs = list(enumerate([*data.train, *data.heldout]))
    train, rest = pairs[: len(data.train)], pairs[len(data.train) :]
    batches = context.batches(train, collate, batch_size=settings.batch_size, micro_batch_size=micro)
    held_out = context.evaluation_batches(rest, collate, settings, rows=micro)
    total_steps = settings.total_steps(len(batches))
    engine = context.engine(
        "dpo",
        load,
        settings.optimizer,
        total_steps=total_steps,
        batch_size=settings.batch_size,
        micro_batch_size=micro,
    )
    referenced: Precomputed | Beside
    if settings.reference == "beside":
        frozen = context.frozen("reference", load) if "reference" in context.holdings else None
        referenced = Beside(context, engine, frozen)
    else:
        passes = [Pass(batches, min(total_steps, len(batches))), Pass(held_out, len(held_out))]
        referenced = Precomputed(context, engine, passes, len(pairs))

    def step(index: int) -> Numbers:
        micro_batches = referenced([context.accelerator.to_device(batch) for batch in batches.step(index)])
        # Pairs of the whole global batch: the loss is a mean over them, however they are split.
        total = distributed.all_sum(sum(batch["pair_mask"].sum() for batch in micro_batches).float())

        def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            losses, statistics = preferences(model, batch, settings)
            return losses / total.clamp_min(1), statistics

        rates = engine.rates
        numbers = averages(engine.step(micro_batches, loss).read())
        return numbers | rates | {"grad_norm": engine.grad_norm()}

    def measure(when: str) -> Numbers:
        found = evaluate(context, engine, held_out, referenced, when)
        context.recorder.log(engine.steps, {f"heldout_{key}": value for key, value in found.items()})
        return found

    before = measure_once(context, lambda: measure("before"))
    run_steps(
        context,
        total_steps=total_steps,
        step=step,
        engines={"model": engine},
        settings=settings,
        unit="pairs",
        shown=("loss", "accuracy", "margin"),
    )
    after = measure("after")
    leave(context, engine, tokenizer)
    return {"before": before, "after": after, "steps": total_steps, "parameters": engine.parameter_counts}


def preferences(model: nn.Module, batch: Batch, settings: DPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss, statistics), both summed over the real pairs of a batch that has its `reference`."""
    log_probs = reply_log_probs(model, batch)
    chosen, rejected = (log_probs - batch["reference"]).chunk(2)
    losses = preference_losses(
        chosen - rejected, loss=settings.loss, beta=settings.beta, label_smoothing=settings.label_smoothing
    )
    of_pairs = {
        "pairs": batch["pair_mask"],
        # A tie is half right: before the first step, all are.
        "accuracy": ((chosen - rejected).sign() + 1) / 2,
        "margin": settings.beta * (chosen - rejected),
        "drift": (chosen + rejected) / 2,
        "chosen_reward": settings.beta * chosen,
        "rejected_reward": settings.beta * rejected,
        "chosen_log_prob": log_probs.chunk(2)[0],
        "rejected_log_prob": log_probs.chunk(2)[1],
    }
    mask = batch["pair_mask"]
    return (losses * mask).sum(), {key: (value.detach() * mask).sum() for key, value in of_pairs.items()}


def averages(sums: Numbers) -> Numbers:
    """Means over pairs of what `preferences` summed; other numbers stay."""
    pairs = max(sums["pairs"], 1)
    return sums | {key: sums[key] / pairs for key in MEANS}


def evaluate(
    context: StageContext, engine: TrainingEngine, held_out: Batches, referenced: Precomputed | Beside, when: str
) -> Numbers:
    """The mean loss of the held-out pairs, and the means of `MEANS`."""

    def statistics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        (batch,) = referenced([batch])
        losses, found = preferences(model, batch, context.config.dpo)
        return found | {"loss": losses}

    sums = sum_over(context, engine, held_out, f"preferences {when}", statistics)
    return {"loss": sums["loss"] / max(sums["pairs"], 1)} | {key: averages(sums)[key] for key in MEANS}
