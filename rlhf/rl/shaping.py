"""From scores of completions to rewards of tokens: what is clipped, what drift from the reference costs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlhf.config import PPOConfig
from rlhf.engine.statistics import Numbers
from rlhf.engine.training import Batch
from rlhf.objectives.policy import shaped_rewards


class Shaping:
    """What a step's rewards depend on beside its rollout: the coefficient of the KL penalty. Saved in checkpoints."""

    def __init__(self, settings: PPOConfig) -> None:
        self._settings = settings
        self.kl_coef = settings.kl_coef

    def rewards(self, scored: Batch, mask: Tensor) -> Tensor:
        """[B, A] float32 rewards of the actions in `mask` [B, A], from what `PPO.score` gave."""
        return shaped_rewards(
            scored["log_probs"],
            scored["ref_log_probs"],
            scored["scores"],
            mask,
            0,
            kl_coef=self.kl_coef,
            score_clip=self._settings.score_clip,
        )

    def learn(self, numbers: Numbers) -> None:
        """The KL coefficient's own step, from a step's `kl`: the proportional controller of arXiv:1909.08593, 2.2."""
        settings = self._settings
        if settings.kl_target is not None:
            error = min(max(numbers["kl"] / settings.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * settings.batch_size / settings.kl_horizon

    def save_state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load_state(self, state: dict[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]
