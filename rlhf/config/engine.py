"""The sections about how models are stored and trained: LoRA, the engine, and overrides for single roles."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from accelerators import OPERATIONS
from rlhf.config.types import ConfigModel, Folder
from rlhf.config.validation_errors import short_repr

Offload = Literal["none", "optimizer", "parameters", "all"]
Frozen = Literal["auto", "int8", "int4"]
ZeroStage = Literal[0, 1, 2, 3]


class LoraConfig(ConfigModel):
    """LoRA: train small adapters on frozen weights, in all stages (arXiv:2106.09685)."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: no LoRA, all weights are trained")
    alpha: float = Field(16.0, gt=0, description="adapters are scaled by alpha / rank")
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
        description="PPO's models share one frozen base; auto: those that start from the same model; true: all of "
        "them, or the run is refused",
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
        "{fused_layers: none} fused layers. `rlhf accelerators explain` lists them",
    )
    deepspeed: dict[str, Any] = Field(
        {},
        description="settings of DeepSpeed, added to its configuration; keys that rlhf manages are rejected or, with a "
        "warning, ignored",
    )
    shapes: Literal["auto", "static", "bucketed", "dynamic"] = Field(
        "auto", description="how batches are padded; auto: as the accelerator prefers"
    )
    timeout: float = Field(1800.0, gt=0, description="seconds that ranks wait for a late one before all of them stop")

    @field_validator("kernels")
    @classmethod
    def _check_kernels(cls, kernels: dict[str, str]) -> dict[str, str]:
        for operation in kernels:
            if operation not in OPERATIONS:
                raise ValueError(f"unknown operation {short_repr(operation)}; use one of {', '.join(OPERATIONS)}")
        return kernels


class RoleConfig(ConfigModel):
    """Overrides for one model; an empty key means the setting of `engine`, `model` or `lora`."""

    zero_stage: ZeroStage | None = Field(None, description="ZeRO stage; empty: engine.zero_stage")
    offload: Offload | None = Field(None, description="what is stored in the host's memory; empty: engine.offload")
    frozen: Frozen | None = Field(None, description="number format of its frozen weights; empty: engine.frozen")
    gradient_checkpointing: bool | None = Field(
        None, description="recompute activations in the backward pass; empty: model.gradient_checkpointing"
    )
    lora_rank: int | None = Field(None, ge=0, description="rank of the adapters; empty: lora.rank")
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
