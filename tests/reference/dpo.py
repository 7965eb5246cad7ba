"""DPO and its kin (arXiv:2305.18290, equation 7; arXiv:2310.12036, equation 17; arXiv:2403.00409), and one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.adamw import AdamW
from tests.reference.network import Network

Pair = tuple[list[int], list[int], list[int]]
"""Token ids of a prompt, of the preferred and of the other reply."""
LogProbs = tuple[float, float]
"""Of the preferred and of the other reply of a pair."""


def log_prob(network: Network, prompt: list[int], reply: list[int]) -> Tensor:
    """Of the whole reply, token by token."""
    logits = network.logits(prompt + reply)
    log_probs = [logits[len(prompt) + place - 1].log_softmax(-1)[token] for place, token in enumerate(reply)]
    return sum(log_probs)


def before(network: Network, pairs: Sequence[Pair]) -> list[LogProbs]:
    """What the replies are worth to the policy that is not trained yet."""
    with torch.no_grad():
        return [(log_prob(network, p, y).item(), log_prob(network, p, z).item()) for p, y, z in pairs]


def pair_loss(settings: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Of log (policy / reference) of either reply."""
    beta, epsilon = settings.beta, settings.label_smoothing
    right = torch.sigmoid(beta * chosen - beta * rejected)  # P(chosen is preferred), by Bradley and Terry
    if settings.loss == "ipo":
        return (chosen - rejected - 0.5 / beta) ** 2
    if settings.loss == "robust":
        # What the loss of clean labels would be, from two equations: of labels as they are, and of flipped ones.
        inverse = torch.linalg.inv(torch.tensor([[1 - epsilon, epsilon], [epsilon, 1 - epsilon]]).double())
        return -(inverse[0, 0] * torch.log(right) + inverse[0, 1] * torch.log(1 - right))
    return -(1 - epsilon) * torch.log(right) - epsilon * torch.log(1 - right)


def step(
    network: Network, optimizer: AdamW, settings: Any, pairs: Sequence[Pair], reference: Sequence[LogProbs]
) -> dict[str, float]:
    """One optimizer step on a global batch; returns what is recorded of it."""
    losses = []
    for (prompt, chosen, rejected), (of_chosen, of_rejected) in zip(pairs, reference, strict=True):
        ratios = log_prob(network, prompt, chosen) - of_chosen, log_prob(network, prompt, rejected) - of_rejected
        losses.append(pair_loss(settings, *ratios))
    loss = sum(losses) / len(losses)
    numbers = {"learning_rate": optimizer.rate} | evaluation(network, settings, pairs, reference)
    return numbers | {"grad_norm": optimizer.step(loss)}


def evaluation(
    network: Network, settings: Any, pairs: Sequence[Pair], reference: Sequence[LogProbs]
) -> dict[str, float]:
    """Means over pairs."""
    now, beta = before(network, pairs), settings.beta
    chosen = [of_pair[0] - known[0] for of_pair, known in zip(now, reference, strict=True)]
    rejected = [of_pair[1] - known[1] for of_pair, known in zip(now, reference, strict=True)]
    margins = [first - second for first, second in zip(chosen, rejected, strict=True)]
    losses = [
        pair_loss(settings, torch.tensor(first).double(), torch.tensor(second).double()).item()
        for first, second in zip(chosen, rejected, strict=True)
    ]
    numbers = {
        "loss": losses,
        "accuracy": [0.5 if abs(margin) < 1e-12 else float(margin > 0) for margin in margins],
        "margin": [beta * margin for margin in margins],
        "drift": [(first + second) / 2 for first, second in zip(chosen, rejected, strict=True)],
        "chosen_reward": [beta * ratio for ratio in chosen],
        "rejected_reward": [beta * ratio for ratio in rejected],
        "chosen_log_prob": [of_pair[0] for of_pair in now],
        "rejected_log_prob": [of_pair[1] for of_pair in now],
    }
    return {name: math.fsum(values) / len(pairs) for name, values in numbers.items()}
