"""The ranking losses on pairs of replies (arXiv:2203.02155, equation 1; arXiv:2308.01320, section 3.2), and one step.

With a margin: arXiv:2307.09288, equation 2. With scores kept around 0: arXiv:2312.09244.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.config.schema import RewardConfig
from tests.reference.adamw import AdamW
from tests.reference.network import Network

Pair = tuple[list[int], list[int], list[int], float]
"""Token ids of a prompt, of the preferred and of the other reply; the pair's own margin."""


def pair_loss(network: Network, pair: Pair, pad: int, config: RewardConfig) -> tuple[Tensor, float, float]:
    """(loss, score of the chosen, score of the rejected reply) of one pair."""
    prompt, chosen, rejected, margin = pair
    rows = [prompt + chosen, prompt + rejected]
    length = max(len(row) for row in rows)
    # As in DeepSpeed-Chat, where one reply has ended and the other has not, the longer one's tokens are compared
    # with the padding after the shorter one: so that padding is run, too.
    padded = [row + [pad] * (length - len(row)) for row in rows]
    rewards = [network.scores(ids, real=len(row)) for ids, row in zip(padded, rows)]
    parting = next(column for column in range(length) if padded[0][column] != padded[1][column])
    better, worse = (of_row[len(row) - 1] for of_row, row in zip(rewards, rows))
    compared = [(rewards[0][column], rewards[1][column]) for column in range(parting, length)]
    if config.loss == "last":
        compared = [(better, worse)]
    losses = [
        -torch.log(torch.sigmoid(better_reward - worse_reward - margin - config.margin))
        for better_reward, worse_reward in compared
    ]
    loss = sum(losses) / len(losses) + config.center * (better + worse) ** 2
    return loss, better.item(), worse.item()


def step(
    network: Network, optimizer: AdamW, pairs: Sequence[Pair], *, pad: int, config: RewardConfig
) -> dict[str, float]:
    """One optimizer step on a global batch; returns what is recorded of it."""
    loss = sum(pair_loss(network, pair, pad, config)[0] for pair in pairs) / len(pairs)
    numbers = scores(network, pairs, pad=pad, config=config) | {"learning_rate": optimizer.rate}
    return numbers | {"grad_norm": optimizer.step(loss)}


def scores(network: Network, pairs: Sequence[Pair], *, pad: int, config: RewardConfig) -> dict[str, float]:
    """The loss, mean scores, and the part of the pairs whose chosen reply has the higher one."""
    with torch.no_grad():
        results = [pair_loss(network, pair, pad, config) for pair in pairs]
    return {
        "loss": sum(loss.item() for loss, *_ in results) / len(pairs),
        "accuracy": sum(chosen > rejected for _, chosen, rejected in results) / len(pairs),
        "chosen_score": sum(chosen for _, chosen, _ in results) / len(pairs),
        "rejected_score": sum(rejected for *_, rejected in results) / len(pairs),
        "margin": sum(chosen - rejected for _, chosen, rejected in results) / len(pairs),
    }
