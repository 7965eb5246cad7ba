"""Losses over pairs of replies, the preferred one first."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.objectives.tokens import masked_mean, masked_row_mean


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
