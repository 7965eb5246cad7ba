"""Loss of a reward model on pairs of replies, the preferred one first."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.losses.log_probs import masked_mean, masked_row_mean

Compared = Literal["token", "last"]
"""Scores that are compared: those of every token from the first difference of two replies, or of the last tokens."""


class PairwiseLoss(NamedTuple):
    """loss: the mean over pairs of `losses` [B]; chosen_scores, rejected_scores: [B], at the last real token."""

    loss: Tensor
    losses: Tensor
    chosen_scores: Tensor
    rejected_scores: Tensor


def pairwise_reward_loss(
    token_rewards: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    compared: Compared = "token",
    margins: Tensor | float = 0.0,
    center: float = 0.0,
    pair_mask: Tensor | None = None,
    total: Tensor | None = None,
) -> PairwiseLoss:
    """Return the ranking loss -log sigmoid(chosen - rejected - margin) of replies (arXiv:2307.09288, equation 2).

    The first B rows are the chosen replies, the last B the rejected ones; row i and row B + i share a prompt; padding
    is on the right.

    Args:
        token_rewards: [2B, T], the score at every token.
        input_ids: [2B, T].
        attention_mask: [2B, T].
        compared: token: scores of every token from the first differing one to the last real token of the longer reply
            (arXiv:2308.01320, section 3.2); each pair's loss is their mean. last: scores of each reply's last real
            token (arXiv:2203.02155, equation 1).
        margins: [B], or one for all.
        center: weight of (chosen + rejected)^2 at the last tokens, which keeps scores around 0 (arXiv:2312.09244,
            section 3: the loss determines them only up to a constant).
        pair_mask: [B], 0 for pairs that only fill up the batch.
        total: pairs of the global batch, if this is a part of it; default: the real pairs here.
    """
    chosen, rejected = token_rewards.float().chunk(2)
    chosen_ids, rejected_ids = input_ids.chunk(2)
    chosen_mask, rejected_mask = attention_mask.bool().chunk(2)
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    chosen_last = chosen.gather(-1, (columns * chosen_mask).argmax(-1, keepdim=True))  # [B, 1]
    rejected_last = rejected.gather(-1, (columns * rejected_mask).argmax(-1, keepdim=True))

    margins = torch.as_tensor(margins, device=chosen.device).float().reshape(-1, 1)
    if compared == "last":
        losses = -F.logsigmoid(chosen_last - rejected_last - margins).squeeze(-1)
    else:
        either = chosen_mask | rejected_mask
        differs = ((chosen_ids != rejected_ids) | (chosen_mask != rejected_mask)) & either
        # Past the shorter reply's end, its padding columns are compared, as in the source.
        span = (differs.int().cumsum(-1) > 0) & either
        losses = masked_row_mean(-F.logsigmoid(chosen - rejected - margins), span)
    chosen_last, rejected_last = chosen_last.squeeze(-1), rejected_last.squeeze(-1)
    if center:
        losses = losses + center * (chosen_last + rejected_last) ** 2
    pair_mask = torch.ones_like(losses) if pair_mask is None else pair_mask.to(losses.dtype)
    return PairwiseLoss(masked_mean(losses, pair_mask, total), losses, chosen_last, rejected_last)
