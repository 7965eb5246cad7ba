"""The section of the schema about stage 3: rollouts, rewards, advantages, updates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlhf.config.estimators import ESTIMATORS, Estimator, KLEstimator, KLPlace, LossMean
from rlhf.config.loader import as_source_list
from rlhf.config.rewards import RewardFunctionConfig
from rlhf.config.training import OptimizerConfig, TrainingConfig, divide
from rlhf.config.types import ConfigModel, Fraction, OptionalPathOrHubId
from rlhf.config.validation_errors import error_at, short_repr
from rlhf.errors import ConfigError

_NEEDS = {
    "kl_target": "kl_coef",
    "ema_on_host": "ema",
    "ptx_length": "ptx_coef",
    "ptx_batch_size": "ptx_coef",
}
"""Keys of `ppo` that do nothing where another one is empty or 0."""


class SamplingConfig(ConfigModel):
    """How tokens are drawn from the policy."""

    temperature: float = Field(1.0, ge=0, description="0: the most likely token")
    top_k: int = Field(0, ge=0, description="draw from the k most likely tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the smallest set with this probability; 1: all")


class PPOConfig(TrainingConfig):
    """Stage 3: reinforcement learning from the reward model with PPO (arXiv:1707.06347, arXiv:2203.02155)."""

    better: ClassVar = {"reward": max, "approved_share": max}

    actor: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the policy; empty: this run's SFT model"
    )
    reward_model: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the reward model; empty: this run's reward model"
    )
    reward_weight: float = Field(
        1.0, ge=0, description="weight of the reward model's score; 0: no reward model is loaded or needed"
    )
    reward_functions: Annotated[
        tuple[RewardFunctionConfig, ...], BeforeValidator(lambda value: as_source_list(value, "function"))
    ] = Field(
        (),
        description="Python functions whose values, weighted, are added to the score: each module:function, "
        "rewards.py:function, plugin:name, or a mapping; they run in a process of their own (rlhf/rewards)",
    )
    reward_timeout: float = Field(
        60.0, gt=0, description="seconds that the functions may take for a rank's share of one batch, or to be imported"
    )
    critic: OptionalPathOrHubId = Field(
        None,
        description="folder or hub name of the model that the critic begins as; empty: the reward model, and without "
        "one the policy with a new head",
    )
    save_critic: bool = Field(
        True,
        description="leave the critic too, as `critic` beside the model, merged whatever lora.save says; PPO can begin "
        "with it again (ppo.critic)",
    )
    batch_size: int = Field(32, ge=1, description="completions of one rollout, over all ranks")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="rows in one forward pass of one rank that scores or updates; empty: minibatch_size / ranks",
    )
    eval_every: int = Field(
        0, ge=0, description="steps between evaluations on held-out prompts; 0: before training and after it only"
    )
    samples_every: int | None = Field(
        None, ge=0, description="rollouts between samples in the terminal and the records; 0: never; empty: steps / 10"
    )
    samples: int = Field(1, ge=1, description="completions shown each time, with prompt, score and KL")
    steps: int = Field(100, ge=1, description="rollouts; each is followed by `ppo_epochs` passes over it")
    epochs: int | None = Field(
        None, ge=1, description="passes over the prompts, in place of `steps`; empty: `steps` rollouts"
    )
    generation_batch_size: int | None = Field(
        None, ge=1, description="rows that a rank generates at a time, at most; empty: its share of batch_size"
    )
    generation_weights: Literal["auto", "whole", "layerwise", "tensor_parallel"] = Field(
        "auto",
        description="ZeRO-3's weights in rollouts: whole on each rank, layerwise (gathered as needed, slow), "
        "tensor_parallel (split); auto: the first that fits",
    )
    tensor_parallel: int | None = Field(
        None,
        ge=2,
        description="ranks among which tensor_parallel splits each layer; empty: as many of a machine as can",
    )
    estimator: str = Field(
        "gae",
        description="how advantages are estimated: gae (PPO, with a critic), or without one rloo and grpo (completions "
        "of one prompt are compared) or reinforce++ (compared over the batch); rlhf/config/estimators.py says when "
        "which",
    )
    completions_per_prompt: int | None = Field(
        None,
        ge=1,
        description="completions drawn of each prompt of a rollout, which has batch_size / these prompts; empty: the "
        "estimator's own (rloo 4, grpo 8, else 1)",
    )
    group_std: bool = Field(
        True,
        description="grpo: rewards of a prompt's completions are divided by their deviation; false: they are not "
        "(Dr. GRPO, arXiv:2503.20783, with loss_mean=constant)",
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over one rollout")
    minibatch_size: int | None = Field(
        None, ge=1, description="rows in one PPO update, over all ranks; empty: batch_size"
    )
    reuse_forward: bool = Field(
        True,
        description="with one update a rollout, policy and critic are scored by the very passes that the update "
        "differentiates, where there is memory and no dropout; false: in passes of their own",
    )
    kl_coef: float = Field(0.1, ge=0, description="weight of the KL penalty against the reference")
    kl_target: float | None = Field(
        None, gt=0, description="KL per sequence that an adaptive coefficient aims at; empty: kl_coef is fixed"
    )
    kl_horizon: int = Field(10_000, ge=1, description="sequences over which the adaptive coefficient reacts")
    kl_in: KLPlace | None = Field(
        None,
        description="where the penalty acts: reward (each token's) or loss (the policy's); empty: the estimator's own",
    )
    kl_estimator: KLEstimator | None = Field(
        None,
        description="k1, k2 or k3 of http://joschu.net/blog/kl-approx.html. k1 in the reward and k2 in the loss (token "
        "by token) reduce KL(policy || reference), k3 in the loss KL(reference || policy); k2 and k3 in the reward are "
        "biased, k1 in the loss does nothing; empty: the estimator's own",
    )
    loss_mean: LossMean | None = Field(
        None,
        description="the policy's loss is a mean over tokens, a mean over sequences of each one's mean, or a sum over "
        "tokens divided by a constant, max_completion_length a sequence; empty: the estimator's own",
    )
    normalize_scores: Literal["none", "batch", "running"] = Field(
        "none",
        description="scale scores, before they are clipped, to mean 0 and deviation 1: of each rollout (batch), or of "
        "all so far (running)",
    )
    score_clip: float = Field(5.0, gt=0, description="scores, each the weighted sum, are clipped to +- this")
    missing_eos_penalty: float | None = Field(
        None,
        ge=0,
        description="taken from the clipped score of a completion that is cut off, without an end token; empty: 0",
    )
    gamma: Fraction = Field(1.0, description="discount of later rewards")
    lam: Fraction = Field(0.95, description="lambda of generalized advantage estimation (arXiv:1506.02438)")
    clip: float = Field(0.2, gt=0, description="clip range of the policy ratio")
    entropy_coef: float = Field(
        0.0, ge=0, description="weight of a bonus for the entropy of the policy's tokens, which keeps it from narrowing"
    )
    kl_stop: float | None = Field(
        None,
        gt=0,
        description="a rollout's updates end with the one that finds the policy further than this (approx_kl, nats per "
        "token) from the one that drew it; empty: all are made",
    )
    dropout: float | None = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout in the policy's updates; as rollouts are scored without, above 0 the policy ratio begins "
        "near 1, not at it; empty: the model's own rates",
    )
    critic_dropout: float | None = Field(
        0.0, ge=0, lt=1, description="dropout in the critic's updates; empty: its own rates"
    )
    value_clip: float = Field(0.2, gt=0, description="clip range of the value update")
    whiten_advantages: bool | None = Field(
        None, description="scale each rollout's advantages to mean 0, deviation 1; empty: the estimator's own"
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a moving average of the policy's weights over updates, which is left as model-ema beside "
        "the model; e.g. 0.992, DeepSpeed-Chat's; empty: none",
    )
    ema_on_host: bool = Field(False, description="the average waits in the host's memory; false: on the device")
    ptx_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the loss of modelling the texts of data.pretraining, a mean over tokens, beside the "
        "policy's (arXiv:2203.02155, equation 2; there and in DeepSpeed-Chat 27.8); 0: none",
    )
    ptx_length: int | None = Field(
        None,
        ge=2,
        description="tokens of a row of these texts; empty: data.max_prompt_length + max_completion_length",
    )
    ptx_batch_size: int | None = Field(
        None, ge=1, description="rows of these texts in one update, over all ranks; empty: minibatch_size"
    )
    sampling: SamplingConfig = Field(SamplingConfig(), description="sampling of rollouts")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule of the policy")
    critic_optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule of the critic")

    @field_validator("estimator")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ESTIMATORS:
            raise ValueError(f"no estimator {short_repr(name)}; use one of {', '.join(ESTIMATORS)}")
        return name

    @model_validator(mode="after")
    def _rewarded(self) -> PPOConfig:
        if not self.reward_weight and not any(function.weight for function in self.reward_functions):
            raise error_at("reward_weight", "0 leaves nothing to learn from; name ppo.reward_functions with a weight")
        if not self.reward_weight and self.reward_model:
            raise error_at(
                "reward_model", "is not used where ppo.reward_weight is 0; leave it out, or give it a weight"
            )
        for label, count in Counter(function.label for function in self.reward_functions).items():
            if count > 1:
                raise error_at(
                    "reward_functions", f"{count} functions are called {label}; give each a `name` of its own"
                )
        return self

    @model_validator(mode="after")
    def _samples(self) -> PPOConfig:
        if self.sampling.temperature == 0:
            raise error_at("sampling.temperature", "0 draws one answer only, and PPO compares several; use e.g. 1")
        return self

    @model_validator(mode="after")
    def _keys_act(self) -> PPOConfig:
        for key, needed in _NEEDS.items():
            if getattr(self, key) != PPOConfig.model_fields[key].default and not getattr(self, needed):
                raise error_at(key, f"does nothing without ppo.{needed}; set that too, or leave this out")
        if self.kl_target is not None and self.batch_size >= 5 * self.kl_horizon:
            raise error_at(
                "kl_horizon",
                f"with {self.batch_size} completions a rollout (ppo.batch_size), one step could take all of the KL "
                f"coefficient away; set more than {self.batch_size // 5}",
            )
        return self

    @model_validator(mode="after")
    def _suits_estimator(self) -> PPOConfig:
        entry = ESTIMATORS[self.estimator]
        if self.method.group_size < entry.min_group_size:
            raise error_at(
                "completions_per_prompt",
                f"{self.estimator} compares the completions of a prompt, and {self.method.group_size} is too few; "
                f"use {entry.min_group_size} or more",
            )
        if self.critic and not entry.critic:
            raise error_at("critic", f"{self.estimator} has no critic; leave it out, or choose another ppo.estimator")
        for key in sorted({key for other in ESTIMATORS.values() for key in other.keys} - set(entry.keys)):
            if getattr(self, key) != PPOConfig.model_fields[key].default:
                able = ", ".join(name for name, other in ESTIMATORS.items() if key in other.keys)
                raise error_at(key, f"is for ppo.estimator={able}, which is {self.estimator}; change one of them")
        return self

    @model_validator(mode="after")
    def _kl_acts(self) -> PPOConfig:
        if (self.method.kl_in, self.method.kl_estimator) == ("loss", "k1"):
            key = "kl_estimator" if self.kl_estimator else "kl_in"
            raise error_at(
                key, "k1 in the loss has a gradient of mean 0 and holds nothing back; use kl_estimator=k2 or k3"
            )
        if self.kl_stop is not None and self.updates == 1:
            raise error_at(
                "kl_stop", "a rollout has one update, which nothing can follow; raise ppo.ppo_epochs, or leave it out"
            )
        return self

    @property
    def method(self) -> Estimator:
        """The estimator, with what the settings say in place of its paper."""
        entry = ESTIMATORS[self.estimator]
        said: dict[str, Any] = {
            "group_size": self.completions_per_prompt,
            "kl_in": self.kl_in,
            "kl_estimator": self.kl_estimator,
            "loss_mean": self.loss_mean,
            "whiten_advantages": self.whiten_advantages,
        }
        return replace(entry, **{name: value for name, value in said.items() if value is not None})

    @property
    def updates(self) -> int:
        """Updates that follow one rollout, where they do not end early."""
        return self.ppo_epochs * (self.batch_size // (self.minibatch_size or self.batch_size))

    @property
    def pretraining_rows(self) -> int:
        """Rows of raw text in one update, over all ranks; 0: there are none."""
        return (self.ptx_batch_size or self.minibatch_size or self.batch_size) if self.ptx_coef else 0

    def pretraining(self, world_size: int) -> tuple[int, int]:
        """(micro-batches of raw text of one rank in one update, rows of each).

        Raises:
            ConfigError: as `minibatch`; or the rows of an update do not divide so.
        """
        rows, micro = self.pretraining_rows, self.minibatch(world_size)[1]
        if not rows:
            return 0, micro
        micro = divide(rows, min(micro, max(rows // world_size, 1)), world_size, "ppo.ptx_batch_size", "ppo")
        return rows // (micro * world_size), micro

    def total_steps(self, prompts: int) -> int:
        """Rollouts of the stage, which has so many `prompts`; the last one begins another pass where it is not full."""
        if self.epochs is None:
            return self.steps
        return -(-self.epochs * prompts * self.method.group_size // self.batch_size)

    def shows_samples(self, step: int, steps: int) -> bool:
        """Whether samples of the rollout of `step`, counted from 1, of `steps` are shown."""
        every = max(1, steps // 10) if self.samples_every is None else self.samples_every
        return every > 0 and step % every == 0

    def minibatch(self, world_size: int) -> tuple[int, int]:
        """(rows of one PPO update over all ranks, rows of one forward pass of one rank).

        Raises:
            ConfigError: the batch does not divide into minibatches, those over ranks, or a rank's share into prompts.
        """
        minibatch = self.minibatch_size or self.batch_size
        if self.batch_size % minibatch:
            raise ConfigError(
                f"ppo.batch_size: {self.batch_size} is not a multiple of ppo.minibatch_size {minibatch}; "
                "change one of them"
            )
        rows = divide(minibatch, self.micro_batch_size, world_size, "ppo.minibatch_size", "ppo")
        self.prompts(world_size)
        return minibatch, rows

    def prompts(self, world_size: int) -> int:
        """Prompts of one rollout that a rank has, each with `method.group_size` rows.

        Raises:
            ConfigError: it has no whole number of them.
        """
        count = self.method.group_size
        if self.batch_size % (count * world_size):
            raise ConfigError(
                f"ppo.batch_size: {self.batch_size} completions are not {count} (ppo.completions_per_prompt) of each "
                f"prompt on {world_size} ranks; make it a multiple of {count * world_size}"
            )
        return self.batch_size // (count * world_size)
