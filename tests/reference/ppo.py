"""PPO for language models (arXiv:1707.06347, arXiv:2203.02155, arXiv:2308.01320): what follows from one rollout.

A token is an action; the state in which it is drawn is all before it. The reward of an action is minus the
coefficient times an estimate of KL(policy || reference); a sequence's last action also earns the reward model's score,
scaled, clipped, and less a penalty where it is no end token, as the settings say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.config.schema import PPOConfig
from tests.reference import estimators
from tests.reference.adamw import AdamW
from tests.reference.network import Network


@dataclass
class Row:
    """A sequence, and what the models made of it when it was drawn; one number per action."""

    prompt: list[int]
    completion: list[int]
    score: float
    log_probs: list[float]
    ref_log_probs: list[float]
    entropy: list[float]
    values: list[float]
    rewards: list[float]
    advantages: list[float]
    returns: list[float]

    @property
    def kl(self) -> float:
        return sum(self.log_probs) - sum(self.ref_log_probs)


class PPO:
    """The four models and the coefficient of the KL penalty.

    Args:
        critic: None: the estimator has none, and values are 0.
        reference: None: the actor without its adapters (LoRA).
        total_updates: optimizer steps of the whole run.
        longest: tokens that a completion may have.
        adapters: as `AdamW` takes it.
        ends: tokens that end a completion.
        texts: number of an update -> the rows of raw text that it learns from, too.
    """

    def __init__(
        self,
        config: PPOConfig,
        actor: Network,
        critic: Network | None,
        reward_model: Network,
        reference: Network | None,
        total_updates: int,
        longest: int,
        adapters: float | None = None,
        ends: Collection[int] = (),
        texts: Callable[[int], Sequence[list[int]]] = lambda number: (),
    ) -> None:
        self.config, self.longest, self.ends, self.texts = config, longest, ends, texts
        self.actor, self.critic, self.reward_model, self.reference = actor, critic, reward_model, reference
        self.actor_optimizer = AdamW(actor.trained, config.optimizer, total_updates, adapters)
        if critic:
            self.critic_optimizer = AdamW(critic.trained, config.critic_optimizer, total_updates, adapters)
        self.kl_coef = config.kl_coef
        self.scores: list[float] = []  # of all rollouts so far
        self.rewards: list[float] = []  # of all steps so far
        self.planned = 0  # updates of all rollouts so far, with those that were not made
        self.rollouts: list[list[Row]] = []
        self.updates: list[dict[str, float]] = []

    def step(
        self, sequences: Sequence[tuple[list[int], list[int]]], passes: Sequence[Sequence[Sequence[int]]]
    ) -> dict[str, float]:
        """Learn from one rollout; returns what is recorded of it.

        Args:
            sequences: the real rows of the global batch, each (prompt ids, completion ids).
            passes: for each pass over the rollout, its minibatches: lists of indices into `sequences`.
        """
        self.actor_optimizer.place = self.planned
        if self.critic:
            self.critic_optimizer.place = self.planned
        rate, coefficient = self.actor_optimizer.rate, self.kl_coef
        rows = self.collect(sequences)
        parts = [part for minibatches in passes for part in minibatches]
        updates: list[dict[str, float]] = []
        for number, part in enumerate(parts, self.planned):
            updates.append(self.update([rows[index] for index in part], self.texts(number)))
            if self.config.kl_stop is not None and updates[-1]["approx_kl"] > self.config.kl_stop:
                break
        self.planned += len(parts)
        self.rollouts.append(rows)
        self.updates += updates
        numbers = {
            **statistics(rows, self.ends),
            "returns": _mean([value for row in rows for value in row.returns]),
            "explained_variance": explained_variance(rows),
            "policy_loss": _mean([update["policy_loss"] for update in updates]),
            "value_loss": _mean([update["value_loss"] for update in updates]),
            "clip_fraction": _mean([update["clip_fraction"] for update in updates]),
            "approx_kl": _mean([update["approx_kl"] for update in updates]),
            "value_clip_fraction": _mean([update["value_clip_fraction"] for update in updates]),
            "updates": len(updates),
            "grad_norm": updates[-1]["grad_norm"],
            "critic_grad_norm": updates[-1]["critic_grad_norm"],
            "learning_rate": rate,
            "kl_coef": coefficient,
        }
        if self.config.method.kl_in == "loss":
            numbers["kl_loss"] = _mean([update["kl_loss"] for update in updates])
        if self.config.ptx_coef:
            numbers["ptx_loss"] = _mean([update["ptx_loss"] for update in updates])
        if not self.critic:
            for name in ("value_loss", "value_clip_fraction", "critic_grad_norm", "explained_variance"):
                del numbers[name]
        self.rewards.append(numbers["reward"])
        weights = [0.9**age for age in range(len(self.rewards))][::-1]
        numbers["reward_ema"] = sum(w * reward for w, reward in zip(weights, self.rewards)) / sum(weights)
        self._adapt(numbers["kl"])
        return numbers

    def observe(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[Row]:
        """What the models make of each sequence."""
        with torch.no_grad():
            return [self._row(prompt, completion) for prompt, completion in sequences]

    def collect(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[Row]:
        """What is known of each sequence before the first update."""
        rows = self.observe(sequences)
        self._earn(rows)
        if self.critic:
            estimates = zip(*(self._estimate(row) for row in rows))
        else:
            estimates = estimators.estimate([row.rewards for row in rows], self.config)
        for row, advantages, returns in zip(rows, *estimates):
            row.advantages, row.returns = advantages, returns
        if self.config.method.whiten_advantages:
            every = [advantage for row in rows for advantage in row.advantages]
            mean = _mean(every)
            variance = _variance(every)
            for row in rows:
                row.advantages = [(advantage - mean) / math.sqrt(variance + 1e-8) for advantage in row.advantages]
        return rows

    def update(self, rows: Sequence[Row], texts: Sequence[list[int]] = ()) -> dict[str, float]:
        """One update of the policy and one of the critic on a minibatch; that of the policy on `texts` too."""
        policy = value = held_back = bonus = torch.zeros((), dtype=torch.float64)
        actions = clipped = kept_near = 0
        drift = 0.0
        lengths = [len(row.completion) for row in rows]
        for row, share in zip(rows, estimators.shares(lengths, self.config.method.loss_mean, self.longest)):
            log_probs, entropies = self._log_probs(row.prompt, row.completion, self.actor)
            values = self._values(row.prompt, row.completion)
            for action in range(len(row.completion)):
                actions += 1
                advantage, target, old = row.advantages[action], row.returns[action], row.values[action]
                ratio = torch.exp(log_probs[action] - row.log_probs[action])
                nearby = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
                policy = policy + share * torch.max(-advantage * ratio, -advantage * nearby)
                clipped += abs(ratio.item() - 1) > self.config.clip
                drift += ratio.item() - 1 - math.log(ratio.item())
                held_back = held_back + share * self._kl(log_probs[action] - row.ref_log_probs[action])
                bonus = bonus + share * entropies[action]
                near = values[action].clamp(old - self.config.value_clip, old + self.config.value_clip)
                kept_near += (near.item() - target) ** 2 > (values[action].item() - target) ** 2
                value = value + 0.5 * torch.max((values[action] - target) ** 2, (near - target) ** 2)
        policy_loss, value_loss, kl_loss = policy, value / actions, held_back
        whole = policy_loss - self.config.entropy_coef * bonus
        if self.config.method.kl_in == "loss":
            whole = whole + self.kl_coef * kl_loss
        # PPO-ptx (arXiv:2203.02155, equation 2): each token but the first of a row, given those before it.
        modelled = [
            -torch.log_softmax(scores, 0)[token]
            for row in texts
            for scores, token in zip(self.actor.logits(row)[:-1], row[1:])
        ]
        ptx_loss = sum(modelled, torch.zeros((), dtype=torch.float64)) / max(len(modelled), 1)
        whole = whole + self.config.ptx_coef * ptx_loss
        return {
            "ptx_loss": ptx_loss.item(),
            "policy_loss": policy_loss.item(),
            "value_loss": value_loss.item(),
            "clip_fraction": clipped / actions,
            "approx_kl": drift / actions,
            "kl_loss": kl_loss.item(),
            "value_clip_fraction": kept_near / actions,
            "grad_norm": self.actor_optimizer.step(whole),
            "critic_grad_norm": self.critic_optimizer.step(value_loss) if self.critic else 0.0,
        }

    def _row(self, prompt: list[int], completion: list[int]) -> Row:
        policy, entropy = self._log_probs(prompt, completion, self.actor)
        reference, _ = self._log_probs(prompt, completion, self.reference or self.actor, adapted=False)
        values = self._values(prompt, completion)
        score = self.reward_model.scores(prompt + completion)[-1]
        return Row(
            *(prompt, completion, float(score)),
            *([float(number) for number in numbers] for numbers in (policy, reference, entropy, values)),
            *([], [], []),
        )

    def _earn(self, rows: Sequence[Row]) -> None:
        """The rewards of each action."""
        own = [row.score for row in rows]
        self.scores += own
        known = {"none": [], "batch": own, "running": self.scores}[self.config.normalize_scores]
        for row in rows:
            score = row.score
            if known:
                score = (score - _mean(known)) / math.sqrt(_variance(known) + 1e-8)
            score = min(max(score, -self.config.score_clip), self.config.score_clip)
            if row.completion[-1] not in self.ends:
                score -= self.config.missing_eos_penalty or 0
            row.rewards = [0.0] * len(row.completion)
            if self.config.method.kl_in == "reward":
                pairs = zip(row.log_probs, row.ref_log_probs)
                row.rewards = [
                    -self.kl_coef * float(self._kl(torch.tensor(p - r, dtype=torch.float64))) for p, r in pairs
                ]
            row.rewards[-1] += score

    def _kl(self, log_ratio: Tensor) -> Tensor:
        """An estimate of KL(policy || reference) from log(policy / reference) of one token (J. Schulman)."""
        ratio = torch.exp(-log_ratio)  # reference / policy
        estimates = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": ratio - 1 - torch.log(ratio)}
        return estimates[self.config.method.kl_estimator]

    def _estimate(self, row: Row) -> tuple[list[float], list[float]]:
        """Advantages and returns."""
        values, rewards = row.values, row.rewards
        # Generalized advantage estimation (arXiv:1506.02438, equations 11-16): nothing follows the last action.
        advantages = [0.0] * len(rewards)
        following = value_after = 0.0
        for action in reversed(range(len(rewards))):
            error = rewards[action] + self.config.gamma * value_after - values[action]
            following = error + self.config.gamma * self.config.lam * following
            advantages[action], value_after = following, values[action]
        return advantages, [advantage + value for advantage, value in zip(advantages, values)]

    def _log_probs(
        self, prompt: list[int], completion: list[int], network: Network, *, adapted: bool = True
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(log-probability, entropy) of each action, of the distribution that tokens are drawn from."""
        logits = network.logits(prompt + completion, adapted=adapted)
        log_probs, entropies = [], []
        for action, token in enumerate(completion):
            distribution = torch.log_softmax(logits[len(prompt) + action - 1] / self.config.sampling.temperature, 0)
            log_probs.append(distribution[token])
            entropies.append(-(distribution.exp() * distribution).sum())
        return log_probs, entropies

    def _values(self, prompt: list[int], completion: list[int]) -> list[Tensor]:
        """The critic's value of the state in which each action is taken: at the token before it."""
        if not self.critic:
            return [torch.zeros((), dtype=torch.float64) for _ in completion]
        scores = self.critic.scores(prompt + completion)
        return [scores[len(prompt) + action - 1] for action in range(len(completion))]

    def _adapt(self, kl: float) -> None:
        """The adaptive coefficient (arXiv:1909.08593, section 2.2)."""
        if self.config.kl_target is not None:
            error = min(max(kl / self.config.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * self.config.batch_size / self.config.kl_horizon


def explained_variance(rows: Sequence[Row]) -> float:
    """What the values foresee of the returns."""
    returns = [value for row in rows for value in row.returns]
    errors = [target - value for row in rows for target, value in zip(row.returns, row.values)]
    return 1 - _variance(errors) / _variance(returns)


def statistics(rows: Sequence[Row], ends: Collection[int]) -> dict[str, float]:
    """What is recorded of a rollout itself."""
    scores = [row.score for row in rows]
    return {
        "reward": _mean(scores),
        "reward_std": math.sqrt(_variance(scores)),
        "kl": _mean([row.kl for row in rows]),
        "entropy": _mean([entropy for row in rows for entropy in row.entropy]),
        "truncated_share": _mean([row.completion[-1] not in ends for row in rows]),
        "response_length": _mean([len(row.completion) for row in rows]),
        "tokens": float(sum(len(row.completion) for row in rows)),
    }


def evaluation(rows: Sequence[Row], ends: Collection[int]) -> dict[str, float]:
    """What is recorded of held-out prompts; distinct_2: different pairs of neighbours, as a part of all pairs."""
    pairs = [row.completion[start : start + 2] for row in rows for start in range(len(row.completion) - 1)]
    different = [pair for number, pair in enumerate(pairs) if pair not in pairs[:number]]
    numbers = {name: value for name, value in statistics(rows, ends).items() if name != "tokens"}
    return numbers | {"distinct_2": len(different) / max(len(pairs), 1)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    return _mean([(value - _mean(values)) ** 2 for value in values])
