"""Advantages of actions: how much better than expected each turned out to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from rlhf.config import PPOConfig

Estimate = Callable[[Tensor, Tensor, Tensor, "PPOConfig"], tuple[Tensor, Tensor]]
"""(rewards, values, mask, settings) -> (advantages, returns); all tensors [B, A], float32, 0 past a row's last action.

Completions of one prompt are neighbours: rows k * n to (k + 1) * n are of prompt k, n being
`settings.method.completions`. `values` are 0 where there is no critic. An entry of `rlhf.estimators.ESTIMATORS` names
the function.
"""


def gae(rewards: Tensor, values: Tensor, mask: Tensor, settings: PPOConfig) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation with a critic; see `advantages_and_returns`."""
    return advantages_and_returns(values, rewards, 0, gamma=settings.gamma, lam=settings.lam)


def advantages_and_returns(
    values: Tensor, rewards: Tensor, start: int, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16).

    Args:
        values, rewards: [B, T-1], 0 past each row's last action.
        start: column of the first action, P - 1.

    Returns:
        advantages and returns, [B, A] float32 each, detached.
    """
    values, rewards = values[:, start:].detach().float(), rewards[:, start:].detach().float()
    deltas = rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values
    # The recursion A_t = delta_t + gamma * lam * A_(t+1), written out: one product instead of a loop over tokens.
    columns = torch.arange(deltas.shape[1], device=deltas.device)
    distance = columns.unsqueeze(1) - columns
    decay = torch.full_like(distance, gamma * lam, dtype=torch.float32).pow(distance.clamp_min(0))
    advantages = deltas @ torch.where(distance >= 0, decay, 0.0)
    return advantages, advantages + values


def whiten(values: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """Scale masked values to mean 0 and deviation 1; masked-out positions become 0.

    The mean is taken off before the squares are summed: E[x^2] - E[x]^2 has no digits left where the mean is large.

    Args:
        values, mask: [B, A].
        all_sum: adds a tensor up over the parts of a batch that other ranks hold.
    """
    count, total = all_sum(torch.stack([mask.sum().float(), (values * mask).sum()]))
    centred = (values - total / count.clamp_min(1)) * mask
    variance = all_sum((centred**2).sum()) / count.clamp_min(1)
    return centred * torch.rsqrt(variance + 1e-8)
