"""From one rollout to new weights: passes over its minibatches, each an update of the policy and of the critic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat

import torch
from torch import Tensor, nn

from rlhf.engine import distributed
from rlhf.engine.engine import Batch, Loss, TrainingEngine
from rlhf.engine.fp16 import Work, step_together
from rlhf.engine.metric_sums import Metrics, MetricSums
from rlhf.losses.log_probs import masked, masked_mean, token_weights
from rlhf.losses.ppo import kl_estimate, policy_loss, value_is_clipped, value_loss
from rlhf.models.forward import LogProbs, completion_log_probs
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.experience import Experience
from rlhf.trainers.ppo.pretraining_loss import Pretraining
from rlhf.trainers.ppo.scoring import Pass, action_values

MEANS = ("policy_loss", "value_loss", "clip_fraction", "approx_kl", "kl_loss", "value_clip_fraction", "ptx_loss")
"""What an update adds to a step's sums; the mean over the step's updates is recorded."""

MicroBatch = tuple[Experience, Pass | None]
"""Rows of a minibatch, and their training passes, where those have been made."""


class Updates:
    """The passes over a rollout; `critic` is None for an estimator that needs none, `pretraining` without texts."""

    def __init__(
        self,
        context: StageContext,
        actor: TrainingEngine,
        critic: TrainingEngine | None,
        pretraining: Pretraining | None = None,
    ) -> None:
        self.settings, self.actor, self.critic = context.config.ppo, actor, critic
        self.pretraining = pretraining
        self._seed, world = context.config.seed, context.world.size
        self._longest, self._shapes = context.config.data.max_completion_length, context.shapes
        self.minibatch, self.micro_rows = self.settings.minibatch(world)
        self._rows = self.minibatch // world  # of one minibatch, on this rank

    def __call__(
        self, experience: Experience, index: int, sums: MetricSums, *, kl_coef: float, passes: Sequence[Pass] = ()
    ) -> Metrics:
        """The passes over the rollout of step `index`, up to the update that finds `ppo.kl_stop` exceeded.

        Args:
            sums: `MEANS` of each update are added to it.
            passes: of the one update there is, the training passes that have scored the rollout (`Scorer`).
            kl_coef: weight of the KL penalty, where that is in the loss.

        Returns:
            How many `updates` that were, and the policy's learning rates in the first.
        """
        settings, weight = self.settings, torch.tensor(kl_coef, device=experience.action_mask.device)
        for engine in filter(None, (self.actor, self.critic)):
            engine.left_out = index * settings.updates - engine.steps
        rates, made = self.actor.rates, 0
        for epoch in range(settings.ppo_epochs):
            for minibatch in experience.split(self._rows, self.order(index, epoch)):
                update = self._update(minibatch, passes, weight, index * settings.updates + made)
                sums.extend(update, *MEANS)
                made += 1
                if settings.kl_stop is not None and update.read()["approx_kl"] > settings.kl_stop:
                    return {"updates": float(made), **rates}
        return {"updates": float(made), **rates}

    def _update(self, minibatch: Experience, passes: Sequence[Pass], kl_coef: Tensor, number: int) -> MetricSums:
        """Update `number` of the run: a step of the policy, and one of the critic; returns the `MEANS` there are."""
        # Actions and sequences of the whole global minibatch: losses are means over them, however rows are split.
        mask = minibatch.action_mask
        total, rows = distributed.all_sum(torch.stack([mask.sum(), mask.amax(1).sum()])).clamp_min(1)
        parts, found = (
            list(zip(minibatch.micro_batches(self.micro_rows, self._shapes), passes or repeat(None))),
            MetricSums(),
        )
        policy: Loss = partial(self._actor_loss, total=total, rows=rows, kl_coef=kl_coef)
        work: list[Work] = [(self.actor, policy, parts)]
        if self.pretraining:
            texts = self.pretraining.micro_batches(number)
            work = [(self.actor, self.pretraining.beside(policy), [*parts, *texts])]
        if self.critic:
            work.append((self.critic, partial(self._critic_loss, total=total), parts))
        for sums in step_together(work):
            found.extend(sums, *MEANS)
        return found

    def _actor_loss(
        self, model: nn.Module, micro_batch: MicroBatch, *, total: Tensor, rows: Tensor, kl_coef: Tensor
    ) -> tuple[Tensor, Batch]:
        """The policy's loss on a part of a minibatch that has `total` actions in `rows` sequences; a `Loss`."""
        part, made = micro_batch
        settings, method, mask = self.settings, self.settings.method, part.action_mask
        weights = token_weights(mask, method.loss_mean, tokens=total, sequences=rows, longest=self._longest)
        log_probs, entropy = made.policy if made else self._policy(model, part)
        loss = policy_loss(log_probs, part.log_probs, part.advantages, weights, clip=settings.clip, total=total)
        log_ratio = masked(log_probs.detach() - part.log_probs, mask)
        found = {
            "policy_loss": loss,
            "clip_fraction": ((log_ratio.exp() - 1).abs() > settings.clip).sum() / total,
            "approx_kl": masked_mean(kl_estimate(-log_ratio, "k3"), mask, total),
        }
        if method.kl_in == "loss":
            drift = kl_estimate(masked(log_probs - part.ref_log_probs, mask), method.kl_estimator)
            found["kl_loss"] = masked_mean(drift, weights, total)
            loss = loss + kl_coef * found["kl_loss"]
        if settings.entropy_coef and entropy is not None:
            loss = loss - settings.entropy_coef * masked_mean(masked(entropy, mask), weights, total)
        return loss, found

    def _policy(self, model: nn.Module, part: Experience) -> LogProbs:
        settings = self.settings
        return completion_log_probs(
            model,
            part.input_ids,
            part.attention_mask,
            part.completion_length,
            temperature=settings.sampling.temperature,
            entropy=settings.entropy_coef > 0,
        )

    def _critic_loss(self, model: nn.Module, micro_batch: MicroBatch, *, total: Tensor) -> tuple[Tensor, Batch]:
        """The critic's loss, as `_actor_loss`."""
        part, made = micro_batch
        settings, mask = self.settings, part.action_mask
        values = made.values if made else None
        if values is None:
            values = action_values(model(part.input_ids, part.attention_mask), part.completion_length)
        loss = value_loss(values, part.values, part.returns, mask, clip=settings.value_clip, total=total)
        clipped = masked(value_is_clipped(values.detach(), part.values, part.returns, settings.value_clip), mask)
        return loss, {"value_loss": loss, "value_clip_fraction": clipped.sum() / total}

    def order(self, index: int, epoch: int) -> torch.Generator | None:
        """Order of the rows in one pass; None where one minibatch holds them all."""
        if self.settings.batch_size == self.minibatch:
            return None
        seed = (self._seed * 1_000_003 + index) * 1_009 + epoch
        return torch.Generator().manual_seed(seed)
