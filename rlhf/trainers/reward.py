"""Stage 2, the reward model: give the preferred reply of each pair the higher score.

Preference pairs flow in; a model with a scalar head, its accuracy and its mean scores on held-out pairs,
before and after, flow out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from rlhf.config.schema import RewardConfig
from rlhf.data.batches import Batches, collate_reward
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.engine.metric_sums import Metrics
from rlhf.losses.reward_model import PairwiseLoss, pairwise_reward_loss
from rlhf.models.loading import ModelLoader
from rlhf.models.scalar_head import describe_loading
from rlhf.trainers.context import StageContext
from rlhf.trainers.loop import sum_over
from rlhf.trainers.supervised import Objective, Supervised


def run(context: StageContext, load: ModelLoader, tokenizer: Any, data: StageData) -> dict[str, Any]:
    """Train the sequence-classification model that `load` gives, save it, and return the stage's summary."""
    collate = partial(
        collate_reward,
        pad_token_id=tokenizer.pad_token_id,
        policy=context.shapes,
        maximum=context.config.data.max_length,
    )

    def loss(model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        result = pair_loss(model, batch, context.config.reward, total)
        return result.loss, pair_statistics(result, batch)

    objective = Objective(
        loss,
        count=lambda batch: batch["pair_mask"].sum(),
        evaluate=evaluate,
        unit="pairs",
        shown=("loss", "accuracy"),
        averages=averages,
    )
    stage = Supervised(context, load, collate, data)
    summary = stage.run(objective, tokenizer)
    if line := describe_loading(stage.engine.module.model, context.directory.model):
        context.say(f"note: {line}")
    return summary


def pair_loss(model: nn.Module, batch: Batch, settings: RewardConfig, total: Tensor | None = None) -> PairwiseLoss:
    """The pairwise loss of one micro-batch; `total` is the number of pairs of the global batch."""
    scores = model(batch["input_ids"], batch["attention_mask"])
    return pairwise_reward_loss(
        scores,
        batch["input_ids"],
        batch["attention_mask"],
        compared=settings.loss,
        margins=batch["margins"] + settings.margin,
        center=settings.center,
        pair_mask=batch["pair_mask"],
        total=total,
    )


def pair_statistics(result: PairwiseLoss, batch: Batch) -> dict[str, Tensor]:
    """Sums over the real pairs of a micro-batch; `averages` divides them."""
    mask = batch["pair_mask"]
    return {
        "pairs": mask.sum(),
        "accuracy": ((result.chosen_scores > result.rejected_scores) * mask).sum(),
        "chosen_score": (result.chosen_scores * mask).sum(),
        "rejected_score": (result.rejected_scores * mask).sum(),
    }


def averages(sums: Metrics) -> Metrics:
    """Means over pairs of what `pair_statistics` summed, and their margin; other numbers stay."""
    pairs = max(sums["pairs"], 1)
    means = {key: sums[key] / pairs for key in ("accuracy", "chosen_score", "rejected_score")}
    return sums | means | {"margin": means["chosen_score"] - means["rejected_score"]}


def evaluate(context: StageContext, engine: TrainingEngine, held_out: Batches, when: str) -> Metrics:
    """Loss, accuracy and mean scores on the held-out pairs."""

    def statistics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        result = pair_loss(model, batch, context.config.reward)
        return pair_statistics(result, batch) | {"loss": (result.losses * batch["pair_mask"]).sum()}

    sums = sum_over(context, engine, held_out, f"accuracy {when}", statistics)
    numbers = averages(sums) | {"loss": sums["loss"] / max(sums["pairs"], 1)}
    return {key: numbers[key] for key in ("accuracy", "chosen_score", "rejected_score", "margin", "loss")}
