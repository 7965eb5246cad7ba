"""Stage 3, PPO: sample from the policy, score with the reward model, raise what scored above expectation.

Prompts flow in; a policy and what it does on held-out prompts, before and after, flow out. One step is a
rollout, its scoring by four models, and `ppo_epochs` passes of clipped updates over it
(arXiv:1707.06347; the arrangement is that of arXiv:2203.02155).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.data.batches import collate_ppo
from rlhf.data.tokenization import Prompt, StageData
from rlhf.engine import distributed
from rlhf.engine.parking import at_hand
from rlhf.engine.statistics import Sums
from rlhf.engine.training import Batch
from rlhf.models.forward import completion_log_probs, last_token_scores
from rlhf.models.loading import Loader
from rlhf.models.lora import without_adapters
from rlhf.models.tokenizers import end_tokens
from rlhf.objectives import (
    advantages_and_returns,
    masked,
    policy_loss,
    shaped_rewards,
    value_loss,
    whiten,
)
from rlhf.rollout.choice import choose
from rlhf.rollout.decoder import Decoder
from rlhf.rollout.experience import Experience
from rlhf.rollout.switch import generating
from rlhf.stages.evaluation import Judge, evaluate, means, record, rollout_statistics
from rlhf.stages.leaving import leave
from rlhf.stages.loop import Numbers, StageContext, measure_once, run_steps


@dataclass(frozen=True)
class Models:
    """The four models of PPO, each loaded when its turn comes; `critic` and `reward` have a scalar head.

    Where the actor is trained by LoRA, `reference` is not loaded: it is the actor without its adapters.
    """

    actor: Loader
    reference: Loader
    critic: Loader
    reward: Loader


class PPO:
    """The engines, and one step of the algorithm."""

    def __init__(self, context: StageContext, models: Models, tokenizer: Any, data: StageData) -> None:
        self.context = context
        self.settings = settings = context.config.ppo
        self.accelerator = context.accelerator
        self.tokenizer = tokenizer
        minibatch, self.micro_rows = settings.minibatch(context.world.size)
        self.minibatch_rows = minibatch // context.world.size
        self.kl_coef = settings.kl_coef
        self.experience: Experience | None = None  # the latest, for samples

        updates = settings.steps * settings.ppo_epochs * (settings.batch_size // minibatch)
        sizes = {"total_steps": updates, "batch_size": minibatch, "micro_batch_size": self.micro_rows}
        self.actor = context.engine("actor", models.actor, settings.optimizer, **sizes)
        self.critic = context.engine("critic", models.critic, settings.critic_optimizer, **sizes)
        self.reference = context.frozen("reference", models.reference) if "reference" in context.holdings else None
        self.reward = context.frozen("reward", models.reward)

        collate = partial(
            collate_ppo,
            pad_token_id=tokenizer.pad_token_id,
            policy=context.shapes,
            maximum=context.config.data.max_prompt_length,
        )
        self.batch_rows = rows = settings.batch_size // context.world.size
        # Endless: a minibatch without a real row would move weights by momentum alone.
        self.batches = context.batches(
            data.train, collate, batch_size=settings.batch_size, micro_batch_size=rows, endless=True
        )
        # The same rows at a time as in training, so that evaluation adds no shapes.
        self.held_out = context.evaluation_batches(data.heldout, collate, settings, rows=rows)
        self.decoder = Decoder(
            context.accelerator,
            eos_ids=end_tokens(tokenizer, self.actor.module.generation_config),
            pad_id=tokenizer.pad_token_id,
            max_new_tokens=context.config.data.max_completion_length,
            shapes=context.shapes,
            batch_size=settings.generation_batch_size,
            team=choose(self.actor, context.config, say=context.say),
        )

    def step(self, index: int) -> Numbers:
        """One rollout and the updates that follow from it."""
        (prompts,) = self.batches.step(index)
        sums = Sums()
        self.experience = experience = self.collect(self.accelerator.to_device(prompts), sums)
        rates = self.actor.rates
        for epoch in range(self.settings.ppo_epochs):
            self.update(experience, self._order(index, epoch), sums)
        return self._numbers(sums.read(), rates)

    @torch.no_grad()
    def generate(self, prompts: Batch) -> Batch:
        """Complete a batch of prompts.

        Args:
            prompts: `prompt_ids`, `prompt_mask` [B, P], padded left, and `row_mask` [B].

        Returns:
            `input_ids`, `attention_mask` [B, P + A] and `action_mask` [B, A]; rows that only fill up the
            batch have no actions.
        """
        with generating(self.actor, self.decoder.team) as model:
            completions = self.decoder.generate(
                model, prompts["prompt_ids"], prompts["prompt_mask"], self.settings.sampling
            )
            if self.actor.zero_stage == 3:  # weights will be gathered to other places, which a recording cannot follow
                self.decoder.release()
        self.accelerator.step_boundary("rollout/end")
        return {
            "input_ids": torch.cat([prompts["prompt_ids"], completions.ids], dim=1),
            "attention_mask": torch.cat([prompts["prompt_mask"], completions.mask], dim=1),
            "action_mask": (completions.mask * prompts["row_mask"].unsqueeze(1)).float(),
        }

    @torch.no_grad()
    def score(self, sequences: Batch) -> Batch:
        """What the four models make of `generate`'s sequences, in micro-batches.

        Returns:
            `log_probs`, `ref_log_probs`, `entropy`, `values` [B, A], and `scores` [B], the reward model's.
        """
        self.actor.engine.eval()
        self.critic.engine.eval()
        with at_hand(self.reference, self.reward):
            parts = [self._score(part) for part in self._micro_batches(sequences)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def collect(self, prompts: Batch, sums: Sums) -> Experience:
        """Rollout, scores, rewards and advantages of this rank's prompts; adds statistics to `sums`."""
        settings = self.settings
        sequences = self.generate(prompts)
        self.decoder.make_room()
        scored = self.score(sequences)
        mask = sequences["action_mask"]
        values = scored["values"] * mask
        rewards = shaped_rewards(
            scored["log_probs"],
            scored["ref_log_probs"],
            scored["scores"],
            mask,
            0,
            kl_coef=self.kl_coef,
            score_clip=settings.score_clip,
        )
        advantages, returns = advantages_and_returns(values, rewards, 0, gamma=settings.gamma, lam=settings.lam)
        sums.add(**rollout_statistics(scored, mask, prompts["row_mask"]), returns=(returns * mask).sum())
        if settings.whiten_advantages:
            advantages = whiten(advantages, mask, distributed.all_sum)
        self.accelerator.step_boundary("rollout/advantages")
        return Experience(
            input_ids=sequences["input_ids"],
            attention_mask=sequences["attention_mask"],
            action_mask=mask,
            log_probs=masked(scored["log_probs"], mask),
            values=values,
            advantages=advantages * mask,
            returns=returns * mask,
        )

    def update(self, experience: Experience, order: torch.Generator | None, sums: Sums) -> None:
        """One pass over a rollout: an update of the policy and of the critic for each minibatch."""
        settings = self.settings
        for minibatch in experience.split(self.minibatch_rows, order):
            # Actions of the whole global minibatch: losses are means over them, however rows are split.
            total = distributed.all_sum(minibatch.action_mask.sum()).clamp_min(1)

            def actor_loss(model: nn.Module, part: Experience, total: Tensor = total) -> tuple[Tensor, Batch]:
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

            def critic_loss(model: nn.Module, part: Experience, total: Tensor = total) -> tuple[Tensor, Batch]:
                values = action_values(model(part.input_ids, part.attention_mask), part.completion_length)
                loss = value_loss(
                    values, part.values, part.returns, part.action_mask, clip=settings.value_clip, total=total
                )
                return loss, {}

            parts = minibatch.split(self.micro_rows)
            sums.extend(self.actor.step(parts, actor_loss), loss="policy_loss", clip_fraction="clip_fraction")
            sums.extend(self.critic.step(parts, critic_loss), loss="value_loss")

    def save_state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load_state(self, state: dict[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]

    def _score(self, part: Batch) -> Batch:
        ids, mask = part["input_ids"], part["attention_mask"]
        length = part["action_mask"].shape[1]
        boundary = self.accelerator.step_boundary
        log_probs = partial(
            completion_log_probs,
            input_ids=ids,
            attention_mask=mask,
            completion_length=length,
            temperature=self.settings.sampling.temperature,
        )
        with self.context.precision.autocast():
            actor = log_probs(self.actor.engine, entropy=True)
            boundary("score/actor")
            with self._reference() as model:
                reference = log_probs(model)
            boundary("score/reference")
            values = action_values(self.critic.engine(ids, mask), length)
            boundary("score/critic")
            scores = last_token_scores(self.reward(ids, mask), mask)
            boundary("score/reward")
        return {
            "log_probs": actor.log_probs,
            "entropy": actor.entropy,
            "ref_log_probs": reference.log_probs,
            "values": values.float(),
            "scores": scores,
        }

    @contextmanager
    def _reference(self) -> Iterator[nn.Module]:
        """The policy as it was before training: a model of its own, or the actor without its adapters."""
        if self.reference is not None:
            yield self.reference
            return
        with without_adapters(self.actor.module):
            yield self.actor.engine

    def _micro_batches(self, sequences: Batch) -> list[Batch]:
        columns = (tensor.split(self.micro_rows) for tensor in sequences.values())
        return [dict(zip(sequences, part)) for part in zip(*columns)]

    def _order(self, index: int, epoch: int) -> torch.Generator | None:
        """Order of the rows in one pass; None where one minibatch holds them all."""
        if self.settings.batch_size == self.minibatch_rows * self.context.world.size:
            return None
        seed = (self.context.config.seed * 1_000_003 + index) * 1_009 + epoch
        return torch.Generator().manual_seed(seed)

    def _numbers(self, sums: Numbers, rates: Numbers) -> Numbers:
        """Sums of a step to means, and the KL coefficient's own step."""
        settings = self.settings
        updates = settings.ppo_epochs * settings.batch_size // (self.minibatch_rows * self.context.world.size)
        numbers = means(sums)
        for key in ("policy_loss", "value_loss", "clip_fraction"):
            numbers[key] = sums[key] / updates
        numbers |= {
            "returns": sums["returns"] / max(sums["tokens"], 1),
            "kl_coef": self.kl_coef,
            **rates,
            "grad_norm": self.actor.grad_norm(),
            "critic_grad_norm": self.critic.grad_norm(),
        }
        if settings.kl_target is not None:
            # The proportional controller of arXiv:1909.08593, section 2.2.
            error = min(max(numbers["kl"] / settings.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * settings.batch_size / settings.kl_horizon
        return numbers


def run(
    context: StageContext, models: Models, tokenizer: Any, data: StageData, judge: Judge | None = None
) -> dict[str, Any]:
    """Train the policy on `data.train`'s prompts, save it, and return the stage's summary.

    Args:
        judge: (prompt, completion) -> approved; used in evaluation only.
    """
    ppo = PPO(context, models, tokenizer, data)
    settings = context.config.ppo
    examples = [example for example in data.heldout if isinstance(example, Prompt)][: settings.eval_rows]

    def measure(when: str) -> dict[str, Any]:
        found = evaluate(context, ppo, examples, when, judge)
        record(context, 0 if when == "before" else settings.steps, found)
        return found

    before = measure_once(context, lambda: measure("before"))
    every = max(1, settings.steps // 10)

    def step(index: int) -> Numbers:
        numbers = ppo.step(index)
        if (index + 1) % every == 0:
            _record_sample(context, ppo, index + 1)
        return numbers

    run_steps(
        context,
        total_steps=settings.steps,
        step=step,
        engines={"actor": ppo.actor, "critic": ppo.critic},
        settings=settings,
        unit="tokens",
        shown=("reward", "kl", "response_length"),
        save_state=ppo.save_state,
        load_state=ppo.load_state,
    )
    after = measure("after")
    leave(context, ppo.actor, tokenizer)
    samples = [
        {"prompt": old["prompt"], "before": old["completion"], "after": new["completion"]}
        for old, new in zip(before["samples"], after["samples"])
    ]
    return {
        "before": before["numbers"],
        "after": after["numbers"],
        "steps": settings.steps,
        "parameters": {"actor": ppo.actor.parameter_counts, "critic": ppo.critic.parameter_counts},
        "samples": samples,
    }


def action_values(token_values: Tensor, completion_length: int) -> Tensor:
    """[B, T] -> [B, A]: the value of the state in which each completion token was drawn, one column before it."""
    return token_values[:, -completion_length - 1 : -1]


def _record_sample(context: StageContext, ppo: PPO, step: int) -> None:
    """The first sequence of the latest rollout, as text."""
    if context.world.is_main and ppo.experience is not None:
        real = ppo.experience.attention_mask[0].bool()
        context.recorder.text("completion", step, ppo.tokenizer.decode(ppo.experience.input_ids[0][real]))
