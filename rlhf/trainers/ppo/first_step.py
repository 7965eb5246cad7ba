"""Checks of PPO's first step: its rewards are those of their rows, and its updates go where the advantages point."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlhf.engine import distributed
from rlhf.engine.cpu_offload import on_device
from rlhf.engine.engine import Metrics
from rlhf.losses.log_probs import masked
from rlhf.models.forward import LogProbs, sequence_scores
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.experience import Experience, join_rows

_FIRST_ORDER = 0.05  # nats: root mean square of the change of a token's log-probability


@torch.no_grad()
def rescore_rows(context: StageContext, reward: nn.Module | None, experience: Experience, count: int) -> Metrics:
    """Score the rollout's first `count` rows again, in their order and without cutting columns; every rank calls it.

    Returns:
        score_gap: the mean difference to the rewards, relative to their root mean square if that is above 1. Nothing if
        the reward is not that of the reward model alone.
    """
    settings = context.config.ppo
    if reward is None or settings.reward_functions:
        return {}
    rows = slice(0, count)
    ids, mask, rewards = experience.input_ids[rows], experience.attention_mask[rows], experience.reward[rows]
    context.accelerator.step_boundary("first-step/rows")  # so that the model's graph is that of scoring
    with on_device(reward), context.precision.autocast():
        scores = sequence_scores(reward, ids, mask)
        context.accelerator.step_boundary("first-step/reward")
    real = experience.action_mask[rows].any(1)
    gaps, squares = masked((settings.reward_weight * scores - rewards).abs(), real), masked(rewards**2, real)
    gap, square, number = distributed.all_sum(torch.stack([gaps.sum(), squares.sum(), real.sum()])).tolist()
    return {"score_gap": gap / max(number, 1) / max((square / max(number, 1)) ** 0.5, 1.0)}


@torch.no_grad()
def measure_direction(
    context: StageContext, experience: Experience, score: Callable[[Tensor, Tensor, int], LogProbs]
) -> Metrics:
    """Score a rollout again, after its updates, with `score` (ids, mask, completion length); every rank calls it.

    Returns:
        direction: the correlation, without subtracting means, of tokens' advantages and of the change of their
        log-probabilities. To first order the loss of arXiv:1707.06347 makes it positive. Nothing in 16 bits, whose
        rounding changes all tokens alike, if the loss has other parts, or if changes are 0 or beyond first order.
    """
    settings, length = context.config.ppo, experience.completion_length
    if context.precision.name != "fp32" or settings.entropy_coef or settings.ptx_coef:
        return {}
    now: list[Tensor] = []
    for cut in experience.micro_batches:
        ids, mask = (cut.select(part, length) for part in (experience.input_ids, experience.attention_mask))
        now.append(score(ids, mask, cut.completion).log_probs)
    change = masked(join_rows(experience.micro_batches, now, length) - experience.log_probs, experience.action_mask)
    advantages = experience.advantages
    sums = [(advantages * change).sum(), (advantages**2).sum(), (change**2).sum(), experience.action_mask.sum()]
    product, advantage, drift, tokens = distributed.all_sum(torch.stack(sums)).tolist()
    if not advantage or not 0 < drift < _FIRST_ORDER**2 * tokens:
        return {}
    return {"direction": product / (advantage * drift) ** 0.5}
