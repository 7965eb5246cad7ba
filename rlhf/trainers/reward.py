"""Stage 2, the reward model: give the preferred reply of each pair the higher score."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from rlhf.config.schema import RewardConfig
from rlhf.data.batches import collate_reward
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import Batch
from rlhf.engine.metric_sums import Metrics
from rlhf.losses.reward_model import PairwiseLoss, pairwise_reward_loss
from rlhf.models.scalar_head import describe_loading
from rlhf.trainers.context import StageContext
from rlhf.trainers.model_factory import ModelFactory
from rlhf.trainers.supervised import SupervisedTrainer
from rlhf.trainers.trainer import EvalResult


class RewardTrainer(SupervisedTrainer):
    """A model with a scalar head that learns preferences; evaluated by its accuracy and its mean scores."""

    unit = "pairs"
    displayed = ("loss", "accuracy")

    def __init__(self, context: StageContext, models: ModelFactory, tokenizer: Any, data: StageData) -> None:
        collate = partial(
            collate_reward,
            pad_token_id=tokenizer.pad_token_id,
            policy=context.shapes,
            maximum=context.config.data.max_length,
        )
        super().__init__(context, models.scalar_head, tokenizer, collate, data)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of real pairs."""
        return batch["pair_mask"].sum()

    def loss(self, model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a part of the mean pairwise loss, and the statistics of the pairs."""
        result = pair_loss(model, batch, self.context.config.reward, total)
        return result.loss, pair_sums(result, batch)

    def average(self, sums: Metrics) -> Metrics:
        """Return the means of `pair_sums`, and the margin."""
        return pair_means(sums)

    def evaluate(self, when: str) -> EvalResult:
        """Return loss, accuracy and mean scores on the held-out pairs."""

        def statistics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            result = pair_loss(model, batch, self.context.config.reward)
            return pair_sums(result, batch) | {"loss": (result.losses * batch["pair_mask"]).sum()}

        sums = self.sum_over_heldout(f"accuracy {when}", statistics)
        numbers = pair_means(sums) | {"loss": sums["loss"] / max(sums["pairs"], 1)}
        return EvalResult(
            {key: numbers[key] for key in ("accuracy", "chosen_score", "rejected_score", "margin", "loss")}
        )

    def summarize(self) -> dict[str, Any]:
        """Log what was saved, and whether plain transformers can load it; return the summary's entries."""
        summary = super().summarize()
        if line := describe_loading(self.engine.module.model, self.context.directory.model):
            self.context.say(f"note: {line}")
        return summary


def pair_loss(model: nn.Module, batch: Batch, settings: RewardConfig, total: Tensor | None = None) -> PairwiseLoss:
    """Return the pairwise loss of one micro-batch; `total` is the number of pairs of the global batch."""
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


def pair_sums(result: PairwiseLoss, batch: Batch) -> dict[str, Tensor]:
    """Return sums over the real pairs of a micro-batch, for `pair_means` to divide."""
    mask = batch["pair_mask"]
    return {
        "pairs": mask.sum(),
        "accuracy": ((result.chosen_scores > result.rejected_scores) * mask).sum(),
        "chosen_score": (result.chosen_scores * mask).sum(),
        "rejected_score": (result.rejected_scores * mask).sum(),
    }


def pair_means(sums: Metrics) -> Metrics:
    """Return the means over pairs of `pair_sums`, and their margin; other numbers stay."""
    pairs = max(sums["pairs"], 1)
    means = {key: sums[key] / pairs for key in ("accuracy", "chosen_score", "rejected_score")}
    return sums | means | {"margin": means["chosen_score"] - means["rejected_score"]}
