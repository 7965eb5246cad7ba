"""Per-token rewards and the clipped losses of PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.config.estimators import KLEstimator
from rlhf.config.rollout import Correction
from rlhf.losses.log_probs import masked, masked_mean


def kl_estimate(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(p || q) from single draws of p (J. Schulman, http://joschu.net/blog/kl-approx.html).

    A good estimate need not have a good gradient (arXiv:2506.09477, arXiv:2510.01555). With p the policy and q the
    reference, and tokens drawn from the current policy (a rollout's first update; later ones lack the ratio):

    - k1 in the reward gives the gradient of KL(p || q) over whole completions if `gamma` and `lam` are 1: E[k1 * grad
      log p], with the effect of later tokens credited to earlier ones. The other half, E[grad k1], is 0; so k1 has no
      effect in the loss, and the settings reject it there.
    - k2 in the loss has the gradient k1 * grad log p, that of KL(p || q) of each token's distribution given the tokens
      before it; a token is not credited with its effect on later ones.
    - k3 in the loss gives that of KL(q || p) of each token's distribution: E[grad k3] = -E[(q / p) grad log p].
    - k2 and k3 in the reward lack E[grad k2] and E[grad k3], which are not 0: biased, for k3 by grad KL(q || p).

    Args:
        log_ratio: log p - log q of the drawn tokens, of any shape and floating type.
        estimator: k1: the log-ratio, unbiased, of either sign; k2: half its square, biased, with little variance if p
            is near q; k3: q / p - 1 + log(p / q), unbiased and never negative.

    Returns:
        Float32 of `log_ratio`'s shape.
    """
    log_ratio = log_ratio.float()
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return torch.expm1(-log_ratio) + log_ratio


def earned_scores(
    scores: Tensor, ended: Tensor, *, clip: float | None = None, missing_end: float | None = None
) -> Tensor:
    """Clip scores [B] to +-`clip`, then subtract `missing_end` where `ended` [B] is 0; None leaves either out.

    A reward model's score says little about an answer that is cut off (arXiv:2403.17031 replaces it by -1).
    """
    clipped = scores.float() if clip is None else scores.float().clamp(-clip, clip)
    return clipped if missing_end is None else clipped - missing_end * (1 - ended.float())


def shaped_rewards(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    scores: Tensor,
    action_mask: Tensor,
    start: int,
    *,
    kl_coef: float | Tensor = 0.1,
    kl_estimator: KLEstimator = "k1",
) -> Tensor:
    """Return per-token rewards: a KL penalty on every action, and the score on each row's last action.

    Args:
        log_probs: [B, T-1], of the policy that acted.
        ref_log_probs: [B, T-1], of the reference.
        scores: [B], from `earned_scores`.
        action_mask: [B, T-1], 1 on completion tokens.
        start: column of the first action, P - 1.
        kl_coef: weight of the penalty.
        kl_estimator: estimate of KL(policy || reference); see `kl_estimate`.

    Returns:
        [B, T-1] float32, 0 before `start` and after the last action. A row without actions gets no reward.
    """
    mask = action_mask.float()
    columns = torch.arange(mask.shape[1], device=mask.device)
    mask = mask * (columns >= start)
    last = (columns * mask).argmax(-1, keepdim=True)
    is_last = (columns == last) * mask
    penalty = -kl_coef * kl_estimate(log_probs.float() - ref_log_probs.float(), kl_estimator)
    return masked(penalty, mask) + is_last * scores.float().unsqueeze(-1)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    total: Tensor | None = None,
) -> Tensor:
    """Return PPO's clipped surrogate (arXiv:1707.06347, equation 7) as a loss.

    Args:
        log_probs: [B, A], of the policy that is trained.
        old_log_probs: [B, A], of the policy that acted.
        advantages: [B, A].
        mask: [B, A], or weights of `rlhf.losses.log_probs.token_weights`.
        clip: largest change of the ratio that is rewarded.
        total: real tokens of the global batch, if this is a part of it; default: the sum of the mask.
    """
    ratio = torch.exp(masked(log_probs.float() - old_log_probs.float(), mask))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + clip)
    return masked_mean(torch.max(unclipped, clipped), mask, total)


def importance_weights(
    log_probs: Tensor, drawn_log_probs: Tensor, mask: Tensor, correction: Correction, limit: float
) -> Tensor:
    """Return weights [B, A] of tokens that another policy has drawn, 0 where `mask` is 0; they have no gradient.

    With r = p / q of the trained policy p and the drawing policy q, and the objective's expectation under q:

    - tis: min(r, limit), truncated importance sampling (Ionides, "Truncated importance sampling", 2008; of tokens:
      arXiv:1802.01561, equation 1).
    - mis: r if 1 / limit <= r <= limit, else 0, masked importance sampling.

    Args:
        log_probs: [B, A], log p.
        drawn_log_probs: [B, A], log q.
        mask: [B, A], 1 on the tokens drawn.
        correction: tis or mis.
        limit: above 1.
    """
    ratio = torch.exp(masked(log_probs.float() - drawn_log_probs.float(), mask))
    if correction == "tis":
        weights = ratio.clamp_max(limit)
    else:
        weights = torch.where((ratio >= 1 / limit) & (ratio <= limit), ratio, 0.0)
    return masked(weights, mask).detach()


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    total: Tensor | None = None,
) -> Tensor:
    """Return half the squared error of the values, each clipped to +-`clip` of its old value; see `policy_loss`."""
    values, old_values = values.float(), old_values.float()
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * masked_mean(torch.max((values - returns) ** 2, (clipped - returns) ** 2), mask, total)


def value_is_clipped(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return True where `value_loss` uses the error of the clipped value, which has no gradient: [B, A]."""
    values, old_values = values.float(), old_values.float()
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return (clipped - returns) ** 2 > (values - returns) ** 2
