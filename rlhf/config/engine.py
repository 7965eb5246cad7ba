"""Sections of the schema about how models are held: LoRA, the engine's defaults, and what a role does differently."""

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

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: off, all weights are trained")
    alpha: float = Field(16.0, gt=0, description="adapters are scaled by alpha / rank")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="part of an adapter's inputs dropped while training; PPO drops nothing"
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
        (), description="what of the frozen weights is trained too: norms, biases, embeddings"
    )
    share_base: Literal["auto", True, False] = Field(
        "auto",
        description="PPO's models share one frozen base; auto: those that start from the same; true: all, or no run",
    )
    merge: Literal["auto", True, False] = Field(
        "auto",
        description="add adapters to a copy of the weights for rollouts, which makes them faster; auto: if the copy "
        "takes a tenth of the device's memory at most",
    )
    save: Literal["merged", "adapter", "both"] = Field(
        "merged",
        description="what a stage leaves: the model with its adapters merged in, the adapters alone as peft loads them "
        "(SFT and the reward model stay merged beside them: PPO starts there), or both",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected auto or names of layers, e.g. [q_proj, v_proj], got {short_repr(value)}")
        for name in names:
            if name.startswith("re:"):
                try:
                    re.compile(name.removeprefix("re:"))
                except re.error as error:
                    raise ValueError(f"{short_repr(name)} holds no regular expression ({error})") from error
        return value if value == "auto" else tuple(names)


class EngineConfig(ConfigModel):
    """How models are held, trained and frozen ones; `roles` says what one of them does differently."""

    zero_stage: Literal["auto", 0, 1, 2, 3] = Field(
        0,
        description="ZeRO: what is sharded over ranks (0 nothing, 1 optimizer, 2 + gradients, 3 + weights); auto: the "
        "least that fits, by the plan",
    )
    zero_persistence_threshold: int = Field(
        100_000, ge=0, description="ZeRO-3: parameters smaller than this stay whole on every rank"
    )
    offload: Literal["auto", "none", "optimizer", "parameters", "all"] = Field(
        "none",
        description="what waits in the host's memory: optimizer (state and step), parameters (ZeRO-3's shards, and "
        "frozen models between their uses), all; auto: the least with which it fits, by the plan",
    )
    nvme: Folder | None = Field(
        None,
        description="folder on a fast disk, one run's own, for what is offloaded at ZeRO-3; empty: the host's memory",
    )
    frozen: Frozen = Field(
        "auto",
        description="numbers that frozen linear layers are held in, under LoRA and in models that only score: auto "
        "(the precision of the run), int8, int4",
    )
    loss_scale_window: int | None = Field(
        None,
        ge=1,
        description="fp16: steps without overflow after which the loss scale doubles; empty: DeepSpeed's 1000. Short "
        "runs want less",
    )
    kernels: dict[str, str] = Field(
        {},
        description="implementations to take in place of the best (auto), by operation, e.g. {adamw: torch-foreach}; "
        "{graph_capture: none} records no rollouts, {inference_weights: none} packs no weights, "
        "{fused_layers: none} fuses no layers. `rlhf accelerators explain` lists them",
    )
    deepspeed: dict[str, Any] = Field(
        {},
        description="settings of DeepSpeed, added to its configuration; keys that rlhf manages are rejected or, with a "
        "warning, ignored",
    )
    shapes: Literal["auto", "static", "bucketed", "dynamic"] = Field(
        "auto", description="how batches are padded; auto: the accelerator's own policy"
    )
    timeout: float = Field(1800.0, gt=0, description="seconds that ranks wait for one that is late, before all end")

    @field_validator("kernels")
    @classmethod
    def _operations(cls, kernels: dict[str, str]) -> dict[str, str]:
        for operation in kernels:
            if operation not in OPERATIONS:
                raise ValueError(f"no operation {short_repr(operation)}; use one of {', '.join(OPERATIONS)}")
        return kernels


class RoleConfig(ConfigModel):
    """What one model does differently; an empty key: as `engine`, `model` and `lora` say."""

    zero_stage: ZeroStage | None = Field(None, description="ZeRO stage; empty: engine.zero_stage")
    offload: Offload | None = Field(None, description="what waits in the host's memory; empty: engine.offload")
    frozen: Frozen | None = Field(None, description="numbers that its frozen weights are held in; empty: engine.frozen")
    gradient_checkpointing: bool | None = Field(
        None, description="recompute activations in the backward pass; empty: model.gradient_checkpointing"
    )
    lora_rank: int | None = Field(None, ge=0, description="rank of the adapters; empty: lora.rank")
    lora_learning_rate: float | None = Field(
        None, gt=0, description="peak learning rate of the adapters; empty: lora.learning_rate"
    )


class RolesConfig(ConfigModel):
    """What single models do differently from `engine`, `model` and `lora`."""

    sft: RoleConfig = Field(RoleConfig(), description="the model that SFT trains")
    reward: RoleConfig = Field(RoleConfig(), description="the reward model, trained in its stage and frozen in PPO")
    dpo: RoleConfig = Field(RoleConfig(), description="the model that DPO trains")
    actor: RoleConfig = Field(RoleConfig(), description="PPO's policy")
    critic: RoleConfig = Field(RoleConfig(), description="PPO's value model")
    reference: RoleConfig = Field(RoleConfig(), description="the policy as it was before PPO, or DPO, frozen")
