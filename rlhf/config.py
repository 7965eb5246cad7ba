"""The one schema of a run: YAML files, `--set key=value` and Python all build a `Config`.

A section holds what one part of the program needs and is handed to that part alone. Unknown keys and
bad values raise `ConfigError` with the key's full path, and the nearest known key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    ValidationError,
    model_validator,
)

from rlhf.config_data import STAGES, ColumnsConfig, DataConfig, DatasetConfig, Stage
from rlhf.config_engine import EngineConfig, LoraConfig, RoleConfig, RolesConfig
from rlhf.errors import ConfigError
from rlhf.kinds import Folder, Fraction, OptionalName, Section
from rlhf.problems import at, explained
from rlhf.values import Keys, names_model_or_data, overridden, read_yaml

__all__ = [  # what mypy counts as ours
    "STAGES",
    "ColumnsConfig",
    "Config",
    "DataConfig",
    "DatasetConfig",
    "EngineConfig",
    "LoraConfig",
    "RoleConfig",
    "RolesConfig",
    "Stage",
]

EMBEDDED_RECIPE = Path(__file__).parent / "recipes" / "world.yaml"
"""What `rlhf` runs where it is given no file."""


class ModelConfig(Section):
    """The causal language model that fine-tuning starts from."""

    path: OptionalName = Field(
        None, description="folder or hub name of a causal language model; empty: the embedded tiny Llama, from scratch"
    )
    gguf_file: str | None = Field(
        None, description="name of a GGUF file inside `path`; its weights are de-quantized when loaded"
    )
    tokenizer: OptionalName = Field(None, description="folder or hub name of the tokenizer; empty: the model's own")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay; biases and norms are exempt")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of the first and second moment")
    eps: float = Field(1e-8, gt=0, description="term added to the denominator")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="shape after the warm-up")
    warmup: Fraction = Field(0.05, description="part of the steps over which the learning rate rises from 0")
    min_lr_ratio: Fraction = Field(0.1, description="rate of the last step, as a part of the peak")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")


class TrainingConfig(Section):
    """What every stage has: batches, steps, evaluation, checkpoints."""

    batch_size: int = Field(32, ge=1, description="rows in one optimizer step, over all ranks")
    micro_batch_size: int | None = Field(
        None, ge=1, description="rows in one forward pass of one rank; empty: batch_size / ranks"
    )
    eval_rows: int = Field(256, ge=1, description="held-out rows used for evaluation, at most")
    log_every: int = Field(1, ge=1, description="steps between records in metrics.jsonl and TensorBoard")
    checkpoint_every: int = Field(
        100, ge=0, description="steps between checkpoints; 0: only when interrupted and after the last"
    )

    def micro_batch(self, world_size: int, *, section: str) -> int:
        """Rows in one forward pass of one rank.

        Raises:
            ConfigError: `batch_size` is not a whole number of micro-batches on `world_size` ranks.
        """
        return _divide(self.batch_size, self.micro_batch_size, world_size, f"{section}.batch_size", section)


class EpochConfig(TrainingConfig):
    """Length of a stage that passes over a data set."""

    epochs: int = Field(1, ge=1, description="passes over the stage's rows")
    max_steps: int | None = Field(None, ge=1, description="stop after so many optimizer steps; empty: after `epochs`")
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="part of each layer's activations dropped in training; empty: the model's own rates",
    )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the stage."""
        steps = self.epochs * steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps else steps


class SFTConfig(EpochConfig):
    """Stage 1: supervised fine-tuning on demonstrations."""

    loss_on: Literal["completion", "all"] = Field("completion", description="tokens that enter the loss")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule")


