"""The section about stage 3, PPO: rewards, rollouts, advantages, updates."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from rlhf.config import paths
from rlhf.config.estimators import ESTIMATORS, Estimator, KLEstimator, KLPlace, LossMean
from rlhf.config.loader import TrackedStr, as_source_list
from rlhf.config.rollout import RolloutConfig
from rlhf.config.training import OptimizerConfig, SamplingConfig, TrainingConfig, divide_batch
from rlhf.config.types import ConfigModel, Fraction, OptionalPathOrHubId, error_at, short_repr
from rlhf.errors import ConfigError

_PYTHON = ".py"
_FUNCTION = re.compile(r"(?P<where>[^:]+):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_LABEL = re.compile(r"[\w.-]+")
_MODEL_SCORE_CLIP = 5.0  # DeepSpeed-Chat's, for scores of its reward model
_NEEDED_KEYS = {
    "kl_target": "kl_coef",
    "ema_on_host": "ema",
    "ptx_length": "ptx_coef",
    "ptx_batch_size": "ptx_coef",
}
"""Keys of `ppo` that have no effect if another key is empty or 0."""


def resolve_function(value: Any) -> Any:
    """Return `where:name`; the path of a file is made relative to the working directory.

    Raises:
        ValueError: the value does not have this form.
    """
    match = _FUNCTION.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f"expected module:function, rewards.py:function or plugin:name, got {short_repr(value)}")
    where = match["where"]
    if where.endswith(_PYTHON):
        where = paths.join_path(value.folder, where) if isinstance(value, TrackedStr) else os.path.expanduser(where)
    return f"{where}:{match['name']}"


def _make_function_absolute(function: str) -> str:
    where, _, name = function.rpartition(":")
    return f"{paths.join_path(os.getcwd(), where)}:{name}" if where.endswith(_PYTHON) else function


def _validate_label(value: Any) -> Any:
    if isinstance(value, str) and not _LABEL.fullmatch(value):
        raise ValueError(f"expected letters, digits and any of _.-, got {short_repr(value)}")
    return value


# JSON is read from other working directories, so its paths are absolute.
Function = Annotated[str, BeforeValidator(resolve_function), PlainSerializer(_make_function_absolute, when_used="json")]


class RewardFunctionConfig(ConfigModel):
    """A Python function that scores completions."""

    function: Function = Field(
        description="module:function, rewards.py:function (a file) or plugin:name; called with prompt, completion, row"
    )
    weight: float = Field(1.0, description="weight of its values in the score; 0: they are only recorded")
    name: Annotated[str | None, BeforeValidator(_validate_label)] = Field(
        None, description="name in the records, reward/<name>; empty: the function's own name"
    )

    @property
    def label(self) -> str:
        """The function's name in the records, after `reward/`."""
        return self.name or self.function.rpartition(":")[2].rpartition(".")[2]


