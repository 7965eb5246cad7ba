"""Stage 1, supervised fine-tuning: raise the likelihood of demonstrations.

Demonstrations flow in; a causal language model and its held-out perplexity, before and after, flow out.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor, nn

from rlhf.data.batches import Batches, collate_sft
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.engine.metric_sums import Metrics
from rlhf.losses.log_probs import masked
from rlhf.models.forward import completion_log_probs, model_inputs
from rlhf.models.lm_head import compute_log_probs
from rlhf.models.loading import ModelLoader
from rlhf.trainers.context import StageContext
from rlhf.trainers.loop import sum_over
from rlhf.trainers.supervised import Objective, Supervised


def negative_log_likelihood(model: nn.Module, batch: Batch) -> Tensor:
    """Summed over the target tokens of a batch (`loss_mask` [B, T] marks them): a scalar, in nats.

    Where the batch says which they are (`targets`), only the positions that foretell them have logits.
    """
    ids, mask, targets = batch["input_ids"], batch["attention_mask"], batch.get("targets")
    if targets is None:
        log_probs = completion_log_probs(model, ids, mask, ids.shape[1] - 1).log_probs
        return -masked(log_probs, batch["loss_mask"][:, 1:]).sum()
    labels = ids.flatten().index_select(0, targets)
    return -compute_log_probs(model, model_inputs(model, ids, mask), labels, places=targets - 1).log_probs.sum()


def run(context: StageContext, load: ModelLoader, tokenizer: Any, data: StageData) -> dict[str, Any]:
    """Train what `load` gives on `data.train`, save the model, and return the stage's summary."""
    collate = partial(
        collate_sft,
        pad_token_id=tokenizer.pad_token_id,
        policy=context.shapes,
        maximum=context.config.data.max_length,
        loss_on=context.config.sft.loss_on,
    )

    def loss(model: nn.Module, batch: Batch, total: Tensor) -> tuple[Tensor, Batch]:
        tokens = (batch["attention_mask"] * batch["loss_mask"].any(-1, keepdim=True)).sum()  # of real rows
        return negative_log_likelihood(model, batch) / total.clamp_min(1), {"tokens": tokens}

    objective = Objective(loss, count=_targets, evaluate=evaluate, unit="tokens", shown=("loss",))
    return Supervised(context, load, collate, data).run(objective, tokenizer)


def _targets(batch: Batch) -> Tensor:
    return batch["loss_mask"][:, 1:].sum()


def evaluate(context: StageContext, engine: TrainingEngine, held_out: Batches, when: str) -> Metrics:
    """Perplexity: exp of the mean negative log-likelihood per target token of the held-out rows."""

    def statistics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"nll": negative_log_likelihood(model, batch), "targets": _targets(batch)}

    sums = sum_over(context, engine, held_out, f"perplexity {when}", statistics)
    # exp(710) is beyond a float
    return {"perplexity": math.exp(min(sums["nll"] / max(sums["targets"], 1), 700))}
