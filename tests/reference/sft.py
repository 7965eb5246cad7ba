"""Supervised fine-tuning: the mean negative log-likelihood of all target tokens of a global batch, and one step down."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.reference.adamw import AdamW
from tests.reference.network import Network

Row = tuple[list[int], list[int]]
"""Token ids of a prompt, and of the completion that is to be learned, its end-of-sequence token included."""


def step(network: Network, optimizer: AdamW, rows: Sequence[Row], *, loss_on: str = "completion") -> dict[str, float]:
    """One optimizer step on a global batch; returns what is recorded of it."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for prompt, completion in rows:
        ids = prompt + completion
        logits = network.logits(ids)
        for position in range(len(prompt) if loss_on == "completion" else 1, len(ids)):
            total = total - torch.log_softmax(logits[position - 1], 0)[ids[position]]
            targets += 1
    loss, rate = total / targets, optimizer.rate
    norm = optimizer.step(loss)
    return {"loss": float(loss), "learning_rate": rate, "grad_norm": norm, "tokens": float(tokens(rows))}


def tokens(rows: Sequence[Row]) -> int:
    """Tokens that a batch holds."""
    return sum(len(prompt) + len(completion) for prompt, completion in rows)
