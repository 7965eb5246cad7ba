"""PPO, from top to bottom: draw completions, score them, estimate advantages, update policy and critic.

`PPOTrainer.step` is the algorithm (arXiv:1707.06347, arranged as in arXiv:2203.02155): `collect` turns prompts into an
`Experience`, by `generate` and `score`, and `update` turns that into new weights. `rlhf.trainers.loop.fit` calls the
steps; `rlhf.losses` has the equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.data.batches import collate_ppo
from rlhf.data.examples import Prompt
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from rlhf.engine.cpu_offload import on_device
from rlhf.engine.engine import (
    Batch,
    EngineStep,
    Loss,
    Metrics,
    MetricSums,
    TrainingEngine,
    padding_share,
    synchronized_step,
)
from rlhf.engine.fp32_weights import EMA
from rlhf.errors import ConfigError
from rlhf.losses import advantages as estimators
from rlhf.losses.advantages import whiten
from rlhf.losses.log_probs import masked, masked_mean, token_weights
from rlhf.losses.ppo import importance_weights, kl_estimate, policy_loss, value_is_clipped, value_loss
from rlhf.models.dropout import is_stochastic
from rlhf.models.forward import LogProbs, completion_log_probs, sequence_scores
from rlhf.models.lora import without_adapters
from rlhf.reporting.step_records import RankStep
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.evaluation import Approves, HeldoutPrompts
from rlhf.trainers.ppo.exact import check_exact
from rlhf.trainers.ppo.experience import Experience, ForwardPass, MicroBatcher, Rollout, Scores, join_rows
from rlhf.trainers.ppo.first_step import measure_direction, rescore_rows
from rlhf.trainers.ppo.forward_reuse import explain_separate_passes
from rlhf.trainers.ppo.memory_choices import choose_by_memory
from rlhf.trainers.ppo.metrics import (
    correction_sums,
    critic_sums,
    draw_means,
    draw_sums,
    explained_variance,
    group_sums,
    mean_score,
    padding_sums,
    record_arithmetic,
    rollout_means,
    rollout_sums,
    show_samples,
)
from rlhf.trainers.ppo.policy_decoder import PolicyDecoder
from rlhf.trainers.ppo.pretraining_loss import PretrainingLoss
from rlhf.trainers.ppo.recorded_rollout import StepContents
from rlhf.trainers.ppo.reports import report_advantages, report_rollout, report_scores
from rlhf.trainers.ppo.rewards import RewardFunction, RewardShaping, WeightedRewards
from rlhf.trainers.ppo.rollout_servers import RolloutServers
from rlhf.trainers.ppo.rollouts_ahead import RolloutsAhead
from rlhf.trainers.stage_models import ModelFactory, log_outputs, save_outputs
from rlhf.trainers.trainer import EvalResult
from rlhf.utils.statistics import LEAST_ROWS

# Of each update; the mean over a step's updates is recorded.
_UPDATE_METRICS = (
    "policy_loss",
    "value_loss",
    "clip_fraction",
    "approx_kl",
    "kl_loss",
    "value_clip_fraction",
    "ptx_loss",
)


class PPOTrainer:
    """PPO's models, prompts and step; a `rlhf.trainers.trainer.Trainer`.

    Attributes:
        actor, critic: the models that are trained; critic is None if the estimator needs none.
        reference, reward: the models that only score. With LoRA, reference is None: the actor without its adapters
            replaces it. If only functions compute the reward, `reward` is None.
        policy: draws the actor's completions.
        experience: that of the latest step, without its passes; None before the first step.
        given: a recorded rollout, which steps take instead of drawing one.
    """

    unit = "tokens"
    displayed = ("reward", "kl", "entropy", "truncated_share", "response_length")
    epoch_steps = None

    def __init__(
        self,
        context: StageContext,
        models: ModelFactory,
        tokenizer: Any,
        data: StageData,
        rule: Approves | None = None,
    ) -> None:
        """Load the models and prepare the batches; `rule` is used in evaluations only."""
        self.context, self.tokenizer, self.data = context, tokenizer, data
        self.accelerator = context.accelerator
        self.settings = settings = context.config.ppo
        examples = [example for example in data.heldout if isinstance(example, Prompt)][: settings.eval_rows]
        if settings.ends_early and len(examples) < LEAST_ROWS:
            raise ConfigError(
                f"ppo.stop: over_optimized needs at least {LEAST_ROWS} held-out prompts for a significant fall, got "
                f"{len(examples)}; raise data.heldout_fraction or ppo.eval_rows, or set never"
            )
        self.reward_fn: RewardFunction = WeightedRewards(settings, tokenizer)  # before the models, which load slowly
        self.shaping = RewardShaping(settings)
        self._estimate: estimators.Estimate = getattr(estimators, settings.method.function)
        self.total_steps = settings.total_steps(len(data.train))
        self.experience: Experience | None = None
        self.given: RankStep | None = None
        self._contents = StepContents([], {})

        ranks = context.world.size
        minibatch, micro_rows = settings.minibatch(ranks)
        self._minibatch_rows = minibatch // ranks  # of this rank
        self.micro_batcher = MicroBatcher(micro_rows, context.shapes)

        self.pretraining = PretrainingLoss.read(context, tokenizer)
        sizes = {
            "total_steps": self.total_steps * settings.updates,
            "batch_size": minibatch,
            "micro_batch_size": micro_rows,
        }
        roles = context.placements
        raw_text, _ = settings.pretraining(ranks)
        self.actor = context.engine(
            "actor", models.causal_lm, settings.optimizer, **sizes, extra_micro_batches=raw_text
        )
        self.critic: TrainingEngine | None = None
        if "critic" in roles:
            self.critic = context.engine("critic", models.scalar_head, settings.critic_optimizer, **sizes)
        if settings.ema:
            self.actor.ema = EMA(self.actor.optimizer, settings.ema, self.accelerator, on_host=settings.ema_on_host)
        self.reference = context.frozen("reference", models.causal_lm) if "reference" in roles else None
        self.reward = context.frozen("reward", models.scalar_head) if "reward" in roles else None
        judge = context.frozen("judge", models.scalar_head) if "judge" in roles else None
        choices = choose_by_memory(context)
        obstacle = explain_separate_passes(context, self.engines, choices)
        if obstacle:
            context.say(f"ppo: rollouts are scored in separate passes, not in those of the update: {obstacle}")
        self._reuses_passes = not obstacle
        self._is_stochastic = is_stochastic(self.actor.module)

        self.collate = partial(
            collate_ppo,
            pad_token_id=tokenizer.pad_token_id,
            policy=context.shapes,
            maximum=context.config.data.max_prompt_length,
        )
        self.batch_rows = settings.batch_size // ranks
        # Endless: a minibatch without a real row would move weights by momentum alone.
        prompts = settings.prompts(ranks)
        self.batches = context.batches(
            data.train, self.collate, batch_size=prompts * ranks, micro_batch_size=prompts, endless=True
        )
        # As many rows at a time as in training, so that evaluation adds no shapes.
        batches = context.evaluation_batches(data.heldout, self.collate, settings, rows=self.batch_rows)
        self.held_out = HeldoutPrompts(context, tokenizer, examples, batches, self.batch_rows, judge, rule)
        self.policy = PolicyDecoder(
            context,
            self.actor,
            tokenizer,
            self.micro_batcher,
            settings.sampling,
            batch_size=settings.generation_batch_size,
            rows=settings.generation_rows(ranks),
            layout="unchanged" if settings.generation_exact else choices.layout,
            is_local=not settings.rollout.where,
        )
        self.decoder = self.policy.decoder
        self.servers: RolloutServers | None = None
        self.ahead: RolloutsAhead | None = None
        self._weights = "policy"  # those that the actor has: the policy's, or their average
        if settings.rollout.where:
            texts = [example.prompt_ids for example in data.train if isinstance(example, Prompt)]
            self.servers = RolloutServers(context, self.actor, tokenizer, self.decoder, texts)
            if settings.rollout.staleness:
                self.ahead = RolloutsAhead(self.servers, self.decoder, self.prompts, self.total_steps)
        if settings.generation_exact:
            check_exact(context, self.actor, self.decoder, self.score_policy)

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """The models that are trained, by role."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def step(self, index: int, reward_fn: RewardFunction | None = None) -> Metrics:
        """Take step `index`: one rollout and its updates.

        `reward_fn` scores the completions in place of the settings' reward model and functions.
        """
        sums = MetricSums()
        own = self.prompts(index)
        self._contents = StepContents.of(
            self.batches.own_numbers(index),
            own,
            self.ahead.generator_state(index) if self.ahead else self.decoder.random.get_state(),
            keeps_log_probs=self.servers is not None,
        )
        prompts = self.accelerator.to_device(own)
        experience = self.collect(prompts, sums, self.examples(index), reward_fn, index=index)
        self.experience = replace(experience, passes=())
        with self.context.phases("training"):
            updates, rates = self.update(experience, index, sums)
        # After the update, whose passes are no longer in memory then.
        checks = self._check_first_step(reward_fn is None) if index == 0 else {}
        totals = sums.read()
        raw_text = self.pretraining.texts if self.pretraining else None
        copies = None if self.servers or self.given else self.decoder.copies
        record_arithmetic(self.context, totals, updates, raw_text, reused=self._reuses_passes, copies=copies)
        metrics = rollout_means(totals) | draw_means(totals)
        metrics |= {key: totals[key] / updates for key in _UPDATE_METRICS if key in totals}
        metrics |= {"update_gap": totals["update_gap"]} if "update_gap" in totals else {}
        metrics |= {
            "returns": totals["returns"] / max(totals["tokens"], 1),
            **(self.servers.metrics() if self.servers else {}),
            "padding_share": padding_share(totals),
            "updates": float(updates),
            **rates,
            **checks,
            "grad_norm": self.actor.grad_norm(),
        }
        if self.critic:
            metrics["critic_grad_norm"] = self.critic.grad_norm()
            metrics["explained_variance"] = explained_variance(totals)
        metrics |= self.shaping.update(metrics)
        if self.settings.shows_samples(index + 1, self.total_steps):
            show_samples(self.context, self.tokenizer, self.experience, index + 1)
        return metrics

    def _check_first_step(self, uses_settings_reward: bool) -> Metrics:
        """Return `direction` and, if the reward is that of the settings, `score_gap`."""
        assert self.experience
        with self.context.phases.running("scoring"):
            self.actor.engine.eval()
            checks = measure_direction(self.context, self.experience, self.score_policy)
            if uses_settings_reward:
                checks |= rescore_rows(self.context, self.reward, self.experience, self.micro_batcher.size)
        return checks

    def prompts(self, index: int) -> Batch:
        """Return this rank's prompts of rollout `index`, each repeated for its completions, one row after the other."""
        (prompts,) = self.batches.step(index)
        return {key: rows.repeat_interleave(self.settings.method.group_size, 0) for key, rows in prompts.items()}

    def examples(self, index: int) -> list[Prompt]:
        """Return the examples behind the rows of `prompts(index)`."""
        return [example for example in self.batches.share(index) for _ in range(self.settings.method.group_size)]

    # --- collect: from prompts to an Experience

    def collect(
        self,
        prompts: Batch,
        sums: MetricSums,
        examples: Sequence[Prompt] = (),
        reward_fn: RewardFunction | None = None,
        *,
        index: int = 0,
    ) -> Experience:
        """Draw and score completions of step `index`'s `prompts`, and estimate advantages; add metrics to `sums`."""
        with self.context.phases("generation"):
            rollout = self.draw(prompts, index)
            if not self.given:
                self.policy.count_steps()
        report_rollout(self.context.observation, rollout)
        with self.context.phases("scoring"):
            scores = self.score(rollout, examples, reward_fn, for_update=self._reuses_passes)
        self._contents.add(rollout, scores, given=reward_fn is not None)
        mask = rollout.action_mask
        report_scores(self.context.observation, scores, mask)
        values = torch.zeros_like(mask) if scores.values is None else scores.values * mask
        # The default limit is for the reward model's scores, not for those of a function.
        clip = self.settings.score_clip if reward_fn else self.settings.score_limit
        rewards, clipped = self.shaping.token_rewards(scores, rollout, clip)
        advantages, returns = self._estimate(rewards, values, mask, self.settings)
        center = mean_score(rollout, scores)
        sums.add(**rollout_sums(rollout, scores, center), returns=(returns * mask).sum(), **padding_sums(rollout))
        sums.add(
            **clipped, **draw_sums(rollout, scores), **group_sums(rollout, scores, self.settings.method.group_size)
        )
        if self.critic:
            sums.add(**critic_sums(values, returns, mask))
        if self.settings.method.whiten_advantages:
            advantages = whiten(advantages, mask, distributed.all_sum)
        report_advantages(self.context.observation, mask, rewards=rewards, advantages=advantages, returns=returns)
        self.accelerator.step_boundary("rollout/advantages")
        return Experience(
            input_ids=rollout.input_ids,
            attention_mask=rollout.attention_mask,
            action_mask=mask,
            log_probs=masked(scores.log_probs, mask),
            ref_log_probs=masked(scores.ref_log_probs, mask),
            values=values,
            reward=scores.reward,
            advantages=advantages * mask,
            returns=returns * mask,
            correction=self._correct(rollout, scores, sums),
            micro_batches=rollout.micro_batches,
            lengths=rollout.lengths,
            passes=scores.passes,
        )

    def _correct(self, rollout: Rollout, scores: Scores, sums: MetricSums) -> Tensor:
        """Return the weights of tokens that `ppo.rollout.correction` asks for; add their metrics to `sums`."""
        settings, mask = self.settings.rollout, rollout.action_mask
        if settings.correction == "none" or rollout.drawn_log_probs is None:
            return torch.ones_like(mask)
        weights = importance_weights(
            scores.log_probs, rollout.drawn_log_probs, mask, settings.correction, settings.correction_limit
        )
        sums.add(**correction_sums(scores.log_probs, rollout.drawn_log_probs, mask, weights))
        return weights

    @torch.no_grad()
    def generate(self, prompts: Batch, copies: int = 1) -> Rollout:
        """Complete prompts, of which `copies` after each other are equal; see `rlhf.data.batches.collate_ppo`."""
        if not self.servers:
            return self.policy.generate(prompts, copies)
        with self.context.phases.running("generation"):
            self.servers.hand_over((self.actor.steps, self._weights))
            numbers = self.decoder.draw_numbers(len(prompts["prompt_ids"]))
            rows = self.servers.request(prompts, numbers)()
            return self.policy.join(prompts, self.servers.join(rows))

    def draw(self, prompts: Batch, index: int) -> Rollout:
        """Return the rollout of step `index`: drawn now, drawn ahead by servers, or a recorded one.

        With a recorded one the generator moves on as if it had been drawn.
        """
        if self.given:
            if self.ahead:
                self.ahead.take(index, None)
            else:
                self.decoder.skip(len(prompts["prompt_ids"]))
            return self.policy.restore(prompts, self.given)
        if not self.ahead:
            return self.generate(prompts, self.settings.method.group_size)
        with self.context.phases.running("generation"):
            rows = self.ahead.take(index, (self.actor.steps, self._weights))
        return self.policy.join(prompts, self.ahead.servers.join(rows))

    def score(
        self,
        rollout: Rollout,
        examples: Sequence[Prompt] = (),
        reward_fn: RewardFunction | None = None,
        *,
        for_update: bool = False,
    ) -> Scores:
        """Score a rollout by the models and the reward functions.

        Reward functions need the `examples` behind the rollout's real rows; `reward_fn` replaces those of the settings.
        With `for_update`, policy and critic are scored by training passes, which are returned in `Scores.passes`.

        Raises:
            RewardError: a reward function failed.
        """
        with self.context.phases.running("scoring"):
            length = rollout.completion_length
            inputs = [
                (cut.select(rollout.input_ids, length), cut.select(rollout.attention_mask, length), cut.completion)
                for cut in rollout.micro_batches
            ]
            for engine in self.engines.values():
                engine.engine.eval()
            with torch.no_grad(), on_device(self.reference, self.reward):
                frozen = [self._score_frozen(*part) for part in inputs]
            if for_update:
                for engine in self.engines.values():
                    engine.train()
            # Policy and critic come last, because the activations of training passes are kept; the critic first, since
            # it has no logits.
            with torch.set_grad_enabled(for_update):
                values = [self._score_values(*part) if self.critic else None for part in inputs]
                passes = [ForwardPass(self.score_policy(*part), value) for part, value in zip(inputs, values)]

            join = partial(join_rows, rollout.micro_batches, completion_length=length)
            model_scores = join([score for _, score in frozen if score is not None]) if self.reward else None
            reward, parts = (reward_fn or self.reward_fn)(rollout, model_scores, examples)
            return Scores(
                log_probs=join([policy.log_probs.detach() for policy, _ in passes]),
                ref_log_probs=join([log_probs for log_probs, _ in frozen]),
                entropy=join([policy.entropy.detach() for policy, _ in passes if policy.entropy is not None]),
                values=join([value.detach().float() for value in values if value is not None]) if self.critic else None,
                reward=reward,
                reward_parts=parts,
                passes=tuple(passes) if for_update else (),
            )

    def _score_frozen(self, input_ids: Tensor, attention_mask: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """Return the reference's log-probabilities [n, a] and the reward model's scores [n] of a micro-batch."""
        scores = None
        with self.context.precision.autocast():
            with self._reference_policy() as model:
                log_probs = self._log_probs(model, input_ids, attention_mask, length).log_probs
            self.accelerator.step_boundary("score/reference")
            if self.reward:
                scores = sequence_scores(self.reward, input_ids, attention_mask)
                self.accelerator.step_boundary("score/reward")
        return log_probs, scores

    def _score_values(self, input_ids: Tensor, attention_mask: Tensor, length: int) -> Tensor:
        assert self.critic
        with self.context.precision.autocast():
            values = action_values(self.critic.engine(input_ids, attention_mask), length)
        self.accelerator.step_boundary("score/critic")
        return values

    def score_policy(self, input_ids: Tensor, attention_mask: Tensor, length: int) -> LogProbs:
        """Return log-probabilities and entropies of the last `length` tokens of a micro-batch."""
        with self.context.precision.autocast():
            outputs = self._log_probs(self.actor.engine, input_ids, attention_mask, length, entropy=True)
        self.accelerator.step_boundary("score/actor")
        return outputs

    def _log_probs(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, length: int, *, entropy: bool = False
    ) -> LogProbs:
        """Return a policy's log-probabilities of the last `length` tokens, at the sampling temperature."""
        temperature = self.settings.sampling.temperature
        return completion_log_probs(model, input_ids, attention_mask, length, temperature=temperature, entropy=entropy)

    @contextmanager
    def _reference_policy(self) -> Iterator[nn.Module]:
        """Yield the policy as it was before training: a separate model, or the actor without its adapters."""
        if self.reference is not None:
            yield self.reference
        else:
            with without_adapters(self.actor.module):
                yield self.actor.engine

    # --- update: from an Experience to new weights

    def update(self, experience: Experience, index: int, sums: MetricSums) -> tuple[int, dict[str, float]]:
        """Update on the rollout of step `index`, up to the update that exceeds `ppo.kl_stop`; add metrics to `sums`.

        Returns:
            The number of updates, and the policy's learning rates in the first one.
        """
        settings, updates = self.settings, 0
        kl_coef = torch.tensor(self.shaping.kl_coef, device=experience.action_mask.device)
        for engine in self.engines.values():
            engine.omitted_steps = index * settings.updates - engine.steps
        rates = self.actor.rates
        for epoch in range(settings.ppo_epochs):
            order = self.row_order(index, epoch)
            for minibatch in experience.minibatches(self._minibatch_rows, self.micro_batcher, order):
                # Of the whole global minibatch: losses are means over these, however rows are split.
                mask = minibatch.action_mask
                total, rows = distributed.all_sum(torch.stack([mask.sum(), mask.amax(1).sum()])).clamp_min(1)
                micro_batches: list[Any] = minibatch.split()
                actor_loss: Loss = partial(self._actor_loss, total=total, rows=rows, kl_coef=kl_coef)
                critic_loss: Loss = partial(self._critic_loss, total=total)
                steps: list[EngineStep] = [(self.actor, micro_batches, actor_loss)]
                if self.pretraining:
                    raw_text = self.pretraining.micro_batches(index * settings.updates + updates)
                    steps = [(self.actor, [*micro_batches, *raw_text], self.pretraining.add_to(actor_loss))]
                if self.critic:
                    steps.append((self.critic, micro_batches, critic_loss))
                update_sums = MetricSums()
                self.context.observation.update = updates
                if self.context.precision.loss_scaling and len(steps) > 1:
                    for step_sums in synchronized_step(steps):
                        update_sums.extend(step_sums, *_UPDATE_METRICS, "update_gap")
                else:  # one model after the other, so that the gradients of only one are in memory
                    for engine, parts, loss in steps:
                        update_sums.extend(engine.step(parts, loss), *_UPDATE_METRICS, "update_gap")
                sums.extend(update_sums, *_UPDATE_METRICS, *([] if updates else ["update_gap"]))
                updates += 1
                if settings.kl_stop is not None and update_sums.read()["approx_kl"] > settings.kl_stop:
                    return updates, rates
        return updates, rates

    def _actor_loss(
        self, model: nn.Module, part: Experience, *, total: Tensor, rows: Tensor, kl_coef: Tensor
    ) -> tuple[Tensor, Batch]:
        """Return the policy's loss on a micro-batch; its global minibatch has `total` actions in `rows` sequences."""
        settings, method, mask = self.settings, self.settings.method, part.action_mask
        longest = self.context.config.data.max_completion_length
        weights = token_weights(mask, method.loss_mean, tokens=total, sequences=rows, longest=longest)
        weights = weights * part.correction
        if part.passes:
            log_probs, entropy = part.passes[0].policy
        else:
            log_probs, entropy = self._log_probs(
                model, part.input_ids, part.attention_mask, part.completion_length, entropy=settings.entropy_coef > 0
            )
        loss = policy_loss(log_probs, part.log_probs, part.advantages, weights, clip=settings.clip, total=total)
        log_ratio = masked(log_probs.detach() - part.log_probs, mask)
        metrics = {
            "policy_loss": loss,
            "clip_fraction": ((log_ratio.exp() - 1).abs() > settings.clip).sum() / total,
            "approx_kl": masked_mean(kl_estimate(-log_ratio, "k3"), mask, total),
        }
        if not self._is_stochastic:
            metrics["update_gap"] = masked_mean(log_ratio.abs(), mask, total)
        if method.kl_in == "loss":
            drift = kl_estimate(masked(log_probs - part.ref_log_probs, mask), method.kl_estimator)
            metrics["kl_loss"] = masked_mean(drift, weights, total)
            loss = loss + kl_coef * metrics["kl_loss"]
        if settings.entropy_coef and entropy is not None:
            loss = loss - settings.entropy_coef * masked_mean(masked(entropy, mask), weights, total)
        return loss, metrics

    def _critic_loss(self, model: nn.Module, part: Experience, *, total: Tensor) -> tuple[Tensor, Batch]:
        """Return the critic's loss on a micro-batch; see `_actor_loss`."""
        settings, mask = self.settings, part.action_mask
        values = part.passes[0].values if part.passes else None
        if values is None:
            values = action_values(model(part.input_ids, part.attention_mask), part.completion_length)
        loss = value_loss(values, part.values, part.returns, mask, clip=settings.value_clip, total=total)
        clipped = masked(value_is_clipped(values.detach(), part.values, part.returns, settings.value_clip), mask)
        return loss, {"value_loss": loss, "value_clip_fraction": clipped.sum() / total}

    def row_order(self, index: int, epoch: int) -> torch.Generator | None:
        """Return the generator for the order of rows in one pass; None if one minibatch has all rows."""
        if self._minibatch_rows == self.batch_rows:
            return None
        seed = (self.context.config.seed * 1_000_003 + index) * 1_009 + epoch
        return torch.Generator().manual_seed(seed)

    def repeat_scoring(self) -> Iterator[tuple[Any, Callable[[], object]]]:
        """Yield the micro-batches of the last rollout, each with a function that scores it again by all models."""

        @torch.no_grad()
        def score(part: Experience) -> None:
            with self.context.phases.running("scoring"), on_device(self.reference, self.reward):
                self._score_frozen(part.input_ids, part.attention_mask, part.completion_length)
            if self.critic:
                self._score_values(part.input_ids, part.attention_mask, part.completion_length)
            self.score_policy(part.input_ids, part.attention_mask, part.completion_length)

        assert self.experience
        for engine in self.engines.values():
            engine.engine.eval()
        for part in self.experience.split():
            yield part, partial(score, part)

    # --- evaluation, checkpoints and results

    def evaluate(self, when: str) -> EvalResult:
        """Evaluate the policy on the held-out prompts, then the moving average of its weights if there is one.

        Completions are sampled with the same random numbers each time.
        """
        seed, draws = self.context.config.seed, self.settings.best_of if when == "before" else 1
        with self.decoder.seeded(seed):
            result = self.held_out.evaluate(when, self.generate, self.score, draws=draws)
        if not self.actor.ema or when == "before":  # the average starts at the same weights
            return result
        self._weights = "average"
        with self.actor.ema.in_place(), self.decoder.seeded(seed):
            average = self.held_out.evaluate(f"{when}, by the average", self.generate, self.score)
        self._weights = "policy"
        return result._replace(numbers=result.numbers | {f"ema_{key}": value for key, value in average.numbers.items()})

    def describe_step(self) -> RankStep:
        """Return the last step's rollout."""
        return self._contents.describe()

    def save(self, folder: Path) -> None:
        """Save the policy, and the critic if `ppo.save_critic` is set."""
        save_outputs(self.context, self.actor, self.tokenizer, folder, self.critic)

    def summarize(self) -> dict[str, Any]:
        """Log what was saved and return the summary's entries about models and data."""
        log_outputs(self.context, self.actor)
        counts = {name: engine.parameter_counts for name, engine in self.engines.items()}
        return {"parameters": counts, **self.data.summary}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs in addition to the engines."""
        ahead = {"ahead": self.ahead.state_dict()} if self.ahead else {}
        return self.shaping.state_dict() | {"random": self.decoder.random.get_state(), **ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.shaping.load_state_dict(state)
        self.decoder.random.set_state(state["random"])
        if self.ahead:
            self.ahead.load_state_dict(state["ahead"])


def action_values(token_values: Tensor, completion_length: int) -> Tensor:
    """Return the values [B, A] of the states before each completion token, which are one column to the left of it."""
    return token_values[:, -completion_length - 1 : -1]
