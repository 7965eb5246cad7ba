"""DPO: raise the preferred reply of each pair over the other, measured against the policy as it was (arXiv:2305.18290).

Preference pairs flow in; a causal language model flows out, with what it makes of held-out pairs, before and after:
its implicit reward of a reply is beta log (policy / reference), and needs no reward model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from rlhf.config.schema import DPOConfig
from rlhf.data.batches import Batches, collate_dpo
from rlhf.data.examples import Numbered
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.engine.metric_sums import Metrics
from rlhf.losses.dpo import preference_losses
from rlhf.models.loading import ModelLoader
from rlhf.trainers.context import StageContext
from rlhf.trainers.dpo_reference import Beside, Pass, Precomputed, reply_log_probs
from rlhf.trainers.loop import sum_over
from rlhf.trainers.supervised import Objective, Supervised

References = Precomputed | Beside
MEANS = ("accuracy", "margin", "drift", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob")
"""What is recorded of the pairs, of a step's and of those held out: means over them."""


def run(context: StageContext, load: ModelLoader, tokenizer: Any, data: StageData) -> dict[str, Any]:
    """Train what `load` gives on `data.train`, save the model, and return the stage's summary."""
    settings, limits = context.config.dpo, context.config.data
    collate = partial(
        collate_dpo,
        policy=context.shapes,
        prompt=limits.max_prompt_length,
        completion=limits.max_completion_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    train, heldout = Numbered(data.train), Numbered(data.heldout, len(data.train))
    stage = Supervised(context, load, collate, replace(data, train=train, heldout=heldout))
    referenced: References
    if settings.reference == "beside":
        reference = context.frozen("reference", load) if "reference" in context.placements else None
        referenced = Beside(context, stage.engine, reference)
    else:
        met = min(stage.total_steps, len(stage.batches))
        passes = [Pass(stage.batches, met), Pass(stage.held_out, len(stage.held_out))]
        referenced = Precomputed(context, stage.engine, passes, len(train) + len(heldout))

    def loss(model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        losses, statistics = preferences(model, batch, settings)
        return losses / total.clamp_min(1), statistics

    objective = Objective(
        loss,
        count=lambda batch: batch["pair_mask"].sum(),
        evaluate=partial(evaluate, referenced=referenced),
        unit="pairs",
        shown=("loss", "accuracy", "margin"),
        averages=averages,
        prepare=referenced,
    )
    return stage.run(objective, tokenizer)


def preferences(model: nn.Module, batch: Batch, settings: DPOConfig) -> tuple[Tensor, Batch]:
    """(the loss, statistics), both summed over the real pairs of a batch that has its `reference`."""
    log_probs, mask = reply_log_probs(model, batch), batch["pair_mask"]
    chosen, rejected = (log_probs - batch["reference"]).chunk(2)
    losses = preference_losses(
        chosen - rejected, loss=settings.loss, beta=settings.beta, label_smoothing=settings.label_smoothing
    )
    of_pairs = {
        "pairs": mask,
        # A tie is half right: before the first step, all are.
        "accuracy": ((chosen - rejected).sign() + 1) / 2,
        "margin": settings.beta * (chosen - rejected),
        "drift": (chosen + rejected) / 2,
        "chosen_reward": settings.beta * chosen,
        "rejected_reward": settings.beta * rejected,
        "chosen_log_prob": log_probs.chunk(2)[0],
        "rejected_log_prob": log_probs.chunk(2)[1],
    }
    return (losses * mask).sum(), {key: (value.detach() * mask).sum() for key, value in of_pairs.items()}


def averages(sums: Metrics) -> Metrics:
    """Means over pairs of what `preferences` summed; other numbers stay."""
    pairs = max(sums["pairs"], 1)
    return sums | {key: sums[key] / pairs for key in MEANS}


def evaluate(
    context: StageContext, engine: TrainingEngine, held_out: Batches, when: str, *, referenced: References
) -> Metrics:
    """The mean loss of the held-out pairs, and the means of `MEANS`."""

    def statistics(model: nn.Module, batch: Batch) -> Batch:
        (batch,) = referenced([batch])
        losses, found = preferences(model, batch, context.config.dpo)
        return found | {"loss": losses}

    sums = sum_over(context, engine, held_out, f"preferences {when}", statistics)
    return {"loss": sums["loss"] / max(sums["pairs"], 1)} | {key: averages(sums)[key] for key in MEANS}
