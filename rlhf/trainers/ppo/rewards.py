"""Rewards of a rollout's tokens: scores by model and functions, scaling, clipping, the KL penalty.

A score is scaled (`ppo.normalize_scores`), then clipped (`PPOConfig.score_limit`), then `ppo.missing_eos_penalty` is
subtracted if the completion has no end token. So clip and penalty are in standard deviations if scores are scaled, and
the penalty still distinguishes completions whose scores are clipped to the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.config.schema import PPOConfig
from rlhf.data.batches import Batch, completion_ids, completion_texts
from rlhf.data.examples import Prompt
from rlhf.engine import distributed
from rlhf.engine.engine import Metrics
from rlhf.errors import RewardError
from rlhf.losses.ppo import earned_scores, shaped_rewards
from rlhf.rewards.process import RewardProcess, Sample
from rlhf.trainers.ppo.experience import Rollout, Scores

RewardFunction = Callable[[Rollout, Tensor | None, Sequence[Prompt]], tuple[Tensor, dict[str, Tensor]]]
"""(rollout, the reward model's scores [B] or None, examples) -> (scores [B], their parts by name, [B] each).

The examples are those of the first rows; the other rows only fill up the batch."""

Functions = Callable[[Sequence[Sample]], Sequence[list[float]]]
"""Samples -> for each function of the settings, the reward of each sample."""

_MODEL = "reward_model"
_FUNCTION = "reward/"


class WeightedRewards:
    """The `RewardFunction` of the settings: the reward model's score and those of the user's functions, weighted.

    It starts the process in which the functions run.

    Attributes:
        functions: calls them; None if there are none.

    Raises:
        RewardError: a function cannot be imported or called.
    """

    def __init__(self, settings: PPOConfig, tokenizer: Any) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        functions = settings.reward_functions
        self.functions: Functions | None = RewardProcess(functions, settings.reward_timeout) if functions else None

    def __call__(
        self, rollout: Rollout, model_scores: Tensor | None, examples: Sequence[Prompt]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return reward_weight * model + sum of weight * function [B], and with functions each unweighted part.

        Raises:
            RewardError: a function failed with a completion, or `examples` lacks some.
        """
        weight, mask = self._settings.reward_weight, rollout.action_mask
        total = torch.zeros(len(mask), device=mask.device) if model_scores is None else weight * model_scores
        if self.functions is None:
            return total, {}
        parts = {} if model_scores is None else {_MODEL: model_scores}
        texts = completion_texts(self._tokenizer, completion_ids(rollout.input_ids, rollout.action_mask))
        samples = [
            Sample(example.row.text, text, example.row.as_dict())
            for example, text in zip(examples, texts, strict=False)
        ]
        assert len(samples) == len(examples), "more examples than sequences"
        if len(samples) < mask.any(1).sum():
            raise RewardError(
                "ppo.reward_functions: they are called with rows of the data, and these sequences came without; give "
                "`examples` too, or score texts"
            )
        for function, values in zip(self._settings.reward_functions, self.functions(samples), strict=True):
            filled = values + [0.0] * (len(mask) - len(values))
            part = parts[_FUNCTION + function.label] = torch.tensor(filled, device=mask.device)
            total = total + function.weight * part
        return total, parts


class RewardShaping:
    """Computes rewards of tokens from scores of completions.

    Its state is the coefficient of the KL penalty, the mean and standard deviation of all scores so far, and a moving
    mean of the recorded `reward`; checkpoints contain it.
    """

    def __init__(self, settings: PPOConfig) -> None:
        self._settings = settings
        self.kl_coef = settings.kl_coef
        self._moments, self._mean_reward = RunningMoments(), MovingMean()

    def token_rewards(self, scores: Scores, rollout: Rollout, clip: float | None) -> tuple[Tensor, Batch]:
        """Return the rewards of a rollout's tokens, [B, A] float32; the same for any split of its rows over ranks.

        Scores are clipped to +-`clip`; None: they are not. The second result is a sum over the rollout's real rows, the
        number of clipped scores; empty without a clip.
        """
        settings, mask, reward = self._settings, rollout.action_mask, scores.reward
        if settings.normalize_scores != "none":
            moments = self._moments if settings.normalize_scores == "running" else RunningMoments()
            reward = moments.scale(reward, mask.any(-1).float())
        earned = earned_scores(reward, rollout.ended, clip=clip, missing_end=settings.missing_eos_penalty)
        clipped = {} if clip is None else {"clipped_scores": ((reward.abs() > clip) * rollout.row_mask).sum()}
        rewards = shaped_rewards(
            scores.log_probs,
            scores.ref_log_probs,
            earned,
            mask,
            0,
            kl_coef=self.kl_coef if settings.method.kl_in == "reward" else 0.0,
            kl_estimator=settings.method.kl_estimator,
        )
        return rewards, clipped

    def update(self, metrics: Metrics) -> Metrics:
        """Adapt to a step's `reward` and `kl`; return the coefficient that the step used, and the moving mean.

        The coefficient follows the proportional controller of arXiv:1909.08593, section 2.2.
        """
        settings = self._settings
        recorded = {"kl_coef": self.kl_coef, "reward_ema": self._mean_reward.add(metrics["reward"])}
        if settings.kl_target is not None:
            error = min(max(metrics["kl"] / settings.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * settings.batch_size / settings.kl_horizon
        return recorded

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"kl_coef": self.kl_coef, "scores": self._moments.state.tolist(), "reward_ema": self._mean_reward.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.kl_coef = state["kl_coef"]
        self._moments.state = torch.tensor(state["scores"])
        self._mean_reward.state = tuple(state["reward_ema"])


class RunningMoments:
    """Mean and variance of all values so far, on all ranks; `state`: their count, mean and variance, on the device."""

    def __init__(self) -> None:
        self.state = torch.zeros(3)

    def scale(self, values: Tensor, mask: Tensor) -> Tensor:
        """Add the values [B] where `mask` [B] is 1, then scale them by the mean and deviation of all so far.

        The moments of two sets together follow from each one's count, mean and variance (T. Chan, G. Golub and
        R. LeVeque, 1979), so that no digits are lost however many values there are.
        """
        count, mean, variance = self.state.to(values.device)
        new_count, total = distributed.all_sum(torch.stack([mask.sum(), (values * mask).sum()]))
        new_mean = total / new_count.clamp_min(1)
        new_variance = distributed.all_sum((((values - new_mean) * mask) ** 2).sum()) / new_count.clamp_min(1)
        share, difference = new_count / (count + new_count).clamp_min(1), new_mean - mean
        mean = mean + share * difference
        variance = variance + share * (new_variance - variance) + share * (1 - share) * difference**2
        self.state = torch.stack([count + new_count, mean, variance])
        scaled: Tensor = (values - mean) * torch.rsqrt(variance + 1e-8)
        return scaled


class MovingMean:
    """Mean of a number over steps, each weighted 0.9 times the one after it; `state`: weighted sum, and the weights'.

    Like Adam's moments (arXiv:1412.6980, section 3), it is divided by the sum of the weights, so it is unbiased from
    the first step on.
    """

    def __init__(self) -> None:
        self.state = (0.0, 0.0)

    def add(self, number: float) -> float:
        """Return the mean up to and including `number`."""
        total, weights = (0.9 * part + 0.1 * new for part, new in zip(self.state, (number, 1.0)))
        self.state = total, weights
        return total / weights


def is_reward_part(key: str) -> bool:
    """Return whether `key` names a part of the score, which is recorded by that name."""
    return key == _MODEL or key.startswith(_FUNCTION)
