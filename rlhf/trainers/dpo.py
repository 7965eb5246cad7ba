"""DPO: raise the preferred reply of each pair over the other, measured against the policy as it was (arXiv:2305.18290).

The policy's implicit reward of a reply is beta log (policy / reference), which needs no reward model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from rlhf.config.schema import DPOConfig
from rlhf.data.batches import collate_dpo
from rlhf.data.examples import NumberedPairs
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import Batch
from rlhf.engine.metric_sums import Metrics
from rlhf.losses.dpo import preference_losses
from rlhf.trainers.context import StageContext
from rlhf.trainers.dpo_reference import BatchRange, LiveReference, PrecomputedReference, reply_log_probs
from rlhf.trainers.model_factory import ModelFactory
from rlhf.trainers.supervised import SupervisedTrainer
from rlhf.trainers.trainer import EvalResult

MEANS = ("accuracy", "margin", "drift", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob")
"""Metrics of pairs, in training and on held-out rows: means over them."""


class DPOTrainer(SupervisedTrainer):
    """A causal language model that learns preferences directly; evaluated by loss, accuracy and implicit rewards."""

    unit = "pairs"
    displayed = ("loss", "accuracy", "margin")

    def __init__(self, context: StageContext, models: ModelFactory, tokenizer: Any, data: StageData) -> None:
        limits = context.config.data
        collate = partial(
            collate_dpo,
            policy=context.shapes,
            prompt=limits.max_prompt_length,
            completion=limits.max_completion_length,
            pad_token_id=tokenizer.pad_token_id,
        )
        train, heldout = NumberedPairs(data.train), NumberedPairs(data.heldout, len(data.train))
        super().__init__(context, models.causal_lm, tokenizer, collate, replace(data, train=train, heldout=heldout))
        self.reference: LiveReference | PrecomputedReference
        if context.config.dpo.reference == "beside":
            model = context.frozen("reference", models.causal_lm) if "reference" in context.placements else None
            self.reference = LiveReference(context, self.engine, model)
        else:
            ranges = [
                BatchRange(self.batches, min(self.total_steps, len(self.batches))),
                BatchRange(self.held_out, len(self.held_out)),
            ]
            self.reference = PrecomputedReference(context, self.engine, ranges, len(train) + len(heldout))

    def count(self, batch: Batch) -> Tensor:
        """Return the number of real pairs."""
        return batch["pair_mask"].sum()

    def prepare(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add the reference's log-probabilities."""
        return self.reference.add_to(batches)

    def loss(self, model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a part of the mean loss over pairs, and the statistics of the pairs."""
        losses, sums = preference_sums(model, batch, self.context.config.dpo)
        return losses / total.clamp_min(1), sums

    def average(self, sums: Metrics) -> Metrics:
        """Return the means of `preference_sums`."""
        return preference_means(sums)

    def evaluate(self, when: str) -> EvalResult:
        """Return the mean loss of the held-out pairs, and the means of `MEANS`."""

        def statistics(model: nn.Module, batch: Batch) -> Batch:
            (batch,) = self.prepare([batch])
            losses, sums = preference_sums(model, batch, self.context.config.dpo)
            return sums | {"loss": losses}

        sums = self.sum_over_heldout(f"preferences {when}", statistics)
        means = preference_means(sums)
        return EvalResult({"loss": sums["loss"] / max(sums["pairs"], 1)} | {key: means[key] for key in MEANS})


def preference_sums(model: nn.Module, batch: Batch, settings: DPOConfig) -> tuple[Tensor, Batch]:
    """Return (loss, statistics), both summed over the real pairs of a batch that has its `reference`."""
    log_probs, mask = reply_log_probs(model, batch), batch["pair_mask"]
    chosen, rejected = (log_probs - batch["reference"]).chunk(2)
    losses = preference_losses(
        chosen - rejected, loss=settings.loss, beta=settings.beta, label_smoothing=settings.label_smoothing
    )
    of_pairs = {
        "pairs": mask,
        # A tie counts half: before the first step, all are ties.
        "accuracy": ((chosen - rejected).sign() + 1) / 2,
        "margin": settings.beta * (chosen - rejected),
        "drift": (chosen + rejected) / 2,
        "chosen_reward": settings.beta * chosen,
        "rejected_reward": settings.beta * rejected,
        "chosen_log_prob": log_probs.chunk(2)[0],
        "rejected_log_prob": log_probs.chunk(2)[1],
    }
    return (losses * mask).sum(), {key: (value.detach() * mask).sum() for key, value in of_pairs.items()}


def preference_means(sums: Metrics) -> Metrics:
    """Return the means over pairs of `preference_sums`; other numbers stay."""
    pairs = max(sums["pairs"], 1)
    return sums | {key: sums[key] / pairs for key in MEANS}
