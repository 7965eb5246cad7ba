"""The schema of a run: YAML files, `--set key=value` and Python all build a `Config`.

Each section configures one part of the program. Unknown keys and invalid values raise `ConfigError` with the key's full
path and the closest known key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from rlhf.config.data import EVERY_STAGE, STAGES, ColumnsConfig, DataConfig, DatasetConfig, Share, Stage, share_of
from rlhf.config.engine import EngineConfig, LoraConfig, RoleConfig, RolesConfig
from rlhf.config.loader import TrackedDict, apply_overrides, names_model_or_data, read_yaml
from rlhf.config.ppo import PPOConfig, RewardFunctionConfig, SamplingConfig
from rlhf.config.training import DPOConfig, EpochConfig, OptimizerConfig, RewardConfig, SFTConfig, TrainingConfig
from rlhf.config.types import ConfigModel, Folder, OptionalPathOrHubId
from rlhf.config.validation_errors import format_validation_error
from rlhf.errors import ConfigError

__all__ = [  # the names that other packages import from here
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
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")


class Config(ConfigModel):
    """A run of one or more stages."""

    output: Folder = Field(Path("runs/default"), description="folder that the run writes to")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of initial weights, data order and sampling")
    accelerator: str = Field("auto", description="backend, as named by `rlhf accelerators list`; auto: the best one")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="number format of computations; auto: the accelerator's best"
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
        """Return the section of `stage`, any but ppo."""
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
        ConfigError: one line about the first invalid value; it names the file line or option, else `source`.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(format_validation_error(error, Config, values, source)) from error
