"""The ranking loss on pairs of replies (arXiv:2203.02155, equation 1; arXiv:2308.01320, section 3.2), and one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.adamw import AdamW
from tests.reference.network import Network

Pair = tuple[list[int], list[int], list[int]]
"""Token ids of a prompt, of the preferred and of the other reply."""


def pair_loss(network: Network, pair: Pair, pad: int) -> tuple[Tensor, float, float]:
    """(loss, score of the chosen, score of the rejected reply) of one pair."""
    prompt, chosen, rejected = pair
    rows = [prompt + chosen, prompt + rejected]
    length = max(len(row) for row in rows)
    # As in DeepSpeed-Chat, where one reply has ended and the other has not, the longer one's tokens are compared
    # with the padding after the shorter one: so that padding is run, too.
    padded = [row + [pad] * (length - len(row)) for row in rows]
    rewards = [network.scores(ids, real=len(row)) for ids, row in zip(padded, rows)]
    parting = next(column for column in range(length) if padded[0][column] != padded[1][column])
    losses = [-torch.log(torch.sigmoid(rewards[0][column] - rewards[1][column])) for column in range(parting, length)]
    scores = [of_row[len(row) - 1].item() for of_row, row in zip(rewards, rows)]
    return sum(losses) / len(losses), scores[0], scores[1]


def step(network: Network, optimizer: AdamW, pairs: Sequence[Pair], *, pad: int) -> dict[str, float]:
    """One optimizer step on a global batch; returns what is recorded of it."""
    loss = sum(pair_loss(network, pair, pad)[0] for pair in pairs) / len(pairs)
    numbers = scores(network, pairs, pad=pad) | {"loss": loss.item(), "learning_rate": optimizer.rate}
    return numbers | {"grad_norm": optimizer.step(loss)}


def scores(network: Network, pairs: Sequence[Pair], *, pad: int) -> dict[str, float]:
    """Mean scores, and the part of the pairs whose chosen reply has the higher one."""
    with torch.no_grad():
        found = [pair_loss(network, pair, pad)[1:] for pair in pairs]
    return {
        "accuracy": sum(chosen > rejected for chosen, rejected in found) / len(pairs),
        "chosen_score": sum(chosen for chosen, _ in found) / len(pairs),
        "rejected_score": sum(rejected for _, rejected in found) / len(pairs),
    }
