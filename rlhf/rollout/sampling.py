"""Drawing tokens from logits on the device, without a host read.

One uniform number per token decides it (inverse of the cumulative distribution), so all randomness of a
rollout is drawn before its first step and a captured step contains no generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.config import SamplingConfig


def sample(logits: Tensor, uniform: Tensor, config: SamplingConfig) -> Tensor:
    """logits [B, V], uniform [B] in [0, 1) -> token ids [B]."""
    if config.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / config.temperature
    if config.top_k == 0 and config.top_p == 1:
        return _invert(logits.softmax(-1), uniform)
    count = min(config.top_k, logits.shape[-1]) if config.top_k else logits.shape[-1]
    logits, order = logits.topk(count, dim=-1)  # sorted
    probabilities = logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The smallest set that reaches top_p: tokens whose predecessors do not reach it. The first is always in.
    probabilities = torch.where(before < config.top_p, probabilities, 0.0)
    return order.gather(-1, _invert(probabilities, uniform).unsqueeze(-1)).squeeze(-1)


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds `uniform` of the total; never one of probability 0."""
    cumulative = probabilities.cumsum(-1)
    # nextafter keeps the target below the total, whatever rounding does to the product.
    total = cumulative[:, -1:]
    target = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
