"""What the models of a run make of sequences that the policy has drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlhf.engine.cpu_offload import on_device
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.generation.micro_batches import Part, parts, together
from rlhf.models.forward import LogProbs, completion_log_probs, sequence_scores
from rlhf.models.lora import without_adapters
from rlhf.trainers.context import StageContext


class Pass(NamedTuple):
    """A micro-batch's training passes, whose backward passes are to come; `values` [B, A]: None without a critic."""

    policy: LogProbs
    values: Tensor | None


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
        self._temperature, self._shapes = context.config.ppo.sampling.temperature, context.shapes

    def __call__(self, sequences: Batch, keep: list[Pass] | None = None) -> Batch:
        """What the models make of `PPO.generate`'s sequences, in micro-batches; see `PPO.score`.

        Args:
            keep: where it is given, policy and critic are scored by training passes, which are added to it: one for
                each of `micro_batches`, in their order.
        """
        length, packed = sequences["action_mask"].shape[1], self.micro_batches(sequences)
        keys = ("input_ids", "attention_mask", "action_mask")
        batches = [{key: part.of(sequences[key], length) for key in keys} for part in packed]
        trained = [engine for engine in (self.actor, self.critic) if engine]
        for engine in trained:
            engine.engine.eval()
        with torch.no_grad(), on_device(self.reference, self.reward):
            found = [self._frozen(part) for part in batches]
        if keep is not None:
            for engine in trained:
                engine.train()
        # Last, and the critic first, which has no logits: what training passes keep is there from here on.
        with torch.set_grad_enabled(keep is not None):
            values = [self._values(part) if self.critic else None for part in batches]
            passes = [Pass(self._policy(part), value) for part, value in zip(batches, values)]
        for scored, (policy, value) in zip(found, passes):
            scored |= {name: tensor.detach() for name, tensor in policy._asdict().items()}
            if value is not None:
                scored["values"] = value.detach().float()
        if keep is not None:
            keep.extend(passes)
        return {key: together(packed, [scored[key] for scored in found], length) for key in found[0]}

    def micro_batches(self, sequences: Batch) -> list[Part]:
        """Which rows and columns are scored together."""
        rows, length = sequences["action_mask"].shape
        prompt = sequences["input_ids"].shape[1] - length
        sizes = {"rows": rows, "prompt": prompt, "completion": length, "size": self.micro_rows}
        return parts(sequences.get("lengths"), **sizes, policy=self._shapes)

    def padding(self, sequences: Batch, row_mask: Tensor) -> Batch:
        """Positions that one model's scoring pass computes, and those of them that hold a token of a real row."""
        present = (sequences["attention_mask"] * row_mask.unsqueeze(1)).sum()
        computed = sum(part.positions(len(row_mask)) for part in self.micro_batches(sequences))
        return {"present": present, "positions": torch.full_like(present, computed)}

    def _frozen(self, part: Batch) -> Batch:
        """What the models that are not trained make of a micro-batch."""
        found: Batch = {}
        with self._precision.autocast():
            with self._policy_before() as model:
                found["ref_log_probs"] = self._log_probs(model, part).log_probs
            self._boundary("score/reference")
            if self.reward:
                found["scores"] = sequence_scores(self.reward, part["input_ids"], part["attention_mask"])
                self._boundary("score/reward")
        return found

    def _values(self, part: Batch) -> Tensor:
        assert self.critic
        with self._precision.autocast():
            found = action_values(
                self.critic.engine(part["input_ids"], part["attention_mask"]), part["action_mask"].shape[1]
            )
        self._boundary("score/critic")
        return found

    def _policy(self, part: Batch) -> LogProbs:
        with self._precision.autocast():
            found = self._log_probs(self.actor.engine, part, entropy=True)
        self._boundary("score/actor")
        return found

    def _log_probs(self, model: nn.Module, part: Batch, *, entropy: bool = False) -> LogProbs:
        return completion_log_probs(
            model,
            part["input_ids"],
            part["attention_mask"],
            part["action_mask"].shape[1],
            temperature=self._temperature,
            entropy=entropy,
        )

    @contextmanager
    def _policy_before(self) -> Iterator[nn.Module]:
        """The policy as it was before training: a model of its own, or the actor without its adapters."""
        if self.reference is not None:
            yield self.reference
            return
        with without_adapters(self.actor.module):
            yield self.actor.engine


def action_values(token_values: Tensor, completion_length: int) -> Tensor:
    """[B, T] -> [B, A]: the value of the state in which each completion token was drawn, one column before it."""
    return token_values[:, -completion_length - 1 : -1]