class RewardConfig(EpochConfig):
    """Stage 2: a reward model from preferences."""

    batch_size: int = Field(32, ge=1, description="pairs in one optimizer step, over all ranks")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="pairs in one forward pass of one rank, which has twice as many rows; empty: batch_size / ranks",
    )
    eval_rows: int = Field(256, ge=1, description="held-out pairs used for evaluation, at most")
    model: OptionalName = Field(
        None, description="folder or hub name of the model to start from; empty: this run's SFT model"
    )
    reset_final_norm: Literal["auto", True, False] = Field(
        "auto",
        description="new norm under a new head: true, false; auto: where unequal gains would cost accuracy in bf16",
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule")


class SamplingConfig(Section):
    """How tokens are drawn from the policy."""

    temperature: float = Field(1.0, ge=0, description="0: the most likely token")
    top_k: int = Field(0, ge=0, description="draw from the k most likely tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the smallest set with this probability; 1: all")


class PPOConfig(TrainingConfig):
    """Stage 3: reinforcement learning from the reward model with PPO (arXiv:1707.06347, arXiv:2203.02155)."""

    actor: OptionalName = Field(None, description="folder or hub name of the policy; empty: this run's SFT model")
    reward_model: OptionalName = Field(
        None, description="folder or hub name of the reward model; empty: this run's reward model"
    )
    batch_size: int = Field(32, ge=1, description="prompts of one rollout, over all ranks")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="rows in one forward pass of one rank that scores or updates; empty: minibatch_size / ranks",
    )
    steps: int = Field(100, ge=1, description="rollouts; each is followed by `ppo_epochs` passes over it")
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
    ppo_epochs: int = Field(1, ge=1, description="passes over one rollout")
    minibatch_size: int | None = Field(
        None, ge=1, description="rows in one PPO update, over all ranks; empty: batch_size"
    )
    kl_coef: float = Field(0.1, ge=0, description="weight of the KL penalty against the reference")
    kl_target: float | None = Field(
        None, gt=0, description="KL per sequence that an adaptive coefficient aims at; empty: kl_coef is fixed"
    )
    kl_horizon: int = Field(10_000, ge=1, description="sequences over which the adaptive coefficient reacts")
    score_clip: float = Field(5.0, gt=0, description="reward-model scores are clipped to +- this")
    gamma: Fraction = Field(1.0, description="discount of later rewards")
    lam: Fraction = Field(0.95, description="lambda of generalized advantage estimation (arXiv:1506.02438)")
    clip: float = Field(0.2, gt=0, description="clip range of the policy ratio")
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
    whiten_advantages: bool = Field(True, description="scale each batch's advantages to mean 0, deviation 1")
    sampling: SamplingConfig = Field(SamplingConfig(), description="sampling of rollouts")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule of the policy")
    critic_optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule of the critic")

    @model_validator(mode="after")
    def _samples(self) -> PPOConfig:
        if self.sampling.temperature == 0:
            raise at("sampling.temperature", "0 draws one answer only, and PPO compares several; use e.g. 1")
        return self

    def minibatch(self, world_size: int) -> tuple[int, int]:
        """(rows of one PPO update over all ranks, rows of one forward pass of one rank).

        Raises:
            ConfigError: the batch does not divide into minibatches, or those over ranks.
        """
        minibatch = self.minibatch_size or self.batch_size
        if self.batch_size % minibatch:
            raise ConfigError(
                f"ppo.batch_size: {self.batch_size} is not a multiple of ppo.minibatch_size {minibatch}; "
                "change one of them"
            )
        return minibatch, _divide(minibatch, self.micro_batch_size, world_size, "ppo.minibatch_size", "ppo")


class Config(Section):
    """A run of one or more stages."""

    output: Folder = Field(Path("runs/default"), description="folder that the run writes to")
    seed: int = Field(0, ge=0, lt=2**32, description="decides initial weights, data order and sampling")
    accelerator: str = Field("auto", description="backend as `rlhf accelerators list` names it; auto: the best")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="numbers the models compute in; auto: the accelerator's best"
    )
    model: ModelConfig = Field(ModelConfig(), description=ModelConfig.__doc__)
    lora: LoraConfig = Field(LoraConfig(), description=LoraConfig.__doc__)
    data: DataConfig = Field(DataConfig(), description=DataConfig.__doc__)
    engine: EngineConfig = Field(EngineConfig(), description=EngineConfig.__doc__)
    roles: RolesConfig = Field(RolesConfig(), description=RolesConfig.__doc__)
    sft: SFTConfig = Field(SFTConfig(), description=SFTConfig.__doc__)
    reward: RewardConfig = Field(RewardConfig(), description=RewardConfig.__doc__)
    ppo: PPOConfig = Field(PPOConfig(), description=PPOConfig.__doc__)


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    options: Mapping[str, Any] | None = None,
    example: bool = True,
) -> Config:
    """Build a `Config` from a YAML file, `key.path=value` overrides (values are YAML too) and options.

    Paths in the file start from its folder, others from the working directory.

    Args:
        options: values of command-line options that are keys (`--seed`), above all others; None: not given.
        example: without a file the embedded recipe is the start, unless the overrides name a model or data of
            their own: its settings suit the embedded model and no other. False: the schema's defaults are.

    Raises:
        ConfigError: the file cannot be read or parsed, a key is unknown, or a value is wrong.
    """
    start = path
    if path is None and example and not names_model_or_data(overridden(Keys(), overrides)):
        start = EMBEDDED_RECIPE
    values = read_yaml(start) if start else Keys()
    return build_config(overridden(values, overrides, options), source=str(path) if path else "the configuration")


def build_config(values: Mapping[str, Any], *, source: str = "the configuration") -> Config:
    """Validate nested values; the first problem becomes a one-line `ConfigError`.

    It names the line or option that gave the value; else `source`.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explained(error, Config, values, source)) from error


def _divide(rows: int, micro: int | None, world_size: int, key: str, section: str) -> int:
    if rows % world_size:
        raise ConfigError(f"{key}: {rows} rows cannot be shared among {world_size} ranks; make it a multiple of that")
    micro = micro or rows // world_size
    if rows % (micro * world_size):
        raise ConfigError(
            f"{key}: {rows} is not a multiple of {section}.micro_batch_size {micro} x {world_size} ranks; "
            "change one of them"
        )
    return micro
