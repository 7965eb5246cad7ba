"""The pretraining loss of PPO-ptx: language modelling on raw text in the policy's updates.

Each update has some micro-batches of this text; their loss enters the same gradient and the same optimizer step as
the policy's (arXiv:2203.02155, equation 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.data import pretraining
from rlhf.engine.engine import Batch, Loss
from rlhf.models.forward import completion_log_probs
from rlhf.models.shape import TextLengths
from rlhf.trainers.context import StageContext


class PretrainingLoss:
    """This rank's rows of raw text for each update, and their loss.

    Attributes:
        texts: those of one update, over all ranks.
    """

    def __init__(self, context: StageContext, rows: Sequence[list[int]]) -> None:
        """Prepare the batches of `rows`, those of all ranks, which have equal lengths."""
        settings, length = context.config.ppo, len(rows[0])
        self.texts = TextLengths.of([length] * settings.pretraining_rows, settings.pretraining_rows * (length - 1))
        self._to_device = context.accelerator.to_device
        self._coefficient = settings.ptx_coef
        self._targets = self.texts.outputs
        # The first token of a row has no context and is no target.
        self.batches = context.batches(
            rows,
            _collate,
            batch_size=settings.pretraining_rows,
            micro_batch_size=settings.pretraining(context.world.size)[1],
            endless=True,
        )

    @classmethod
    def read(cls, context: StageContext, tokenizer: Any) -> PretrainingLoss | None:
        """Read the texts that the settings name; None if there is no such loss.

        Raises:
            DataError: they cannot be read, or are too few.
        """
        config = context.config
        if not config.ppo.ptx_coef:
            return None
        documents = pretraining.read_documents(config, show=context.world.is_main)
        rows = pretraining.pack_documents(config, documents, tokenizer)
        context.say(
            f"ppo: {len(rows):,} rows of {rows.length} tokens of raw text, of {len(documents):,} documents; "
            f"{config.ppo.pretraining_rows} in each update"
        )
        return cls(context, rows)

    def micro_batches(self, update: int) -> list[Batch]:
        """Return this rank's micro-batches for update `update` of the run: `input_ids` [B, L]."""
        return [self._to_device(batch) for batch in self.batches.step(update)]

    def add_to(self, loss: Loss) -> Loss:
        """Return the loss of micro-batches some of which are raw text (dictionaries); `loss` is that of the others."""

        def mixed(model: nn.Module, part: Any) -> tuple[Tensor, Batch]:
            return self._loss(model, part) if isinstance(part, dict) else loss(model, part)

        return mixed

    def _loss(self, model: nn.Module, part: Batch) -> tuple[Tensor, Batch]:
        """Return this part of the weighted mean of -log p over all tokens of the update but each row's first."""
        ids = part["input_ids"]
        log_probs = completion_log_probs(model, ids, torch.ones_like(ids), ids.shape[1] - 1).log_probs
        value = -log_probs.sum() / self._targets
        return self._coefficient * value, {"ptx_loss": value}


def _collate(rows: Sequence[list[int]], real: int) -> Batch:
    """Stack rows; endless batches have none that only fill them up."""
    return {"input_ids": torch.tensor(list(rows))}
