"""What a PPO step reports to an observer before its updates (`rlhf.engine.observer`); 0 where no action is."""

from __future__ import annotations

from torch import Tensor

from rlhf.engine.observer import ObservationPoint
from rlhf.losses.log_probs import masked
from rlhf.trainers.ppo.experience import Rollout, Scores


def report_rollout(observation: ObservationPoint, rollout: Rollout, role: str = "actor") -> None:
    """Report prompts, completions and the log-probabilities with which the model `role` drew them."""
    if observation.is_on:
        prompt = rollout.input_ids.shape[1] - rollout.completion_length
        prompts = {"prompt_ids": rollout.input_ids[:, :prompt], "prompt_mask": rollout.attention_mask[:, :prompt]}
        observation.report("rows", "", **prompts)
        drawn = rollout.drawn_log_probs
        observation.report(
            "rollout",
            role,
            completion_ids=rollout.input_ids[:, prompt:],
            action_mask=rollout.action_mask,
            drawn_log_probs=None if drawn is None else masked(drawn, rollout.action_mask),
        )


def report_scores(observation: ObservationPoint, scores: Scores, mask: Tensor) -> None:
    """Report the numbers of models and rewards about a rollout whose actions have `mask` [B, A]."""
    if observation.is_on:
        values = None if scores.values is None else masked(scores.values, mask)
        observation.report("scores", "reference", log_probs=masked(scores.ref_log_probs, mask))
        observation.report("scores", "critic", values=values)
        log_probs, entropy = masked(scores.log_probs, mask), masked(scores.entropy, mask)
        observation.report("scores", "actor", log_probs=log_probs, entropy=entropy)
        observation.report("scores", "reward", **scores.reward_parts, reward=scores.reward)


def report_advantages(observation: ObservationPoint, mask: Tensor, **tensors: Tensor) -> None:
    """Report the inputs of the updates, [B, A] each."""
    if observation.is_on:
        observation.report("advantages", "", **{name: masked(tensor, mask) for name, tensor in tensors.items()})
