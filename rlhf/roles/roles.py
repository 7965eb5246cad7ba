"""The models of each stage: the source of each, if it is trained, and its placement.

`model_placements` turns the settings into one `ModelPlacement` per role. Loading, the engines, preflight and the memory
plan all read it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhf.config.schema import Config, EngineConfig, LoraConfig, Stage
from rlhf.errors import ConfigError
from rlhf.roles.lineage import (
    ACTOR,
    CRITIC,
    DPO,
    JUDGE,
    MODEL,
    REWARD,
    REWARD_MODEL,
    STUDENT,
    STUDENTS_JUDGE,
    TEACHER,
    BaseModelRef,
    base_models,
)

REDUCE_BUCKET_SIZE = 500_000_000
"""DeepSpeed 0.19.8's default `reduce_bucket_size`, in elements."""

_ON_NUMBERS = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params",
)
"""DeepSpeed's settings of ZeRO-3 that need weights of one type, as numbers."""

RoleName = Literal["sft", "reward", "dpo", "actor", "critic", "reference", "judge", "student", "teacher"]


@dataclass(frozen=True)
class Role:
    """One model of a stage, loaded from `base`; if it is not `in_steps`, only evaluations use it."""

    name: RoleName
    base: BaseModelRef
    trained: bool = True
    scalar_head: bool = False
    in_steps: bool = True


ROLES: Mapping[Stage, tuple[Role, ...]] = {
    "sft": (Role("sft", MODEL),),
    "reward": (Role("reward", REWARD, scalar_head=True),),
    "dpo": (Role("dpo", DPO), Role("reference", DPO, trained=False)),
    "ppo": (
        Role("actor", ACTOR),
        Role("critic", REWARD_MODEL, scalar_head=True),
        Role("reference", ACTOR, trained=False),
        Role("reward", REWARD_MODEL, trained=False, scalar_head=True),
        Role("judge", JUDGE, trained=False, scalar_head=True, in_steps=False),
    ),
    "distill": (
        Role("student", STUDENT),
        Role("teacher", TEACHER, trained=False),
        Role("judge", STUDENTS_JUDGE, trained=False, scalar_head=True, in_steps=False),
    ),
}
"""The roles of each stage, in the order in which they are loaded."""


@dataclass(frozen=True)
class ModelPlacement:
    """The way a role's model is stored and trained.

    Attributes:
        dropout: the rate in training; None for the model's own rates.
        lora: the settings for this model; `rank` is 0 if all weights are trained, and for a frozen model.
        engine: the settings for this model, with those of `roles` applied.
        rate_key: the key of the learning rate at which its weights, or its adapters, are trained.
    """

    role: Role
    stage: Stage
    gradient_checkpointing: bool
    dropout: float | None
    lora: LoraConfig
    engine: EngineConfig
    rate_key: str

    @property
    def zero_stage(self) -> int:
        """The model's ZeRO stage."""
        return int(self.engine.zero_stage)

    @property
    def quantization(self) -> Literal["int8", "int4"] | None:
        """The quantization of the frozen weights of linear layers; None if they are not quantized."""
        kind = self.engine.frozen
        return None if kind == "auto" or (self.role.trained and not self.lora.rank) else kind

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer's state is stored, and its steps are computed, on the host."""
        return self.role.trained and self.engine.offload in ("optimizer", "all")

    @property
    def offloads_parameters(self) -> bool:
        """True if weights are stored on the host: ZeRO-3's shards, and a frozen model between its uses."""
        return self.engine.offload in ("parameters", "all") and (self.zero_stage == 3 or not self.role.trained)

    def bucket(self, trained: int) -> int:
        """Return the size of the buffer in which ranks sum gradients at ZeRO 1 to 3, in elements.

        DeepSpeed allocates all of it, even for few `trained` parameters; `engine.deepspeed` may set another size.
        """
        zero_settings = self.engine.deepspeed.get("zero_optimization")
        size = zero_settings.get("reduce_bucket_size") if isinstance(zero_settings, Mapping) else None
        return int(size) if isinstance(size, int | float) else min(REDUCE_BUCKET_SIZE, trained)


def model_placements(config: Config, stage: Stage) -> dict[RoleName, ModelPlacement]:
    """Return the placement of each model of a stage.

    There is no reference if the policy's adapters are all that is trained (the reference is then the policy without
    them), or if DPO computes the reference's log-probabilities before training. Not every estimator needs a critic, nor
    every reward a model; a judge is optional.
    """
    placements = {role.name: _place_model(config, stage, role) for role in ROLES[stage]}
    trains_only_adapters = placements[ROLES[stage][0].name].lora.rank and not config.lora.also_train
    if trains_only_adapters or (stage == "dpo" and config.dpo.reference == "precomputed"):
        placements.pop("reference", None)
    if stage == "distill" and not config.distill.judge:
        del placements["judge"]
    if stage == "distill" and config.distill.teacher_servers:
        del placements["teacher"]
    if stage != "ppo":
        return placements
    bases = base_models(config, stage)
    if not config.ppo.method.critic:
        del placements["critic"]
    elif CRITIC in bases:
        placements["critic"] = replace(placements["critic"], role=replace(placements["critic"].role, base=CRITIC))
    optional: dict[RoleName, BaseModelRef] = {"reward": REWARD_MODEL, "judge": JUDGE}
    for name, base in optional.items():
        if base not in bases:
            del placements[name]
    return placements


