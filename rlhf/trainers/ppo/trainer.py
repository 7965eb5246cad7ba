"""One step of reinforcement learning: sample from the policy, score, and raise what scored above expectation.

Prompts flow in, an `Experience` of each rollout lies between, new weights flow out (arXiv:1707.06347; the arrangement
is that of arXiv:2203.02155).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlhf.data.batches import collate_ppo
from rlhf.data.examples import Prompt
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.ema import EMA
from rlhf.engine.engine import Batch, TrainingEngine
from rlhf.engine.metric_sums import Metrics, MetricSums, padding_share
from rlhf.generation.decoder import Decoder
from rlhf.generation.hybrid_engine import generating
from rlhf.generation.micro_batches import lengths
from rlhf.generation.strategy import choose
from rlhf.losses import advantages as estimators
from rlhf.losses.advantages import whiten
from rlhf.losses.log_probs import ends_with, masked
from rlhf.models.loading import ModelLoader
from rlhf.models.tokenizers import find_end_tokens
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo import flops
from rlhf.trainers.ppo.experience import Experience
from rlhf.trainers.ppo.forward_reuse import why_not
from rlhf.trainers.ppo.metrics import critic_statistics, explained_variance, means, rollout_statistics
from rlhf.trainers.ppo.pretraining_loss import Pretraining
from rlhf.trainers.ppo.reward_shaping import Shaping
from rlhf.trainers.ppo.scores import Rewards
from rlhf.trainers.ppo.scoring import Pass, Scorer
from rlhf.trainers.ppo.updates import MEANS, Updates


@dataclass(frozen=True)
class Models:
    """The four models of PPO, each loaded when its turn comes; `critic` and `reward` have a scalar head.

    Where the actor is trained by LoRA, `reference` is not loaded: it is the actor without its adapters.
    """

    actor: ModelLoader
    reference: ModelLoader
    critic: ModelLoader
    reward: ModelLoader


class PPO:
    """The engines, and one step of the algorithm."""

    def __init__(self, context: StageContext, models: Models, tokenizer: Any, data: StageData) -> None:
        self.context = context
        self.settings = settings = context.config.ppo
        # Before the models, which take longer; a loop of one's own may put another in its place.
        self.rewards: Callable[[Batch, Batch, Sequence[Prompt]], Batch] = Rewards(settings, tokenizer)
        self.accelerator = context.accelerator
        self.tokenizer = tokenizer
        self.experience: Experience | None = None  # the latest, for samples
        self.steps = settings.total_steps(len(data.train))
        minibatch, micro_rows = settings.minibatch(context.world.size)
        sizes = {
            "total_steps": self.steps * settings.updates,
            "batch_size": minibatch,
            "micro_batch_size": micro_rows,
        }
        held = context.placements
        pretraining = Pretraining.read(context, tokenizer)
        more = settings.pretraining(context.world.size)[0]
        self.actor = context.engine("actor", models.actor, settings.optimizer, **sizes, more=more)
        self.critic = (
            context.engine("critic", models.critic, settings.critic_optimizer, **sizes) if "critic" in held else None
        )
        if settings.ema:
            self.actor.ema = EMA(self.actor.optimizer, settings.ema, self.accelerator, on_host=settings.ema_on_host)
        self.reference = context.frozen("reference", models.reference) if "reference" in held else None
        self.reward = context.frozen("reward", models.reward) if "reward" in held else None
        self.scorer = Scorer(
            context,
            actor=self.actor,
            critic=self.critic,
            reference=self.reference,
            reward=self.reward,
            micro_rows=micro_rows,
        )
        self.shaping = Shaping(settings)
        self._estimate: estimators.Estimate = getattr(estimators, settings.method.function)
        self.updates = Updates(context, self.actor, self.critic, pretraining)
        apart = why_not(context, self.engines)
        if apart:
            context.say(f"ppo: rollouts are scored in passes of their own, not in those of the update: {apart}")
        self._keeps = not apart

        self.collate = collate = partial(
            collate_ppo,
            pad_token_id=tokenizer.pad_token_id,
            policy=context.shapes,
            maximum=context.config.data.max_prompt_length,
        )
        self.batch_rows = rows = settings.batch_size // context.world.size
        # Endless: a minibatch without a real row would move weights by momentum alone.
        share = settings.prompts(context.world.size)
        self.batches = context.batches(
            data.train, collate, batch_size=share * context.world.size, micro_batch_size=share, endless=True
        )
        # The same rows at a time as in training, so that evaluation adds no shapes.
        self.held_out = context.evaluation_batches(data.heldout, collate, settings, rows=rows)
        self.decoder = Decoder(
            context.accelerator,
            eos_ids=find_end_tokens(tokenizer, self.actor.module.generation_config),
            pad_id=tokenizer.pad_token_id,
            max_new_tokens=context.config.data.max_completion_length,
            shapes=context.shapes,
            batch_size=settings.generation_batch_size,
            team=choose(self.actor, context.config, say=context.say),
        )

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """The models that are trained, by role."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def step(self, index: int) -> Metrics:
        """One rollout and the updates that follow from it."""
        sums = MetricSums()
        prompts = self.accelerator.to_device(self.prompts(index))
        passes: list[Pass] | None = [] if self._keeps else None
        self.experience = experience = self.collect(prompts, sums, self.examples(index), keep=passes)
        with self.context.phases("training"):
            made = self.updates(experience, index, sums, kl_coef=self.shaping.kl_coef, passes=passes or ())
        found = sums.read()
        flops.tell(self.context, found, made["updates"], self.updates.pretraining, reused=self._keeps)
        numbers = means(found) | {key: found[key] / made["updates"] for key in MEANS if key in found}
        numbers |= {
            "returns": found["returns"] / max(found["tokens"], 1),
            "padding_share": padding_share(found),
            **made,
            **{_norm_of(name): engine.grad_norm() for name, engine in self.engines.items()},
        }
        if self.critic:
            numbers["explained_variance"] = explained_variance(found)
        return numbers | self.shaping.learn(numbers)

    def prompts(self, index: int) -> Batch:
        """This rank's prompts of rollout `index`, each as often as it is to be completed, one row after the other."""
        (prompts,) = self.batches.step(index)
        return {key: rows.repeat_interleave(self.settings.method.group_size, 0) for key, rows in prompts.items()}

    def examples(self, index: int) -> list[Prompt]:
        """What the rows of `prompts(index)` are made of."""
        return [example for example in self.batches.share(index) for _ in range(self.settings.method.group_size)]

    @torch.no_grad()
    def generate(self, prompts: Batch) -> Batch:
        """Complete a batch of prompts.

        Args:
            prompts: `prompt_ids`, `prompt_mask` [B, P], padded left, and `row_mask` [B].

        Returns:
            `input_ids`, `attention_mask` [B, P + A] and `action_mask` [B, A]; rows that only fill up the
            batch have no actions. `ended` [B]: 1 where the last action is an end token. Where padding is to be left
            out of passes over them, `lengths` (see `rlhf.generation.micro_batches`).
        """
        with self.context.phases.running("generation"), generating(self.actor, self.decoder.team) as model:
            completions = self.decoder.generate(
                model, prompts["prompt_ids"], prompts["prompt_mask"], self.settings.sampling
            )
            if self.actor.zero_stage == 3:  # weights will be gathered to other places, which a recording cannot follow
                self.decoder.release()
        self.accelerator.step_boundary("rollout/end")
        action_mask = (completions.mask * prompts["row_mask"].unsqueeze(1)).float()
        found = lengths(prompts["prompt_mask"], completions.mask, self.context.shapes)
        return ({} if found is None else {"lengths": found}) | {
            "input_ids": torch.cat([prompts["prompt_ids"], completions.ids], dim=1),
            "attention_mask": torch.cat([prompts["prompt_mask"], completions.mask], dim=1),
            "action_mask": action_mask,
            "ended": ends_with(completions.ids, action_mask, self.decoder.eos_ids),
        }

    def score(self, sequences: Batch, examples: Sequence[Prompt] = (), *, keep: list[Pass] | None = None) -> Batch:
        """What the models, and the reward functions, make of `generate`'s sequences.

        Args:
            examples: of the sequences that do not only fill up the batch, for reward functions; see `examples`.
            keep: is given the training passes by which policy and critic are scored; None: they need none.

        Returns:
            `log_probs`, `ref_log_probs`, `entropy` [B, A]; where there is a critic `values` [B, A]; the `scores` [B],
            and with reward functions the parts that they are the weighted sum of (`Rewards`). All float32.

        Raises:
            RewardError: a reward function failed.
        """
        with self.context.phases.running("scoring"):
            return self.rewards(self.scorer(sequences, keep), sequences, examples)

    def collect(
        self, prompts: Batch, sums: MetricSums, examples: Sequence[Prompt] = (), *, keep: list[Pass] | None = None
    ) -> Experience:
        """Rollout, scores, rewards and advantages of this rank's `prompts`; adds statistics to `sums`."""
        with self.context.phases("generation"):
            sequences = self.generate(prompts)
            self.decoder.make_room()
        with self.context.phases("scoring"):
            scored = self.score(sequences, examples, keep=keep)
        mask = sequences["action_mask"]
        values = scored["values"] * mask if "values" in scored else torch.zeros_like(mask)
        rewards = self.shaping.rewards(scored, mask, sequences["ended"])
        advantages, returns = self._estimate(rewards, values, mask, self.settings)
        sums.add(**rollout_statistics(scored, sequences, prompts["row_mask"]), returns=(returns * mask).sum())
        sums.add(**self.scorer.padding(sequences, prompts["row_mask"]))
        if self.critic:
            sums.add(**critic_statistics(values, returns, mask))
        if self.settings.method.whiten_advantages:
            advantages = whiten(advantages, mask, distributed.all_sum)
        self.accelerator.step_boundary("rollout/advantages")
        return Experience(
            input_ids=sequences["input_ids"],
            attention_mask=sequences["attention_mask"],
            action_mask=mask,
            log_probs=masked(scored["log_probs"], mask),
            ref_log_probs=masked(scored["ref_log_probs"], mask),
            values=values,
            scores=scored["scores"],
            advantages=advantages * mask,
            returns=returns * mask,
            lengths=sequences.get("lengths"),
        )

    def save_state(self) -> dict[str, Any]:
        return self.shaping.save_state() | ({"ema": self.actor.ema.save_state()} if self.actor.ema else {})

    def load_state(self, state: dict[str, Any]) -> None:
        self.shaping.load_state(state)
        if self.actor.ema:
            self.actor.ema.load_state(state["ema"])


def _norm_of(role: str) -> str:
    """The name under which a role's gradient norm is recorded."""
    return "grad_norm" if role == "actor" else f"{role}_grad_norm"
