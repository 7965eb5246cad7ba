"""The one schema of a run: YAML files, `--set key=value` and Python all build a `Config`.

A section holds what one part of the program needs and is handed to that part alone. Unknown keys and
bad values raise `ConfigError` with the key's full path, and the nearest known key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from rlhf.config.data import EVERY_STAGE, STAGES, ColumnsConfig, DataConfig, DatasetConfig, Share, Stage, share_of
from rlhf.config.dpo import DPOConfig
from rlhf.config.engine import EngineConfig, LoraConfig, RoleConfig, RolesConfig
from rlhf.config.loader import TrackedDict, apply_overrides, names_model_or_data, read_yaml
from rlhf.config.ppo import PPOConfig, SamplingConfig
from rlhf.config.rewards import RewardFunctionConfig
from rlhf.config.training import EpochConfig, OptimizerConfig, PairsConfig, TrainingConfig
from rlhf.config.types import ConfigModel, Folder, OptionalPathOrHubId
from rlhf.config.validation_errors import format_validation_error
from rlhf.errors import ConfigError

__all__ = [  # what mypy counts as ours
    "EVERY_STAGE",
    "STAGES",
    "ColumnsConfig",
    "Config",
    "DPOConfig",
    "DataConfig",
    "DatasetConfig",
    "EngineConfig",
    "EpochConfig",
    "LoraConfig",
    "OptimizerConfig",
    "PPOConfig",
    "RewardFunctionConfig",
    "RoleConfig",
    "RolesConfig",
    "SamplingConfig",
    "Share",
    "Stage",
    "TrainingConfig",
    "share_of",
]

EMBEDDED_RECIPE = Path(__file__).parent / "recipes" / "world.yaml"
"""What `rlhf` runs where it is given no file."""


class ModelConfig(ConfigModel):
    """The causal language model that fine-tuning starts from."""

    path: OptionalPathOrHubId = Field(
        None, description="folder or hub name of a causal language model; empty: the embedded tiny Llama, from scratch"
    )
    gguf_file: str | None = Field(
        None, description="name of a GGUF file inside `path`; its weights are de-quantized when loaded"
    )
    tokenizer: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the tokenizer; empty: the model's own"
    )
    eos_token: str | None = Field(
        None,
        min_length=1,
        description="token that ends a reply, added to tokenizer and model where they have none such (with LoRA, "
        "lora.also_train: [embeddings] learns it); empty: the tokenizer's own",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")


class SFTConfig(EpochConfig):
    """Stage 1: supervised fine-tuning on demonstrations."""

    better: ClassVar = {"perplexity": min}

    loss_on: Literal["completion", "all"] = Field("completion", description="tokens that enter the loss")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule")


class RewardConfig(PairsConfig):
    """Stage 2: a reward model from preferences."""

    better: ClassVar = {"accuracy": max, "loss": min}

    model: OptionalPathOrHubId = Field(
        None, description="folder or hub name of the model to start from; empty: this run's SFT model"
    )
    loss: Literal["token", "last"] = Field(
        "token",
        description="scores that are compared: of every token from where two replies part (token, DeepSpeed-Chat's), "
        "or of each reply's last token alone (last, InstructGPT's)",
    )
    margin: float = Field(
        0.0,
        ge=0,
        description="by how much chosen replies should score more: -log sigmoid(chosen - rejected - margin); a pair's "
        "own (data.datasets.*.columns.margin) is added",
    )
    center: float = Field(
        0.0,
        ge=0,
        description="weight of (chosen + rejected)^2 at the last tokens, which keeps scores near 0; e.g. 0.01",
    )
    reset_final_norm: Literal["auto", True, False] = Field(
        "auto",
        description="new norm under a new head: true, false; auto: where unequal gains would cost accuracy in bf16",
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and schedule")


class Config(ConfigModel):
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
    dpo: DPOConfig = Field(DPOConfig(), description=DPOConfig.__doc__)
    ppo: PPOConfig = Field(PPOConfig(), description=PPOConfig.__doc__)

    def supervised(self, stage: Stage) -> EpochConfig:
        """The section of a stage that passes over its rows: any but ppo."""
        section: EpochConfig = getattr(self, stage)
        return section


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
    if path is None and example and not names_model_or_data(apply_overrides(TrackedDict(), overrides)):
        start = EMBEDDED_RECIPE
    values = read_yaml(start) if start else TrackedDict()
    return build_config(apply_overrides(values, overrides, options), source=str(path) if path else "the configuration")


def build_config(values: Mapping[str, Any], *, source: str = "the configuration") -> Config:
    """Validate nested values; the first problem becomes a one-line `ConfigError`.

    It names the line or option that gave the value; else `source`.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(format_validation_error(error, Config, values, source)) from error
