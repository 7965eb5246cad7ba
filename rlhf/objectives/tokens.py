"""Log-probabilities and entropies of tokens, and means over those that count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf.estimators import LossMean

_CHUNK_ELEMENTS = 1 << 22  # elements of a float32 working copy of logits: 16 MiB


class _TokenLogProbs(torch.autograd.Function):
    """log softmax(logits / temperature)[label], a few rows at a time: no float32 copy of all logits exists."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        normalizers = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        for rows, out in zip(logits.split(_chunk_rows(logits)), normalizers.split(_chunk_rows(logits))):
            torch.logsumexp(_tempered(rows, temperature), dim=-1, out=out)
        ctx.save_for_backward(logits, labels, normalizers)
        ctx.temperature = temperature
        return _tempered(logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1), temperature) - normalizers

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, normalizers = ctx.saved_tensors
        result = torch.empty_like(logits)
        size = _chunk_rows(logits)
        for rows, label, normalizer, g, out in zip(
            logits.split(size), labels.split(size), normalizers.split(size), grad.split(size), result.split(size)
        ):
            softmax = (_tempered(rows, ctx.temperature) - normalizer.unsqueeze(-1)).exp_()
            g = g.unsqueeze(-1) / ctx.temperature
            out.copy_(softmax.mul_(-g).scatter_add_(-1, label.unsqueeze(-1), g))
        return result, None, None


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label under softmax(logits / temperature).

    Args:
        logits: [B, T, V], of any floating type.
        labels: [B, T], token ids.
        temperature: above 0.

    Returns:
        [B, T] float32. Neither the forward nor the backward pass makes a [B, T, V] float32 copy.
    """
    flat = _TokenLogProbs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), temperature)
    return flat.view(labels.shape)


@torch.no_grad()
def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy, in nats, of softmax(logits / temperature): [B, T, V] -> [B, T] float32; not differentiable."""
    flat = logits.reshape(-1, logits.shape[-1])
    result = torch.empty(flat.shape[0], dtype=torch.float32, device=logits.device)
    for rows, out in zip(flat.split(_chunk_rows(flat)), result.split(_chunk_rows(flat))):
        values = _tempered(rows, temperature)
        normalizer = values.logsumexp(-1, keepdim=True)
        probabilities = (values - normalizer).exp_()
        # H = log Z - E[logit]; a logit of -inf has probability 0 and adds nothing.
        out.copy_(normalizer.squeeze(-1) - (probabilities * values.clamp_min(torch.finfo(values.dtype).min)).sum(-1))
    return result.view(logits.shape[:-1])


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is 1, else 0. A product would not do: log-probabilities of padding may be infinite."""
    return torch.where(mask > 0, values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor, total: Tensor | None = None) -> Tensor:
    """Sum of `values` where `mask` is 1, over `total` (by default the mask's own sum, at least 1)."""
    total = mask.sum() if total is None else total
    return (values * mask).sum() / total.clamp_min(1)


def token_weights(mask: Tensor, loss_mean: LossMean, *, tokens: Tensor, sequences: Tensor, longest: int) -> Tensor:
    """What takes the place of `mask` in `masked_mean(..., total=tokens)` where not every token counts the same.

    Args:
        mask: [B, A], a part of a batch.
        loss_mean: token: a mean over tokens; sequence: over sequences, of each one's mean (arXiv:2402.03300, equation
            3); constant: over sequences, of each one's sum divided by `longest` (arXiv:2503.20783, section 3.2).
        tokens, sequences: those of the whole global batch.

    Returns:
        [B, A], 0 where the mask is.
    """
    if loss_mean == "token":
        return mask
    length = mask.sum(1, keepdim=True).clamp_min(1) if loss_mean == "sequence" else longest
    return mask * (tokens / sequences / length)


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row where `mask` is 1: [B, T] -> [B]; 0 for a row without any."""
    mask = mask.to(values.dtype)
    return (values * mask).sum(-1) / mask.sum(-1).clamp_min(1)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32: bf16 would round the quotient to 8 bits."""
    return logits.float() if temperature == 1 else logits.float() / temperature


def _chunk_rows(logits: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // logits.shape[-1])
