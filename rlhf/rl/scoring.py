"""What the models of a run make of sequences that the policy has drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from rlhf.engine.parking import at_hand
from rlhf.engine.training import Batch, TrainingEngine
from rlhf.models.forward import completion_log_probs, sequence_scores
from rlhf.models.lora import without_adapters
from rlhf.stages.context import StageContext


class Scorer:
    """The policy, its reference, and where they are there the critic and the reward model, `micro_rows` at a time."""

    def __init__(
        self,
        context: StageContext,
        *,
        actor: TrainingEngine,
        critic: TrainingEngine | None,
        reference: nn.Module | None,
        reward: nn.Module | None,
        micro_rows: int,
    ) -> None:
        self.actor, self.critic, self.reference, self.reward = actor, critic, reference, reward
        self.micro_rows = micro_rows
        self._precision, self._boundary = context.precision, context.accelerator.step_boundary
        self._temperature = context.config.ppo.sampling.temperature

    @torch.no_grad()
    def __call__(self, sequences: Batch) -> Batch:
        """What the models make of `PPO.generate`'s sequences, in micro-batches; see `PPO.score`."""
        self.actor.engine.eval()
        if self.critic:
            self.critic.engine.eval()
        with at_hand(self.reference, self.reward):
            parts = [self._score(part) for part in self._micro_batches(sequences)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _score(self, part: Batch) -> Batch:
        ids, mask = part["input_ids"], part["attention_mask"]
        length = part["action_mask"].shape[1]
        log_probs = partial(
            completion_log_probs,
            input_ids=ids,
            attention_mask=mask,
            completion_length=length,
            temperature=self._temperature,
        )
        found: Batch = {}
        with self._precision.autocast():
            actor = log_probs(self.actor.engine, entropy=True)
            found |= {"log_probs": actor.log_probs, "entropy": actor.entropy}
            self._boundary("score/actor")
            with self._policy_before() as model:
                found["ref_log_probs"] = log_probs(model).log_probs
            self._boundary("score/reference")
            if self.critic:
                found["values"] = action_values(self.critic.engine(ids, mask), length).float()
                self._boundary("score/critic")
            if self.reward:
                found["scores"] = sequence_scores(self.reward, ids, mask)
                self._boundary("score/reward")
        return found

    @contextmanager
    def _policy_before(self) -> Iterator[nn.Module]:
        """The policy as it was before training: a model of its own, or the actor without its adapters."""
        if self.reference is not None:
            yield self.reference
            return
        with without_adapters(self.actor.module):
            yield self.actor.engine

    def _micro_batches(self, sequences: Batch) -> list[Batch]:
        columns = (tensor.split(self.micro_rows) for tensor in sequences.values())
        return [dict(zip(sequences, part)) for part in zip(*columns)]


def action_values(token_values: Tensor, completion_length: int) -> Tensor:
    """[B, T] -> [B, A]: the value of the state in which each completion token was drawn, one column before it."""
    return token_values[:, -completion_length - 1 : -1]
