"""Advantages of a rollout's sequences, as each paper defines them, one sequence and one action after the other.

Every function takes the rewards of each action of each sequence, the sequences of one prompt beside each other, and
gives (advantages, returns) of each action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf.config.schema import PPOConfig

PerAction = list[list[float]]


def estimate(rewards: PerAction, config: PPOConfig) -> tuple[PerAction, PerAction]:
    """What the settings ask for, of an estimator without a critic."""
    size = config.completions_per_prompt
    if config.estimator == "rloo":
        return leave_one_out(rewards, size or 4), rewards_to_go(rewards, 1.0)
    if config.estimator == "grpo":
        return group_relative(rewards, size or 8, config.group_std), rewards_to_go(rewards, 1.0)
    assert config.estimator == "reinforce++"
    return rewards_to_go(rewards, config.gamma), rewards_to_go(rewards, config.gamma)


def leave_one_out(rewards: PerAction, size: int) -> PerAction:
    """RLOO (arXiv:2402.14740, section 3.1): R(y_i) - 1/(k - 1) sum over j != i of R(y_j), for every action of y_i."""
    advantages = []
    for number, row in enumerate(rewards):
        first = number - number % size
        others = [sum(rewards[other]) for other in range(first, first + size) if other != number]
        advantages.append([sum(row) - sum(others) / (size - 1)] * len(row))
    return advantages


def group_relative(rewards: PerAction, size: int, divided: bool) -> PerAction:
    """GRPO (arXiv:2402.03300, section 4.1.2): (r_i - mean(r)) / std(r); Dr. GRPO (arXiv:2503.20783): r_i - mean(r)."""
    advantages = []
    for number, row in enumerate(rewards):
        first = number - number % size
        group = [sum(rewards[other]) for other in range(first, first + size)]
        mean = sum(group) / size
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (size - 1))
        scale = deviation + 1e-4 if divided else 1.0
        advantages.append([(sum(row) - mean) / scale] * len(row))
    return advantages


def rewards_to_go(rewards: PerAction, gamma: float) -> PerAction:
    """REINFORCE++ (arXiv:2501.03262, section 3): sum over k >= t of gamma^(k - t) r_k."""
    return [
        [sum(gamma ** (later - action) * row[later] for later in range(action, len(row))) for action in range(len(row))]
        for row in rewards
    ]


def shares(lengths: Sequence[int], loss_mean: str, longest: int) -> list[float]:
    """How much each action of a sequence counts in the mean over a minibatch, for the sequences of these lengths."""
    if loss_mean == "token":
        return [1 / sum(lengths) for _ in lengths]
    if loss_mean == "sequence":
        return [1 / len(lengths) / length for length in lengths]
    return [1 / len(lengths) / longest for _ in lengths]
