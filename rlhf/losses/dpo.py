"""Losses of a policy on pairs of replies, the preferred one first, relative to a reference (arXiv:2305.18290)."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from rlhf.losses.log_probs import masked


def sequence_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Sum the log-probabilities of each reply's tokens, [R, A] where `mask` [R, A] is 1: [R], in nats.

    A sum for every loss: arXiv:2310.12036 also uses probabilities of whole replies, not a mean over tokens.
    """
    return masked(log_probs, mask).sum(-1)


def preference_losses(
    margins: Tensor, *, loss: Literal["sigmoid", "ipo", "robust"], beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """Return the loss of each pair, in the shape of `margins`.

    Args:
        margins: log (policy / reference) of the chosen reply minus that of the rejected one, in nats.
        loss: sigmoid: arXiv:2305.18290, equation 7. ipo: arXiv:2310.12036, equation 17, with `beta` as its tau. robust:
            arXiv:2403.00409, equation 12, unbiased if a share `label_smoothing` of the labels is flipped.
        beta: strength of the pull towards the reference.
        label_smoothing: below 0.5; with the sigmoid loss, the share of labels that the policy should doubt
            (conservative DPO).
    """
    if loss == "ipo":
        return (margins - 1 / (2 * beta)) ** 2
    as_labelled, flipped = -F.logsigmoid(beta * margins), -F.logsigmoid(-beta * margins)
    if loss == "robust":
        return ((1 - label_smoothing) * as_labelled - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * as_labelled + label_smoothing * flipped
