"""The mathematics of the three stages: pure functions of tensors, float32 inside, no loops over rows.

B sequences, T tokens, A completion tokens. A prompt is padded left to P columns, so T = P + A and every
completion starts at column P. Position t of a [B, T-1] tensor is about the token at column t + 1; the
first completion token is therefore at `start = P - 1`. Masks are 1 on real completion tokens (an
end-of-sequence token is a real action), 0 elsewhere.

The definitions are those of DeepSpeed-Chat (arXiv:2308.01320), with explicit masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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


def shaped_rewards(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    scores: Tensor,
    action_mask: Tensor,
    start: int,
    *,
    kl_coef: float | Tensor = 0.1,
    score_clip: float = 5.0,
) -> Tensor:
    """Per-token rewards: a KL penalty everywhere, and the score on each row's last action.

    Args:
        log_probs, ref_log_probs: [B, T-1], of the policy that acted and of the reference.
        scores: [B], the reward model's; clipped to +-`score_clip`.
        action_mask: [B, T-1], 1 on completion tokens.
        start: column of the first action, P - 1.

    Returns:
        [B, T-1] float32: -kl_coef * (log_probs - ref_log_probs), plus the clipped score on the last real
        action; 0 before `start` and after the last action. A row without actions gets no reward.
    """
    mask = action_mask.float()
    columns = torch.arange(mask.shape[1], device=mask.device)
    mask = mask * (columns >= start)
    last = (columns * mask).argmax(-1, keepdim=True)
    is_last = (columns == last) * mask
    penalty = -kl_coef * (log_probs.float() - ref_log_probs.float())
    return masked(penalty, mask) + is_last * scores.float().clamp(-score_clip, score_clip).unsqueeze(-1)


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


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    total: Tensor | None = None,
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347, equation 7), as a loss.

    Args:
        log_probs, old_log_probs, advantages, mask: [B, A].
        total: real tokens of the whole global batch, where this is a part of it; default: the mask's sum.
    """
    ratio = torch.exp(masked(log_probs.float() - old_log_probs.float(), mask))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + clip)
    return masked_mean(torch.max(unclipped, clipped), mask, total)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    total: Tensor | None = None,
) -> Tensor:
    """Half the squared error of the values, each kept within +-`clip` of its old value. Shapes as `policy_loss`."""
    values, old_values = values.float(), old_values.float()
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * masked_mean(torch.max((values - returns) ** 2, (clipped - returns) ** 2), mask, total)


class PairwiseLoss(NamedTuple):
    """loss: scalar, the mean over pairs; chosen_scores, rejected_scores: [B], at each row's last real token."""

    loss: Tensor
    chosen_scores: Tensor
    rejected_scores: Tensor


def pairwise_reward_loss(
    token_rewards: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    pair_mask: Tensor | None = None,
    total: Tensor | None = None,
) -> PairwiseLoss:
    """Ranking loss on every token from where two replies part (arXiv:2308.01320, section 3.2; arXiv:2203.02155, eq. 1).

    Args:
        token_rewards, input_ids, attention_mask: [2B, T]; the first B rows are the chosen replies, the last
            B the rejected ones; row i and row B + i share a prompt; padded right.
        pair_mask: [B], 0 for pairs that only fill up the batch.
        total: pairs of the whole global batch, where this is a part of it; default: the real pairs here.

    Returns:
        The loss is the mean over pairs of the mean of -log sigmoid(chosen - rejected), from the first
        differing token to the last real token of the longer reply.
    """
    chosen, rejected = token_rewards.float().chunk(2)
    chosen_ids, rejected_ids = input_ids.chunk(2)
    chosen_mask, rejected_mask = attention_mask.bool().chunk(2)
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)

    either = chosen_mask | rejected_mask
    differs = ((chosen_ids != rejected_ids) | (chosen_mask != rejected_mask)) & either
    # Past the shorter reply's end its padding columns are compared, as in the source.
    span = (differs.int().cumsum(-1) > 0) & either
    per_token = -F.logsigmoid(chosen - rejected)
    per_pair = masked_row_mean(per_token, span)

    pair_mask = torch.ones_like(per_pair) if pair_mask is None else pair_mask.to(per_pair.dtype)
    return PairwiseLoss(
        masked_mean(per_pair, pair_mask, total),
        chosen.gather(-1, (columns * chosen_mask).argmax(-1, keepdim=True)).squeeze(-1),
        rejected.gather(-1, (columns * rejected_mask).argmax(-1, keepdim=True)).squeeze(-1),
    )


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row where `mask` is 1: [B, T] -> [B]; 0 for a row without any."""
    mask = mask.to(values.dtype)
    return (values * mask).sum(-1) / mask.sum(-1).clamp_min(1)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32: bf16 would round the quotient to 8 bits."""
    return logits.float() if temperature == 1 else logits.float() / temperature


def _chunk_rows(logits: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // logits.shape[-1])