def _place_model(config: Config, stage: Stage, role: Role) -> ModelPlacement:
    overrides = getattr(config.roles, role.name).model_dump(exclude_none=True)
    checkpointing = overrides.get("gradient_checkpointing", config.model.gradient_checkpointing)
    offload = overrides.get("offload", config.engine.offload)
    zero = overrides.get("zero_stage", config.engine.zero_stage)
    zero_stage = 0 if zero == "auto" else int(zero)  # auto: 0 until the plan has chosen
    if not role.trained and zero_stage != 3:
        zero_stage = 0  # no optimizer to shard
    return ModelPlacement(
        role,
        stage,
        gradient_checkpointing=checkpointing and role.trained,
        dropout=_dropout(config, stage, role),
        lora=config.lora.model_copy(
            # Rollouts are scored without dropout: with it, the ratio of new to old policy would not start at 1.
            update={
                "rank": overrides.get("lora_rank", config.lora.rank) if role.trained else 0,
                "alpha": overrides.get("lora_alpha", config.lora.alpha),
                "learning_rate": overrides.get("lora_learning_rate", config.lora.learning_rate),
            }
            | ({"dropout": 0.0} if stage == "ppo" else {})
        ),
        engine=config.engine.model_copy(
            update={
                "zero_stage": zero_stage,
                "offload": "none" if offload == "auto" else offload,  # auto: none until the plan has chosen
                "frozen": overrides.get("frozen", config.engine.frozen),
            }
        ),
        rate_key=_find_rate_key(config, stage, role),
    )


def _find_rate_key(config: Config, stage: Stage, role: Role) -> str:
    overrides = getattr(config.roles, role.name)
    rank = config.lora.rank if overrides.lora_rank is None else overrides.lora_rank
    if rank and overrides.lora_learning_rate is not None:
        return f"roles.{role.name}.lora_learning_rate"
    if rank and config.lora.learning_rate is not None:
        return "lora.learning_rate"
    return "ppo.critic_optimizer.learning_rate" if role.name == "critic" else f"{stage}.optimizer.learning_rate"


def _dropout(config: Config, stage: Stage, role: Role) -> float | None:
    if not role.trained:
        return 0.0
    if stage != "ppo":
        return config.supervised(stage).dropout
    return {"actor": config.ppo.dropout, "critic": config.ppo.critic_dropout}[role.name]


def check_placements(config: Config, stages: Sequence[Stage]) -> None:
    """Check, before anything is loaded, that the models of `stages` are named and can be placed as the settings say.

    Raises:
        ConfigError: with the closest valid setting.
    """
    if "distill" in stages and not (config.distill.teacher or config.distill.teacher_servers):
        raise ConfigError(
            "distill.teacher: there is no model to learn from; name its folder, that of a LoRA adapter, or a hub name, "
            "or in distill.teacher_servers the addresses of its servers"
        )
    _check_frozen_roles(config, stages)
    placements = [placement for stage in stages for placement in model_placements(config, stage).values()]
    for placement in placements:
        _check_offload(config, placement, placements)
        _check_frozen(config, placement)
    _check_nvme(config, placements)


def _check_frozen_roles(config: Config, stages: Sequence[Stage]) -> None:
    """Check the settings of reference, judge and teacher: all are frozen, and a stage may lack each."""
    with_reference = [
        stage for stage in stages if stage == "ppo" or (stage == "dpo" and config.dpo.reference == "beside")
    ]
    for stage in with_reference:
        policy, name = ROLES[stage][0].name, "actor" if stage == "ppo" else "policy"
        _check_frozen_role(
            config,
            "reference",
            stage,
            f"with LoRA the reference is the {name} without its adapters; remove this key, or set "
            f"roles.{policy}.lora_rank=0",
        )
    if "distill" in stages:
        _check_frozen_role(config, "teacher", "distill", "the teacher is on distill.teacher_servers; remove this key")
    with_judge = [stage for stage in stages if stage in ("ppo", "distill")]
    for judging in sorted(with_judge, key=lambda stage: "judge" not in model_placements(config, stage))[:1]:
        _check_frozen_role(config, "judge", judging, f"there is no judge; set {judging}.judge, or remove this key")


