"""Sample tokens from logits on the device, without reading on the host.

One uniform number per token determines it (inverse of the cumulative distribution), so all randomness of a rollout is
drawn before its first step and a captured step contains no generator.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.config.schema import SamplingConfig

_CHUNK = 256
"""Tokens of a vocabulary that are summed first: about the square root of its size, so that both sums are short."""


def sample(logits: Tensor, uniform: Tensor, config: SamplingConfig) -> Tensor:
    """Sample one token per row: logits [B, V], uniform [B] in [0, 1) -> token ids [B]."""
    logits = logits.float()
    if config.temperature == 0:
        return logits.argmax(-1)
    if config.temperature != 1:
        logits = logits / config.temperature
    uniform = uniform.unsqueeze(-1)
    if config.top_k == 0 and config.top_p == 1:
        return _invert_in_chunks(logits.softmax(-1), uniform).squeeze(-1)
    count = min(config.top_k, logits.shape[-1]) if config.top_k else logits.shape[-1]
    logits, order = logits.topk(count, dim=-1)  # sorted
    probabilities = logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The smallest set that reaches top_p: tokens whose predecessors do not reach it. The first is always in the set.
    probabilities = torch.where(before < config.top_p, probabilities, 0.0)
    drawn, _ = _invert(probabilities, uniform * probabilities.sum(-1, keepdim=True))
    return order.gather(-1, drawn).squeeze(-1)


def _invert_in_chunks(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the result of `_invert`, [B, 1], for [B, V] that sum to 1: first the chunk, then the token in it.

    A single sum over the vocabulary takes twice as long as the softmax, and rounds at every token.
    """
    last = probabilities.shape[-1] - 1
    if missing := -probabilities.shape[-1] % _CHUNK:
        probabilities = pad(probabilities, (0, missing))
    chunks = probabilities.unflatten(-1, (-1, _CHUNK))
    chunk, rest = _invert(chunks.sum(-1), uniform)
    inside = chunks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, _CHUNK)).squeeze(1)
    token, _ = _invert(inside, rest)
    return (chunk * _CHUNK + token).clamp_max(last)


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index at which the running sum of `weights` exceeds `target`, and the target's excess over it.

    The index never has weight 0, however the sums are rounded; if weights are NaN it is any index.

    Args:
        weights: [B, N], not negative.
        target: [B, 1], from 0 to about their sum.

    Returns:
        Index [B, 1], and target minus the sum of the weights before the index, [B, 1].
    """
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, target, right=True).clamp_max(weights.shape[-1] - 1)
    before = sums.gather(-1, index) - weights.gather(-1, index)
    return index, (target - before).clamp_min(0)
