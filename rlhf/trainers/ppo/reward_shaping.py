"""From scores of completions to rewards of tokens: scale, clipping, the end that is missing, drift from the reference.

A score is scaled (`ppo.normalize_scores`), then clipped (`ppo.score_clip`), then `ppo.missing_eos_penalty` is taken off
where the completion has no end token. So the clip is in deviations where scores are scaled, the penalty too; and the
penalty tells apart two completions whose scores are clipped alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf.config.schema import PPOConfig
from rlhf.engine.engine import Batch
from rlhf.engine.metric_sums import Metrics
from rlhf.losses.ppo import earned_scores, shaped_rewards
from rlhf.trainers.ppo.metrics import Moments, MovingMean


class Shaping:
    """What a run keeps of its rewards from step to step; saved in checkpoints.

    The coefficient of the KL penalty, mean and deviation of the scores so far, and a moving mean of what is recorded as
    `reward`.
    """

    def __init__(self, settings: PPOConfig) -> None:
        self._settings = settings
        self.kl_coef = settings.kl_coef
        self._scores, self._reward = Moments(), MovingMean()

    def rewards(self, scored: Batch, mask: Tensor, ended: Tensor) -> Tensor:
        """Rewards of the actions of one rollout, the same however its rows are spread over ranks.

        Args:
            scored: what `PPO.score` gave.
            mask: [B, A], the actions; rows that only fill up the batch have none.
            ended: [B], 1 where the last action is an end token.

        Returns:
            [B, A] float32.
        """
        settings = self._settings
        scores = scored["scores"]
        if settings.normalize_scores != "none":
            seen = self._scores if settings.normalize_scores == "running" else Moments()
            scores = seen.scale(scores, mask.any(-1).float())
        earned = earned_scores(scores, ended, clip=settings.score_clip, missing_end=settings.missing_eos_penalty)
        return shaped_rewards(
            scored["log_probs"],
            scored["ref_log_probs"],
            earned,
            mask,
            0,
            kl_coef=self.kl_coef if settings.method.kl_in == "reward" else 0.0,
            kl_estimator=settings.method.kl_estimator,
        )

    def learn(self, numbers: Metrics) -> Metrics:
        """Go on from a step's `reward` and `kl`; returns what is recorded: the coefficient it had, and the moving mean.

        The coefficient moves by the proportional controller of arXiv:1909.08593, section 2.2.
        """
        settings, found = self._settings, {"kl_coef": self.kl_coef, "reward_ema": self._reward.add(numbers["reward"])}
        if settings.kl_target is not None:
            error = min(max(numbers["kl"] / settings.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * settings.batch_size / settings.kl_horizon
        return found

    def save_state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef, "scores": self._scores.state.tolist(), "reward_ema": self._reward.state}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `save_state`'s; what an earlier version did not save begins anew."""
        self.kl_coef = state["kl_coef"]
        if "scores" in state:
            self._scores.state = torch.tensor(state["scores"])
            self._reward.state = tuple(state["reward_ema"])
