"""The schema of a run: YAML files, `--set key=value` and Python all build a `Config`.

Each section configures one part of the program. Unknown keys and invalid values raise `ConfigError` with the key's full
path and the closest known key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from accelerators import OPERATIONS
from rlhf.config.data import EVERY_STAGE, STAGES, ColumnsConfig, DataConfig, DatasetConfig, Share, Stage, share_of
from rlhf.config.loader import TrackedDict, apply_overrides, names_model_or_data, read_yaml
from rlhf.config.ppo import PPOConfig, RewardFunctionConfig
from rlhf.config.training import (
    DistillConfig,
    DPOConfig,
    EpochConfig,
    OptimizerConfig,
    RewardConfig,
    SamplingConfig,
    SFTConfig,
    TrainingConfig,
)
from rlhf.config.types import ConfigModel, Folder, OptionalPathOrHubId, explain_validation_error, short_repr

__all__ = [  # the names that other packages import from here
    "EVERY_STAGE",
    "STAGES",
    "ColumnsConfig",
    "Config",
    "DPOConfig",
    "DataConfig",
    "DatasetConfig",
    "DistillConfig",
    "EngineConfig",
    "EpochConfig",
    "LoraConfig",
    "OptimizerConfig",
    "PPOConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RoleConfig",
    "RolesConfig",
    "SFTConfig",
    "SamplingConfig",
    "Share",
    "Stage",
    "TrainingConfig",
    "share_of",
]

Offload = Literal["none", "optimizer", "parameters", "all"]
Frozen = Literal["auto", "int8", "int4"]
_LARGEST_COPY = 0.1  # of the device's memory, for `lora.merge: auto`
ZeroStage = Literal[0, 1, 2, 3]

EMBEDDED_RECIPE = Path(__file__).parent / "recipes" / "world.yaml"
"""The recipe that `rlhf` runs without a file."""


class ModelConfig(ConfigModel):
    """The causal language model that fine-tuning starts from."""

    path: OptionalPathOrHubId = Field(
        None,
        description="folder or hub name of a causal language model; empty: the embedded tiny Llama, trained from "
        "scratch",
    )
    gguf_file: str | None = Field(
        None, description="name of a GGUF file inside `path`; its weights are dequantized when loaded"
    )
    tokenizer: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the tokenizer; empty: the model's own"
    )
    eos_token: str | None = Field(
        None,
        min_length=1,
        description="token that ends a reply, added to tokenizer and model if they do not have it (with LoRA, "
        "lora.also_train: [embeddings] trains it); empty: the tokenizer's own",
    )
    vocabulary_multiple: int = Field(
        1,
        ge=1,
        description="round the embeddings' rows up to a multiple of this, e.g. 8 or 64, which some devices multiply "
        "faster; added rows are the mean of the others and belong to no token",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")


class LoraConfig(ConfigModel):
    """LoRA: train small adapters on frozen weights, in all stages (arXiv:2106.09685)."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: no LoRA, all weights are trained")
    alpha: float = Field(16.0, gt=0, description="adapters are scaled by alpha / rank")
    init: Literal["inputs", "rank"] = Field(
        "inputs",
        description="initial values of an adapter's first factor, uniform; inputs: within 1 / sqrt(inputs of its "
        "layer), as in peft; rank: within 1 / sqrt(rank), as in DeepSpeed-Chat. The second factor starts at 0",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout rate of an adapter's inputs in training; not used in PPO"
    )
    target_modules: Literal["auto"] | tuple[str, ...] = Field(
        "auto",
        description="linear layers to adapt: names, or re: and a regular expression for whole paths; auto: all but the "
        "output embedding and scalar head",
    )

    learning_rate: float | None = Field(
        None, gt=0, description="peak learning rate of the adapters; empty: ten times the stage's"
    )
    also_train: tuple[Literal["norms", "biases", "embeddings"], ...] = Field(
        (), description="frozen weights to train as well: norms, biases, embeddings"
    )
    share_base: Literal["auto", True, False] = Field(
        "auto",
        description="PPO's models, or student and teacher, share one frozen base; auto: those that start from the "
        "same model; true: all of PPO's, or the run is refused",
    )
    merge: Literal["auto", True, False] = Field(
        "auto",
        description="add adapters to a copy of the weights for rollouts, which is faster; auto: if the copy takes at "
        "most a tenth of the device's memory",
    )
    save: Literal["merged", "adapter", "both"] = Field(
        "merged",
        description="what a stage saves: the model with its adapters merged in, only the adapters (for peft), or both; "
        "SFT and the reward model are always saved merged too, because PPO starts from them",
    )

    def merges(self, copied: int, memory: int | None) -> bool:
        """Return whether rollouts merge the adapters into a copy of the weights.

        Args:
            copied: bytes of that copy.
            memory: bytes of the device; None if not known.
        """
        if self.merge != "auto":
            return self.merge
        return memory is None or copied <= _LARGEST_COPY * memory

    @field_validator("target_modules", mode="before")
    @classmethod
    def _check_target_modules(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected auto or names of layers, e.g. [q_proj, v_proj], got {short_repr(value)}")
        for name in names:
            if name.startswith("re:"):
                try:
                    re.compile(name.removeprefix("re:"))
                except re.error as error:
                    raise ValueError(f"not a regular expression ({error}), got {short_repr(name)}") from error
        return value if value == "auto" else tuple(names)


class EngineConfig(ConfigModel):
    """How models are stored and trained; `roles` overrides these settings for single models."""

    zero_stage: Literal["auto", 0, 1, 2, 3] = Field(
        0,
        description="ZeRO: what is sharded over ranks (0 nothing, 1 optimizer, 2 + gradients, 3 + weights); auto: the "
        "lowest stage that fits in memory, by the plan",
    )
    zero_persistence_threshold: int = Field(
        100_000, ge=0, description="ZeRO-3: parameters smaller than this are kept whole on every rank"
    )
    offload: Literal["auto", "none", "optimizer", "parameters", "all"] = Field(
        "none",
        description="what is stored in the host's memory: optimizer (state and step), parameters (ZeRO-3's shards, and "
        "frozen models between their uses), all; auto: the least that lets the run fit, by the plan",
    )
    nvme: Folder | None = Field(
        None,
        description="folder on a fast disk, used by one run only, for what is offloaded at ZeRO-3; empty: the host's "
        "memory",
    )
    frozen: Frozen = Field(
        "auto",
        description="number format of frozen linear layers, under LoRA and in models that only score: auto (the run's "
        "precision), int8, int4",
    )
    loss_scale_window: int | None = Field(
        None,
        ge=1,
        description="fp16: steps without overflow after which the loss scale doubles; empty: DeepSpeed's 1000. Use "
        "less for short runs",
    )
    kernels: dict[str, str] = Field(
        {},
        description="implementations to use instead of the best (auto), by operation, e.g. {adamw: torch-foreach}; "
        "{graph_capture: none} turns off recorded rollouts, {inference_weights: none} packed weights, "
        "{fused_layers: none} fused layers, {sampling: none} the device's kernel that draws tokens; "
        "ppo.generation_exact needs batch_invariant. `rlhf accelerators explain` lists them",
    )
    deepspeed: dict[str, Any] = Field(
        {},
        description="settings of DeepSpeed, added to its configuration; keys that rlhf manages are rejected or, with a "
        "warning, ignored",
    )
    shapes: Literal["auto", "static", "bucketed", "dynamic"] = Field(
        "auto", description="how batches are padded; auto: as the accelerator prefers"
    )
    deterministic: bool = Field(
        False,
        description="use only operators that give equal results in equal runs, at some cost in speed; the run says at "
        "its start what may differ nevertheless",
    )
    timeout: float = Field(1800.0, gt=0, description="seconds that ranks wait for a late one before all of them stop")
    disk_wait: float = Field(
        600.0,
        ge=0,
        description="seconds that a run waits for room on a full disk before it ends; several ranks wait half of "
        "`timeout` at most; 0: do not wait",
    )

    @field_validator("kernels")
    @classmethod
    def _check_kernels(cls, kernels: dict[str, str]) -> dict[str, str]:
        for operation in kernels:
            if operation not in OPERATIONS:
                raise ValueError(f"unknown operation {short_repr(operation)}; use one of {', '.join(OPERATIONS)}")
        return kernels


_TITLES: Mapping[Stage, str] = {
    "sft": "supervised fine-tuning",
    "reward": "reward model",
    "dpo": "DPO",
    "distill": "distillation",
}


class RoleConfig(ConfigModel):
    """Overrides for one model; an empty key means the setting of `engine`, `model` or `lora`."""

    zero_stage: ZeroStage | None = Field(None, description="ZeRO stage; empty: engine.zero_stage")
    offload: Offload | None = Field(None, description="what is stored in the host's memory; empty: engine.offload")
    frozen: Frozen | None = Field(None, description="number format of its frozen weights; empty: engine.frozen")
    gradient_checkpointing: bool | None = Field(
        None, description="recompute activations in the backward pass; empty: model.gradient_checkpointing"
    )
    lora_rank: int | None = Field(None, ge=0, description="rank of the adapters; empty: lora.rank")
    lora_alpha: float | None = Field(None, gt=0, description="adapters are scaled by alpha / rank; empty: lora.alpha")
    lora_learning_rate: float | None = Field(
        None, gt=0, description="peak learning rate of the adapters; empty: lora.learning_rate"
    )


class RolesConfig(ConfigModel):
    """Overrides of `engine`, `model` and `lora` for single models."""

    sft: RoleConfig = Field(RoleConfig(), description="the model that SFT trains")
    reward: RoleConfig = Field(RoleConfig(), description="the reward model, trained in its stage and frozen in PPO")
    dpo: RoleConfig = Field(RoleConfig(), description="the model that DPO trains")
    actor: RoleConfig = Field(RoleConfig(), description="PPO's policy")
    critic: RoleConfig = Field(RoleConfig(), description="PPO's value model")
    reference: RoleConfig = Field(RoleConfig(), description="the initial policy of PPO or DPO, frozen")
    judge: RoleConfig = Field(RoleConfig(), description="PPO's second reward model or distillation's only one, frozen")
    student: RoleConfig = Field(RoleConfig(), description="the model that distillation trains")
    teacher: RoleConfig = Field(RoleConfig(), description="the model that distillation learns from, frozen")


class AlarmsConfig(ConfigModel):
    """Alarms of a run whose records show that something is wrong (docs/diagnosis.md)."""

    stop: bool = Field(
        False,
        description="end the run at the first step at which an invariant does not hold, such as rollouts that were "
        "drawn from other weights than those that are trained; false: only warn",
    )
    compare_every: int = Field(
        100,
        ge=0,
        description="steps between comparisons of all weights between ranks, and of frozen ones with their start; 0: "
        "in the first and the last step only",
    )
    skip_not_finite: int = Field(
        0,
        ge=0,
        description="steps that a stage may leave out because their gradients are not finite; the next such step ends "
        "the run",
    )


class Config(ConfigModel):
    """A run of one or more stages."""

    output: Folder = Field(Path("runs/default"), description="folder that the run writes to")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of initial weights, data order and sampling")
    accelerator: str = Field("auto", description="backend, as named by `rlhf accelerators list`; auto: the best one")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="number format of computations; auto: the accelerator's best"
    )
    sinks: tuple[str, ...] = Field(
        (),
        description="programs that receive each record of the run while it runs: trackio, wandb (both on this machine "
        "only), or sinks of installed plugins",
    )
    sinks_timeout: float = Field(60.0, gt=0, description="seconds that a sink may take for a record")
    record_steps: bool = Field(
        True,
        description="keep in STAGE/steps.bin what each step read and drew, so that `rlhf replay` can compute it again",
    )
    alarms: AlarmsConfig = Field(AlarmsConfig(), description=AlarmsConfig.__doc__)
    model: ModelConfig = Field(ModelConfig(), description=ModelConfig.__doc__)
    lora: LoraConfig = Field(LoraConfig(), description=LoraConfig.__doc__)
    data: DataConfig = Field(DataConfig(), description=DataConfig.__doc__)
    engine: EngineConfig = Field(EngineConfig(), description=EngineConfig.__doc__)
    roles: RolesConfig = Field(RolesConfig(), description=RolesConfig.__doc__)
    sft: SFTConfig = Field(SFTConfig(), description=SFTConfig.__doc__)
    reward: RewardConfig = Field(RewardConfig(), description=RewardConfig.__doc__)
    dpo: DPOConfig = Field(DPOConfig(), description=DPOConfig.__doc__)
    ppo: PPOConfig = Field(PPOConfig(), description=PPOConfig.__doc__)
    distill: DistillConfig = Field(DistillConfig(), description=DistillConfig.__doc__)

    @property
    def data_seed(self) -> int:
        """The seed that decides which rows each stage gets, and which are held out."""
        return self.seed if self.data.seed is None else self.data.seed

    def supervised(self, stage: Stage) -> EpochConfig:
        """Return the section of `stage`, any but ppo."""
        section: EpochConfig = getattr(self, stage)
        return section

    def check_batches(self, stage: Stage, ranks: int) -> None:
        """Check that the batches of a stage can be divided among ranks and micro-batches.

        Raises:
            ConfigError: they cannot be.
        """
        if stage == "ppo":
            self.ppo.pretraining(ranks)
        else:
            self.supervised(stage).micro_batch(ranks, section=stage)

    def title(self, stage: Stage) -> str:
        """Return the name of a stage for people; for ppo, that of its algorithm."""
        return self.ppo.method.title if stage == "ppo" else _TITLES[stage]

    def total_steps(self, stage: Stage, rows: int) -> int:
        """Return the optimizer steps of a stage with `rows` rows in an epoch, in PPO its rollouts."""
        if stage == "ppo":
            return self.ppo.total_steps(rows)
        section = self.supervised(stage)
        return section.total_steps(-(-rows // section.batch_size))


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    options: Mapping[str, Any] | None = None,
    example: bool = True,
) -> Config:
    """Build a `Config` from a YAML file, `key.path=value` overrides (values are YAML too) and options.

    Args:
        path: the YAML file; its paths are relative to its folder, others to the working directory.
        overrides: texts that replace values of the file.
        options: values of command-line options that are keys (`--seed`), which replace all others; None if an option
            is not given.
        example: without a file, start from the embedded recipe, unless the overrides name a model or data: its
            settings suit only the embedded model. If false, start from the schema's defaults.

    Raises:
        ConfigError: the file cannot be read or parsed, a key is unknown, or a value is invalid.
    """
    start = path
    if path is None and example and not names_model_or_data(apply_overrides(TrackedDict(), overrides)):
        start = EMBEDDED_RECIPE
    values = read_yaml(start) if start else TrackedDict()
    return build_config(apply_overrides(values, overrides, options), source=str(path) if path else "the configuration")


def build_config(values: Mapping[str, Any], *, source: str = "the configuration") -> Config:
    """Build a `Config` from nested values.

    Raises:
        InvalidValuesError: a line for each invalid value; it names the file line or option, else `source`.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise explain_validation_error(error, Config, values, source) from error
