"""Advantage estimators: how much better than expected each action was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from rlhf.config.schema import PPOConfig

Estimate = Callable[[Tensor, Tensor, Tensor, "PPOConfig"], tuple[Tensor, Tensor]]
"""(rewards, values, mask, settings) -> (advantages, returns); all tensors [B, A], float32, 0 past a row's last action.

Completions of one prompt are neighbours: rows k * n to (k + 1) * n belong to prompt k, n being
`settings.method.group_size`. `values` are 0 without a critic. A critic learns the returns; without one they are the sum
of the rewards from each action on. Columns after the last action may hold anything. An entry of
`rlhf.config.estimators.ESTIMATORS` names the function.
"""

_LEAST_STD = 1e-4  # added, so that rounding differences between rewards are not scaled to standard deviations


def gae(rewards: Tensor, values: Tensor, mask: Tensor, settings: PPOConfig) -> tuple[Tensor, Tensor]:
    """Return the advantages of generalized advantage estimation (arXiv:1506.02438, equation 16).

    `settings.gamma` discounts later rewards. `settings.lam` weighs later errors of the values: 1 uses rewards only, 0
    the next value only.
    """
    values, rewards = values.detach().float(), rewards.detach().float()
    deltas = rewards + settings.gamma * F.pad(values[:, 1:], (0, 1)) - values
    advantages = _to_go(deltas, settings.gamma * settings.lam)
    return advantages, advantages + values


def rloo(rewards: Tensor, values: Tensor, mask: Tensor, settings: PPOConfig) -> tuple[Tensor, Tensor]:
    """Return the advantages of REINFORCE leave-one-out (arXiv:2402.14740, section 3.1), equal for all actions of a row.

    An advantage is the completion's reward, the sum over its tokens with the KL penalty, minus the mean reward of the
    prompt's other completions. With S the sum over n completions: R - (S - R) / (n - 1) = n / (n - 1) * (R - S / n).
    """
    groups = _groups(rewards, settings)
    size = groups.shape[1]
    advantages = (groups - groups.mean(1, keepdim=True)) * (size / (size - 1))
    return advantages.view(-1, 1) * mask, _to_go(rewards, 1.0)


def grpo(rewards: Tensor, values: Tensor, mask: Tensor, settings: PPOConfig) -> tuple[Tensor, Tensor]:
    """Return group-relative advantages under outcome supervision (arXiv:2402.03300, section 4.1.2).

    An advantage is the completion's reward minus the mean of the prompt's completions, divided by their sample standard
    deviation unless `settings.group_std` is false (Dr. GRPO, arXiv:2503.20783, section 3.2). Completions with equal
    rewards have no advantage.
    """
    groups = _groups(rewards, settings)
    advantages = groups - groups.mean(1, keepdim=True)
    if settings.group_std:
        advantages = advantages / (groups.std(1, keepdim=True) + _LEAST_STD)
    return advantages.view(-1, 1) * mask, _to_go(rewards, 1.0)


def reinforce_plus_plus(rewards: Tensor, values: Tensor, mask: Tensor, settings: PPOConfig) -> tuple[Tensor, Tensor]:
    """Return the advantages of REINFORCE++ (arXiv:2501.03262, section 3): the discounted rewards from each action on.

    `whiten` normalizes them over the batch afterwards.
    """
    returns = _to_go(rewards, settings.gamma)
    return returns * mask, returns


def _groups(rewards: Tensor, settings: PPOConfig) -> Tensor:
    """Sum rewards [B, A] over the tokens of each completion: [B / n, n] float32, one row for each prompt."""
    return rewards.detach().float().sum(1).view(-1, settings.method.group_size)


def _to_go(rewards: Tensor, decay: float) -> Tensor:
    """Return G_t = r_t + decay * G_(t+1), computed as one matrix product: [B, A] -> [B, A] float32."""
    rewards = rewards.detach().float()
    columns = torch.arange(rewards.shape[1], device=rewards.device)
    distance = columns.unsqueeze(1) - columns
    powers = torch.full_like(distance, decay, dtype=torch.float32).pow(distance.clamp_min(0))
    return rewards @ torch.where(distance >= 0, powers, 0.0)


def whiten(values: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """Scale masked values to mean 0 and standard deviation 1; masked-out positions become 0.

    The mean is subtracted before the squares are summed: if it is large, E[x^2] - E[x]^2 loses all precision.

    Args:
        values: [B, A].
        mask: [B, A].
        all_sum: sums a tensor over the ranks that share the batch.
    """
    count, total = all_sum(torch.stack([mask.sum().float(), (values * mask).sum()]))
    centred = (values - total / count.clamp_min(1)) * mask
    variance: Tensor = all_sum((centred**2).sum()) / count.clamp_min(1)
    whitened: Tensor = centred * torch.rsqrt(variance + 1e-8)
    return whitened
