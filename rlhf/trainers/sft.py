"""Stage 1, supervised fine-tuning: raise the likelihood of demonstrations."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor, nn

from rlhf.data.batches import collate_sft
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import Batch
from rlhf.losses.log_probs import masked
from rlhf.models.forward import completion_log_probs, model_inputs
from rlhf.models.lm_head import compute_log_probs
from rlhf.trainers.context import StageContext
from rlhf.trainers.model_factory import ModelFactory
from rlhf.trainers.supervised import SupervisedTrainer
from rlhf.trainers.trainer import EvalResult


class SFTTrainer(SupervisedTrainer):
    """A causal language model that learns demonstrations; evaluated by its perplexity."""

    unit = "tokens"
    displayed = ("loss",)

    def __init__(self, context: StageContext, models: ModelFactory, tokenizer: Any, data: StageData) -> None:
        collate = partial(
            collate_sft,
            pad_token_id=tokenizer.pad_token_id,
            policy=context.shapes,
            maximum=context.config.data.max_length,
            loss_on=context.config.sft.loss_on,
        )
        super().__init__(context, models.causal_lm, tokenizer, collate, data)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of target tokens."""
        return batch["loss_mask"][:, 1:].sum()

    def loss(self, model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        """Return a part of the mean negative log-likelihood per target token, and the tokens of real rows."""
        tokens = (batch["attention_mask"] * batch["loss_mask"].any(-1, keepdim=True)).sum()
        return negative_log_likelihood(model, batch) / total.clamp_min(1), {"tokens": tokens}

    def evaluate(self, when: str) -> EvalResult:
        """Return the perplexity: exp of the mean negative log-likelihood per target token of the held-out rows."""

        def statistics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return {"nll": negative_log_likelihood(model, batch), "targets": self.count(batch)}

        sums = self.sum_over_heldout(f"perplexity {when}", statistics)
        # exp(710) is beyond a float
        return EvalResult({"perplexity": math.exp(min(sums["nll"] / max(sums["targets"], 1), 700))})


def negative_log_likelihood(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over the target tokens of a batch (`loss_mask` [B, T] marks them): a scalar, in nats.

    If the batch names their places (`targets`), only the positions that predict them have logits.
    """
    ids, mask, targets = batch["input_ids"], batch["attention_mask"], batch.get("targets")
    if targets is None:
        log_probs = completion_log_probs(model, ids, mask, ids.shape[1] - 1).log_probs
        return -masked(log_probs, batch["loss_mask"][:, 1:]).sum()
    labels = ids.flatten().index_select(0, targets)
    return -compute_log_probs(model, model_inputs(model, ids, mask), labels, places=targets - 1).log_probs.sum()
