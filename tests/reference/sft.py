"""Supervised fine-tuning: the mean negative log-likelihood of a global batch's target tokens, and one step down."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.adamw import AdamW
from tests.reference.network import Network

Row = tuple[list[int], list[int]]
"""Token ids of a prompt, and of the completion that is to be learned, its end-of-sequence token included."""


def step(network: Network, optimizer: AdamW, rows: Sequence[Row], *, loss_on: str = "completion") -> dict[str, float]:
    """One optimizer step on a global batch; returns what is recorded of it."""
    loss, rate = _mean_loss(network, rows, loss_on), optimizer.rate
    norm = optimizer.step(loss)
    tokens = float(sum(len(prompt) + len(completion) for prompt, completion in rows))
    return {"loss": loss.item(), "learning_rate": rate, "grad_norm": norm, "tokens": tokens}


def perplexity(network: Network, rows: Sequence[Row], *, loss_on: str = "completion") -> float:
    """exp of the mean negative log-likelihood per target token."""
    with torch.no_grad():
        return math.exp(_mean_loss(network, rows, loss_on))


def _mean_loss(network: Network, rows: Sequence[Row], loss_on: str) -> Tensor:
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for prompt, completion in rows:
        ids = prompt + completion
        logits = network.logits(ids)
        for position in range(len(prompt) if loss_on == "completion" else 1, len(ids)):
            total = total - torch.log_softmax(logits[position - 1], 0)[ids[position]]
            targets += 1
    return total / targets