def _check_frozen_role(config: Config, name: RoleName, stage: Stage, absent: str) -> None:
    """Check the settings of a model that is frozen in every stage; `absent` says why a stage has no such model."""
    overrides = getattr(config.roles, name)
    settings = overrides.model_dump(exclude_none=True)
    if settings and name not in model_placements(config, stage):
        raise ConfigError(f"roles.{name}.{next(iter(settings))}: {absent}")
    if overrides.zero_stage in (1, 2):
        raise ConfigError(
            f"roles.{name}.zero_stage: the {name} is frozen and has no optimizer to shard, got "
            f"{overrides.zero_stage}; set 0, or 3 to shard its weights"
        )
    only_trained = {"gradient_checkpointing": ", or set false", "lora_rank": ", or set 0"}
    only_trained |= {"lora_alpha": "", "lora_learning_rate": ""}
    for key, alternative in only_trained.items():
        if settings.get(key):
            raise ConfigError(
                f"roles.{name}.{key}: applies to trained models only, and the {name} is frozen; "
                f"remove this key{alternative}"
            )
    if overrides.offload == "optimizer":
        raise ConfigError(
            f"roles.{name}.offload: the {name} is frozen and has no optimizer; set parameters, or remove this key"
        )


def _find_key(config: Config, role: RoleName, setting: str) -> str:
    """Return the key that sets `setting` for a model: that of its role, else that of all models."""
    return f"engine.{setting}" if getattr(getattr(config.roles, role), setting) is None else f"roles.{role}.{setting}"


def _check_offload(config: Config, placement: ModelPlacement, placements: Sequence[ModelPlacement]) -> None:
    name, offload, zero_stage = placement.role.name, placement.engine.offload, placement.zero_stage
    key, zero_key = _find_key(config, name, "offload"), _find_key(config, name, "zero_stage")
    if placement.offloads_optimizer and zero_stage == 0:
        raise ConfigError(
            f"{key}: {offload}: DeepSpeed offloads an optimizer only at ZeRO 1 to 3, and the {name} model uses ZeRO 0; "
            f"set {zero_key}=1 (on one rank too), or {key}=none"
        )
    # engine.offload must suit some model of the run; roles.*.offload must suit its model in some stage.
    affected = [other for other in placements if getattr(config.roles, other.role.name).offload is None]
    if key != "engine.offload":
        affected = [
            other for stage in ROLES for other in model_placements(config, stage).values() if other.role.name == name
        ]
    if offload in ("parameters", "all") and not any(other.offloads_parameters for other in affected):
        raise ConfigError(
            f"{key}: {offload}: offloading trained weights needs ZeRO-3, and the {name} model uses ZeRO {zero_stage}; "
            f"set {zero_key}=3, or {key}={'optimizer' if zero_stage else 'none'}"
        )


def _check_frozen(config: Config, placement: ModelPlacement) -> None:
    name, kind = placement.role.name, placement.engine.frozen
    key = _find_key(config, name, "frozen")
    # engine.frozen applies to frozen models only, and the reward model is one in PPO.
    if key != "engine.frozen" and kind != "auto" and placement.quantization is None and name != "reward":
        raise ConfigError(
            f"{key}: {kind}: the {name} model is trained in full and has no frozen weights; set "
            f"roles.{name}.lora_rank, or remove this key"
        )
    if placement.quantization is None or placement.zero_stage < 3:
        return
    if placement.engine.nvme is not None and placement.offloads_parameters:
        raise ConfigError(
            f"engine.nvme: DeepSpeed cannot store the {name} model's {kind} weights on a disk ({key}); remove "
            f"engine.nvme to offload to the host's memory, or set {key}=auto"
        )
    zero_settings = placement.engine.deepspeed.get("zero_optimization")
    for setting in _ON_NUMBERS:
        if isinstance(zero_settings, Mapping) and zero_settings.get(setting):
            raise ConfigError(
                f"engine.deepspeed.zero_optimization.{setting}: would compute with the bytes of the {name} model's "
                f"{kind} weights ({key}) as if they were numbers; remove it, or set {key}=auto"
            )


def _check_nvme(config: Config, placements: Sequence[ModelPlacement]) -> None:
    if config.engine.nvme is None:
        return
    offloading = [
        placement for placement in placements if placement.offloads_optimizer or placement.offloads_parameters
    ]
    if not offloading:
        raise ConfigError("engine.nvme: nothing is offloaded; set engine.offload=all, or remove engine.nvme")
    if all(other.zero_stage < 3 for other in offloading):
        raise ConfigError(
            "engine.nvme: DeepSpeed uses a disk at ZeRO-3 only, and no offloaded model uses ZeRO-3; set "
            "engine.zero_stage=3, or remove engine.nvme to offload to the host's memory"
        )
    if config.ppo.ema and any(other.role.name == "actor" and other.zero_stage == 3 for other in offloading):
        raise ConfigError(
            "ppo.ema: a moving average needs the actor's weights in memory, and engine.nvme stores them on disk; "
            "remove one of the two keys, or set roles.actor.offload=none"
        )
