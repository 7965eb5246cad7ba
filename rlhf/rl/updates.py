"""From one rollout to new weights: passes over its minibatches, each an update of the policy and of the critic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlhf.engine import distributed
from rlhf.engine.overflow import step_together
from rlhf.engine.statistics import Sums
from rlhf.engine.training import Batch, TrainingEngine
from rlhf.models.forward import completion_log_probs
from rlhf.objectives.policy import policy_loss, value_loss
from rlhf.objectives.tokens import masked
from rlhf.rl.scoring import action_values
from rlhf.rollout.experience import Experience
from rlhf.stages.context import StageContext

MEANS = ("policy_loss", "value_loss", "clip_fraction")
"""What an update adds to a step's sums; the mean over the step's updates is recorded."""


class Updates:
    """The passes over a rollout; `critic` is None for an estimator that needs none."""

    def __init__(self, context: StageContext, actor: TrainingEngine, critic: TrainingEngine | None) -> None:
        self.settings, self.actor, self.critic = context.config.ppo, actor, critic
        self._seed, world = context.config.seed, context.world.size
        self.minibatch, self.micro_rows = self.settings.minibatch(world)
        self._rows = self.minibatch // world  # of one minibatch, on this rank

    def __call__(self, experience: Experience, index: int, sums: Sums) -> int:
        """All passes over the rollout of step `index`, and how many updates that were; adds statistics to `sums`."""
        updates = 0
        for epoch in range(self.settings.ppo_epochs):
            for minibatch in experience.split(self._rows, self.order(index, epoch)):
                self._update(minibatch, sums)
                updates += 1
        return updates

    def _update(self, minibatch: Experience, sums: Sums) -> None:
        # Actions of the whole global minibatch: losses are means over them, however rows are split.
        total = distributed.all_sum(minibatch.action_mask.sum()).clamp_min(1)
        settings, parts = self.settings, minibatch.split(self.micro_rows)

        def actor_loss(model: nn.Module, part: Experience) -> tuple[Tensor, Batch]:
            log_probs = completion_log_probs(
                model,
                part.input_ids,
                part.attention_mask,
                part.completion_length,
                temperature=settings.sampling.temperature,
            ).log_probs
            loss = policy_loss(
                log_probs, part.log_probs, part.advantages, part.action_mask, clip=settings.clip, total=total
            )
            ratio = masked(log_probs.detach() - part.log_probs, part.action_mask).exp()
            return loss, {"clip_fraction": ((ratio - 1).abs() > settings.clip).sum() / total}

        def critic_loss(model: nn.Module, part: Experience) -> tuple[Tensor, Batch]:
            values = action_values(model(part.input_ids, part.attention_mask), part.completion_length)
            loss = value_loss(
                values, part.values, part.returns, part.action_mask, clip=settings.value_clip, total=total
            )
            return loss, {}

        both = ((self.actor, actor_loss), (self.critic, critic_loss))
        found = step_together([(engine, loss) for engine, loss in both if engine], parts)
        sums.extend(found[0], loss="policy_loss", clip_fraction="clip_fraction")
        if self.critic:
            sums.extend(found[1], loss="value_loss")

    def order(self, index: int, epoch: int) -> torch.Generator | None:
        """Order of the rows in one pass; None where one minibatch holds them all."""
        if self.settings.batch_size == self.minibatch:
            return None
        seed = (self._seed * 1_000_003 + index) * 1_009 + epoch
        return torch.Generator().manual_seed(seed)