class PPOConfig(TrainingConfig):
    """Stage 3: reinforcement learning from the reward model with PPO (arXiv:1707.06347, arXiv:2203.02155)."""

    better: ClassVar = {"reward": max, "judge_reward": max, "approved_share": max}

    actor: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the policy; empty: this run's SFT model"
    )
    reward_model: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the reward model; empty: this run's reward model"
    )
    judge: OptionalPathOrHubId = Field(
        None,
        description="folder or hub name of a second reward model, trained on other pairs: it scores held-out "
        "completions and never trains the policy, so its score may fall if the policy is over-optimized; empty: none",
    )
    best_of: int = Field(
        1,
        ge=1,
        description="completions of each held-out prompt that are drawn before training, to show what the best of n by "
        "the reward would earn without training (rlhf report); 1: no more than are evaluated",
    )
    stop: Literal["never", "over_optimized"] = Field(
        "never",
        description="over_optimized: end training at the first evaluation at which the judge's score has fallen "
        "significantly since an earlier one while the reward has risen; needs ppo.judge and keep=best(judge_reward)",
    )
    reward_weight: float = Field(
        1.0, ge=0, description="weight of the reward model's score; 0: no reward model is loaded or needed"
    )
    reward_functions: Annotated[
        tuple[RewardFunctionConfig, ...], BeforeValidator(lambda value: as_source_list(value, "function"))
    ] = Field(
        (),
        description="Python functions whose weighted values are added to the score: each module:function, "
        "rewards.py:function, plugin:name, or a mapping; they run in a separate process (rlhf/rewards)",
    )
    reward_timeout: float = Field(
        60.0,
        gt=0,
        description="seconds that the functions may take to be imported, or to score one rank's share of a batch",
    )
    critic: OptionalPathOrHubId = Field(
        None,
        description="folder or hub name of the model that the critic starts from; empty: the reward model, or without "
        "one the policy with a new head",
    )
    save_critic: bool = Field(
        True,
        description="save the critic too, as `critic` next to the model and always merged; another run can start from "
        "it (ppo.critic)",
    )
    batch_size: int = Field(32, ge=1, description="completions per rollout, over all ranks")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="rows per forward pass on one rank, when scoring and updating; empty: minibatch_size / ranks",
    )
    eval_every: int = Field(
        0, ge=0, description="steps between evaluations on held-out prompts; 0: only before and after training"
    )
    samples_every: int | None = Field(
        None,
        ge=0,
        description="rollouts between samples in the terminal and the records; 0: no samples; empty: steps / 10",
    )
    samples: int = Field(1, ge=1, description="completions shown each time, with prompt, score and KL")
    steps: int = Field(100, ge=1, description="rollouts; each is followed by `ppo_epochs` passes over it")
    epochs: int | None = Field(
        None, ge=1, description="passes over the prompts, instead of `steps`; empty: `steps` rollouts"
    )
    generation_batch_size: int | None = Field(
        None,
        ge=1,
        description="maximum number of rows that a rank generates at a time, which changes samples by rounding "
        "only; empty: its share of batch_size",
    )
    generation_weights: Literal["auto", "whole", "layerwise", "tensor_parallel"] = Field(
        "auto",
        description="ZeRO-3's weights in rollouts: whole on each rank, tensor_parallel (split over ranks), "
        "layerwise (gathered layer by layer, slow); auto: the first of them that fits in memory",
    )
    generation_exact: bool = Field(
        False,
        description="log-probabilities of drawn tokens equal those of the training passes bit for bit, by slower "
        "operators whose numbers do not depend on the batch; refused on a device or a model for which that fails",
    )
    tensor_parallel: int | None = Field(
        None,
        ge=2,
        description="number of ranks among which tensor_parallel splits each layer; empty: as many as possible within "
        "a machine",
    )
    estimator: str = Field(
        "gae",
        description="how advantages are estimated: gae (PPO, with a critic), or without a critic rloo and grpo (which "
        "compare completions of one prompt) or reinforce++ (which compares over the batch); "
        "rlhf/config/estimators.py helps to choose",
    )
    completions_per_prompt: int | None = Field(
        None,
        ge=1,
        description="completions of each prompt in a rollout, which has batch_size / completions_per_prompt prompts; "
        "empty: the estimator's default (rloo 4, grpo 8, else 1)",
    )
    group_std: bool = Field(
        True,
        description="grpo: divide the rewards of a prompt's completions by their standard deviation; false: do not "
        "(Dr. GRPO, arXiv:2503.20783, with loss_mean=constant)",
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over one rollout")
    minibatch_size: int | None = Field(None, ge=1, description="rows per PPO update, over all ranks; empty: batch_size")
    reuse_forward: bool = Field(
        True,
        description="with one update per rollout, score policy and critic with the same forward passes that the update "
        "differentiates, if memory allows and there is no dropout; false: with separate passes",
    )
    kl_coef: float = Field(0.1, ge=0, description="weight of the KL penalty against the reference")
    kl_target: float | None = Field(
        None, gt=0, description="KL per sequence that an adaptive coefficient aims at; empty: kl_coef is constant"
    )
    kl_horizon: int = Field(10_000, ge=1, description="number of sequences over which the adaptive coefficient reacts")
    kl_in: KLPlace | None = Field(
        None,
        description="where the penalty is applied: reward (of each token) or loss (of the policy); empty: the "
        "estimator's default",
    )
    kl_estimator: KLEstimator | None = Field(
        None,
        description="k1, k2 or k3 of http://joschu.net/blog/kl-approx.html. k1 in the reward and k2 in the loss (token "
        "by token) reduce KL(policy || reference), k3 in the loss KL(reference || policy); k2 and k3 in the reward are "
        "biased, k1 in the loss has no effect; empty: the estimator's default",
    )
    loss_mean: LossMean | None = Field(
        None,
        description="how the policy's loss is averaged: over all tokens (token), over the means of sequences "
        "(sequence), or as a sum divided by max_completion_length times the sequences (constant); empty: the "
        "estimator's default",
    )
    normalize_scores: Literal["none", "batch", "running"] = Field(
        "none",
        description="scale scores to mean 0 and standard deviation 1 before they are clipped: over each rollout "
        "(batch), or over all rollouts so far (running)",
    )
    score_clip: float | None = Field(
        None,
        gt=0,
        description="scores (weighted sums) are clipped to plus or minus this value; empty: 5, as in "
        "DeepSpeed-Chat, if only a reward model scores; no clip if Python functions score",
    )
    missing_eos_penalty: float | None = Field(
        None,
        ge=0,
        description="subtracted from the clipped score of a completion that is cut off before its end token; empty: 0",
    )
    gamma: Fraction = Field(1.0, description="discount of later rewards")
    lam: Fraction = Field(0.95, description="lambda of generalized advantage estimation (arXiv:1506.02438)")
    clip: float = Field(0.2, gt=0, description="clip range of the policy ratio")
    entropy_coef: float = Field(
        0.0, ge=0, description="weight of a bonus for the entropy of the policy, which keeps its samples diverse"
    )
    kl_stop: float | None = Field(
        None,
        gt=0,
        description="stop a rollout's updates after the first one that finds the policy further than this (approx_kl, "
        "nats per token) from the policy that sampled the rollout; empty: never",
    )
    dropout: float | None = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout rate in the policy's updates; rollouts are scored without, so above 0 the policy ratio "
        "starts near 1 instead of at 1; empty: the model's own rates",
    )
    critic_dropout: float | None = Field(
        0.0, ge=0, lt=1, description="dropout rate in the critic's updates; empty: the model's own rates"
    )
    value_clip: float = Field(0.2, gt=0, description="clip range of the value update")
    whiten_advantages: bool | None = Field(
        None,
        description="scale each rollout's advantages to mean 0 and standard deviation 1; empty: the estimator's "
        "default",
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a moving average of the policy's weights, saved as model-ema next to the model; e.g. "
        "0.992, as in DeepSpeed-Chat; empty: no average",
    )
    ema_on_host: bool = Field(False, description="store the moving average in the host's memory; false: on the device")
    ptx_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the language-modelling loss on data.pretraining (mean per token), added to the policy "
        "loss (arXiv:2203.02155, equation 2; 27.8 there and in DeepSpeed-Chat); 0: off",
    )
    ptx_length: int | None = Field(
        None,
        ge=2,
        description="tokens per row of these texts; empty: data.max_prompt_length + max_completion_length",
    )
    ptx_batch_size: int | None = Field(
        None, ge=1, description="rows of these texts per update, over all ranks; empty: minibatch_size"
    )
    rollout: RolloutConfig = Field(RolloutConfig(), description=RolloutConfig.__doc__)
    sampling: SamplingConfig = Field(SamplingConfig(), description="sampling of rollouts")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule of the policy")
    critic_optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule of the critic")

    @field_validator("estimator")
    @classmethod
    def _check_estimator(cls, name: str) -> str:
        if name not in ESTIMATORS:
            raise ValueError(f"unknown estimator {short_repr(name)}; use one of {', '.join(ESTIMATORS)}")
        return name

    @model_validator(mode="after")
    def _check_rewards_and_sampling(self) -> PPOConfig:
        if not self.reward_weight and not any(function.weight for function in self.reward_functions):
            raise error_at("reward_weight", "there is no reward if this is 0; add ppo.reward_functions with a weight")
        if not self.reward_weight and self.reward_model:
            raise error_at("reward_model", "not used if ppo.reward_weight is 0; remove this key, or set a weight")
        if self.selection_metric == "judge_reward" and not self.judge:
            raise error_at("keep", f"{self.keep} needs ppo.judge, a second reward model; set that too")
        if self.stop == "over_optimized" and self.selection_metric != "judge_reward":
            raise error_at(
                "stop", "over_optimized would save the model that it finds over-optimized; set keep=best(judge_reward)"
            )
        for label, count in Counter(function.label for function in self.reward_functions).items():
            if count > 1:
                raise error_at(
                    "reward_functions", f"{count} functions are called {label}; give each a different `name`"
                )
        if self.sampling.temperature == 0:
            raise error_at(
                "sampling.temperature", "PPO needs different completions, and 0 samples only one; set e.g. 1"
            )
        return self

    @model_validator(mode="after")
    def _check_rollout(self) -> PPOConfig:
        if not self.rollout.where:
            if self.rollout != RolloutConfig():
                raise error_at(
                    "rollout", "has no effect without ppo.rollout.where; set that too, or remove this section"
                )
            return self
        if self.rollout.correction == "none" and self.rollout.staleness:
            raise error_at(
                "rollout.staleness",
                "with 1, completions come from older weights, which needs ppo.rollout.correction; set that to tis "
                "or mis, or this to 0",
            )
        if self.rollout.correction == "none" and self.rollout.correction_limit != RolloutConfig().correction_limit:
            raise error_at("rollout.correction_limit", "has no effect without ppo.rollout.correction; set that too")
        if self.sampling.top_k or self.sampling.top_p < 1:
            raise error_at(
                "sampling",
                "servers draw from all tokens, so that drawn and trained log-probabilities are of one distribution; "
                "remove top_k and top_p, or ppo.rollout.where",
            )
        if self.generation_exact:
            raise error_at("generation_exact", "is about rollouts that are drawn here; remove it, or ppo.rollout.where")
        return self

    @model_validator(mode="after")
    def _check_needed_keys(self) -> PPOConfig:
        for key, needed in _NEEDED_KEYS.items():
            if getattr(self, key) != PPOConfig.model_fields[key].default and not getattr(self, needed):
                raise error_at(key, f"has no effect without ppo.{needed}; set that too, or remove this key")
        if self.kl_target is not None and self.batch_size >= 5 * self.kl_horizon:
            raise error_at(
                "kl_horizon",
                f"one step with {self.batch_size} completions (ppo.batch_size) could reduce the KL coefficient to 0; "
                f"set more than {self.batch_size // 5}",
            )
        if self.kl_stop is not None and self.updates == 1:
            raise error_at(
                "kl_stop", "has no effect with one update per rollout; increase ppo.ppo_epochs, or remove this key"
            )
        return self

    @model_validator(mode="after")
    def _check_estimator_keys(self) -> PPOConfig:
        estimator = ESTIMATORS[self.estimator]
        if self.method.group_size < estimator.min_group_size:
            raise error_at(
                "completions_per_prompt",
                f"{self.estimator} compares the completions of a prompt and needs at least {estimator.min_group_size}, "
                f"got {self.method.group_size}; set a larger number",
            )
        if self.critic and not estimator.critic:
            raise error_at(
                "critic", f"{self.estimator} has no critic; remove this key, or choose another ppo.estimator"
            )
        for key in sorted({key for other in ESTIMATORS.values() for key in other.keys} - set(estimator.keys)):
            if getattr(self, key) != PPOConfig.model_fields[key].default:
                able = " or ".join(name for name, other in ESTIMATORS.items() if key in other.keys)
                raise error_at(key, f"needs ppo.estimator={able}, got {self.estimator}; change one of them")
        if (self.method.kl_in, self.method.kl_estimator) == ("loss", "k1"):
            key = "kl_estimator" if self.kl_estimator else "kl_in"
            raise error_at(key, "k1 has no effect in the loss (its gradient has mean 0); set kl_estimator=k2 or k3")
        return self

    @property
    def ends_early(self) -> bool:
        """See `TrainingConfig`."""
        return self.stop == "over_optimized"

    @property
    def method(self) -> Estimator:
        """The estimator, with the settings that replace its defaults."""
        settings: dict[str, Any] = {
            "group_size": self.completions_per_prompt,
            "kl_in": self.kl_in,
            "kl_estimator": self.kl_estimator,
            "loss_mean": self.loss_mean,
            "whiten_advantages": self.whiten_advantages,
        }
        replaced = {key: value for key, value in settings.items() if value is not None}
        return replace(ESTIMATORS[self.estimator], **replaced)

    @property
    def score_limit(self) -> float | None:
        """The value to which the scores of the settings' model and functions are clipped; None: they are not."""
        by_functions = any(function.weight for function in self.reward_functions)
        return self.score_clip or (None if by_functions else _MODEL_SCORE_CLIP)

    @property
    def updates(self) -> int:
        """Updates after each rollout, if `kl_stop` does not end them early."""
        return self.ppo_epochs * (self.batch_size // (self.minibatch_size or self.batch_size))

    @property
    def pretraining_rows(self) -> int:
        """Rows of raw text per update, over all ranks; 0 without pretraining texts."""
        return (self.ptx_batch_size or self.minibatch_size or self.batch_size) if self.ptx_coef else 0

    def pretraining(self, world_size: int) -> tuple[int, int]:
        """Return (micro-batches of raw text per update on one rank, rows of each).

        Raises:
            ConfigError: as `minibatch`; or the rows of an update cannot be divided among the ranks.
        """
        rows, micro = self.pretraining_rows, self.minibatch(world_size)[1]
        if not rows:
            return 0, micro
        micro = divide_batch(rows, min(micro, max(rows // world_size, 1)), world_size, "ppo.ptx_batch_size", "ppo")
        return rows // (micro * world_size), micro

    def total_steps(self, prompts: int) -> int:
        """Return the number of rollouts for this number of prompts; the next pass fills the last rollout."""
        if self.epochs is None:
            return self.steps
        return -(-self.epochs * prompts * self.method.group_size // self.batch_size)

    def shows_samples(self, step: int, steps: int) -> bool:
        """Return whether samples of the rollout of `step` (counted from 1, out of `steps`) are shown."""
        every = max(1, steps // 10) if self.samples_every is None else self.samples_every
        return every > 0 and step % every == 0

    def minibatch(self, world_size: int) -> tuple[int, int]:
        """Return (rows of one PPO update over all ranks, rows of one forward pass on one rank).

        Raises:
            ConfigError: the batch cannot be divided into minibatches, these among ranks, or a rank's share into
                prompts.
        """
        minibatch = self.minibatch_size or self.batch_size
        if self.batch_size % minibatch:
            raise ConfigError(
                f"ppo.batch_size: {self.batch_size} is not a multiple of ppo.minibatch_size {minibatch}; "
                "change one of them"
            )
        rows = divide_batch(minibatch, self.micro_batch_size, world_size, "ppo.minibatch_size", "ppo")
        self.prompts(world_size)
        return minibatch, rows

    def generation_rows(self, world_size: int) -> int:
        """Return the most rows that a rank generates at a time."""
        share = self.batch_size // world_size
        return min(self.generation_batch_size or share, share)

    def prompts(self, world_size: int) -> int:
        """Return the prompts of one rollout on one rank, each with `method.group_size` completions.

        Raises:
            ConfigError: the batch has no whole number of prompts per rank.
        """
        count = self.method.group_size
        if self.batch_size % (count * world_size):
            raise ConfigError(
                f"ppo.batch_size: {self.batch_size} completions cannot be divided into {count} per prompt "
                f"(ppo.completions_per_prompt) on {world_size} ranks; make it a multiple of {count * world_size}"
            )
        return self.batch_size // (count * world_size)
