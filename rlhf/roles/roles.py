"""The models of each stage: what each is loaded from, whether it is trained, and how it is placed.

`model_placements` turns the settings into one `ModelPlacement` per role. Loading, the engines, preflight and the memory
plan all read it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhf.config.schema import Config, EngineConfig, LoraConfig, RoleConfig, Stage
from rlhf.errors import ConfigError
from rlhf.roles.lineage import ACTOR, CRITIC, DPO, MODEL, REWARD, REWARD_MODEL, BaseModelRef, base_models

REDUCE_BUCKET_SIZE = 500_000_000  # elements: DeepSpeed 0.19.8's own reduce_bucket_size

RoleName = Literal["sft", "reward", "dpo", "actor", "critic", "reference"]


@dataclass(frozen=True)
class Role:
    """One model of a stage, loaded from `base`."""

    name: RoleName
    base: BaseModelRef
    trained: bool = True
    scalar_head: bool = False


ROLES: Mapping[Stage, tuple[Role, ...]] = {
    "sft": (Role("sft", MODEL),),
    "reward": (Role("reward", REWARD, scalar_head=True),),
    "dpo": (Role("dpo", DPO), Role("reference", DPO, trained=False)),
    "ppo": (
        Role("actor", ACTOR),
        Role("critic", REWARD_MODEL, scalar_head=True),
        Role("reference", ACTOR, trained=False),
        Role("reward", REWARD_MODEL, trained=False, scalar_head=True),
    ),
}
"""In the order in which they are loaded."""


@dataclass(frozen=True)
class ModelPlacement:
    """How a role's model is held: `engine`, `model` and `lora` of the settings, with what `roles` says of it.

    `lora.rank` is 0 where all weights are trained, and for a frozen model; `engine` has what the role says of its own.
    """

    role: Role
    stage: Stage
    gradient_checkpointing: bool
    dropout: float | None
    lora: LoraConfig
    engine: EngineConfig

    @property
    def zero_stage(self) -> int:
        return int(self.engine.zero_stage)

    @property
    def quantization(self) -> Literal["int8", "int4"] | None:
        """How the weights of its linear layers are quantized, where they are frozen; None: they are not."""
        kind = self.engine.frozen
        return None if kind == "auto" or (self.role.trained and not self.lora.rank) else kind

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state waits, and its steps are taken, on the host."""
        return self.role.trained and self.engine.offload in ("optimizer", "all")

    @property
    def offloads_parameters(self) -> bool:
        """Whether weights wait on the host: ZeRO-3's shards, and all of a frozen model between its uses."""
        return self.engine.offload in ("parameters", "all") and (self.zero_stage == 3 or not self.role.trained)

    def bucket(self, trained: int) -> int:
        """Elements of the buffer, from ZeRO 1 on, from which ranks add up the gradients of `trained` numbers.

        DeepSpeed allocates all of it, however little is trained; `engine.deepspeed` may say another size.
        """
        own = self.engine.deepspeed.get("zero_optimization")
        size = own.get("reduce_bucket_size") if isinstance(own, Mapping) else None
        return int(size) if isinstance(size, int | float) else min(REDUCE_BUCKET_SIZE, trained)


def model_placements(config: Config, stage: Stage) -> dict[RoleName, ModelPlacement]:
    """How each model of a stage is held.

    With LoRA on the policy, there is no reference: it is the policy without its adapters, unless more of it is trained.
    DPO needs none where the policy scores all pairs before it is trained. Not every advantage estimator needs a critic,
    nor every reward a model.
    """
    found = {role.name: _place_model(config, stage, role) for role in ROLES[stage]}
    adapted = found[ROLES[stage][0].name].lora.rank and not config.lora.also_train
    if adapted or (stage == "dpo" and config.dpo.reference == "precomputed"):
        found.pop("reference", None)
    if stage != "ppo":
        return found
    bases = base_models(config, stage)
    if not config.ppo.method.critic:
        del found["critic"]
    elif CRITIC in bases:
        found["critic"] = replace(found["critic"], role=replace(found["critic"].role, base=CRITIC))
    if REWARD_MODEL not in bases:
        del found["reward"]
    return found


def _place_model(config: Config, stage: Stage, role: Role) -> ModelPlacement:
    own: RoleConfig = getattr(config.roles, role.name)
    rank = config.lora.rank if own.lora_rank is None else own.lora_rank
    rate = config.lora.learning_rate if own.lora_learning_rate is None else own.lora_learning_rate
    checkpointing = own.gradient_checkpointing
    if checkpointing is None:
        checkpointing = config.model.gradient_checkpointing
    zero_stage = _zero_stage(config.engine.zero_stage if own.zero_stage is None else own.zero_stage, role)
    return ModelPlacement(
        role,
        stage,
        gradient_checkpointing=checkpointing and role.trained,
        dropout=_dropout(config, stage, role),
        lora=config.lora.model_copy(
            # Rollouts are scored without dropout: with it, the ratio of new to old policy would not begin at 1.
            update={"rank": rank if role.trained else 0, "learning_rate": rate}
            | ({"dropout": 0.0} if stage == "ppo" else {})
        ),
        engine=config.engine.model_copy(
            update={
                "zero_stage": zero_stage,
                "offload": _offload(config.engine.offload if own.offload is None else own.offload),
                "frozen": config.engine.frozen if own.frozen is None else own.frozen,
            }
        ),
    )


def _zero_stage(stage: int | str, role: Role) -> int:
    """A model without an optimizer is held whole or, at ZeRO-3, sharded. `auto` is 0 until the plan has decided."""
    stage = 0 if stage == "auto" else int(stage)
    return stage if role.trained or stage == 3 else 0


def _offload(offload: str) -> str:
    """`auto` is none until the plan has decided."""
    return "none" if offload == "auto" else offload


def _dropout(config: Config, stage: Stage, role: Role) -> float | None:
    """The rate in training; None: the model's own."""
    if not role.trained:
        return 0.0
    if stage != "ppo":
        return config.supervised(stage).dropout
    return {"actor": config.ppo.dropout, "critic": config.ppo.critic_dropout}[role.name]


def check_placements(config: Config, stages: Sequence[Stage], ranks: int) -> None:
    """Refuse what cannot be, of how models of `stages` are to be held, before anything is loaded.

    Raises:
        ConfigError: with the nearest that can be.
    """
    _check_reference(config, stages)
    held = [placement for stage in stages for placement in model_placements(config, stage).values()]
    for placement in held:
        _check_offload(config, placement, held)
        _check_frozen(config, placement)
    _check_nvme(config, held)


def _check_reference(config: Config, stages: Sequence[Stage]) -> None:
    """The reference is frozen in every stage, and is no model of its own beside an actor with adapters."""
    own = config.roles.reference
    said = own.model_dump(exclude_none=True)
    besides = [stage for stage in stages if stage == "ppo" or (stage == "dpo" and config.dpo.reference == "beside")]
    if not besides or not said:
        return
    for stage in besides:
        if "reference" not in model_placements(config, stage):
            policy = ROLES[stage][0].name
            name = "actor" if stage == "ppo" else "policy"
            raise ConfigError(
                f"roles.reference.{next(iter(said))}: with LoRA the reference is the {name} without its adapters, "
                f"held as the {name} is; leave it out, or set roles.{policy}.lora_rank=0"
            )
    if own.zero_stage in (1, 2):
        raise ConfigError(
            f"roles.reference.zero_stage: {own.zero_stage} shards an optimizer, and the reference is frozen; "
            "set 0, or 3 to shard its weights"
        )
    trained = {"gradient_checkpointing": ", or set false", "lora_rank": ", or set 0", "lora_learning_rate": ""}
    for key, nothing in trained.items():
        if said.get(key):
            raise ConfigError(
                f"roles.reference.{key}: is for a model that is trained, and the reference is frozen; "
                f"leave it out{nothing}"
            )
    if own.offload == "optimizer":
        raise ConfigError(
            "roles.reference.offload: the reference is frozen and has no optimizer; set parameters, or leave it out"
        )


def _check_offload(config: Config, placement: ModelPlacement, held: Sequence[ModelPlacement]) -> None:
    name, wish, stage = placement.role.name, placement.engine.offload, placement.zero_stage
    own = getattr(config.roles, name)
    key = "engine.offload" if own.offload is None else f"roles.{name}.offload"
    zero = "engine.zero_stage" if own.zero_stage is None else f"roles.{name}.zero_stage"
    if placement.offloads_optimizer and stage == 0:
        raise ConfigError(
            f"{key}: {wish}: DeepSpeed keeps an optimizer on the host from ZeRO 1 on, and the {name} model is held "
            f"at ZeRO 0; set {zero}=1, on one rank too, or {key}=none"
        )
    # What is said of all models is for those that it suits; what is said of one, for any stage that it is part of.
    alike = [one for one in held if getattr(config.roles, one.role.name).offload is None]
    if own.offload is not None:
        alike = [one for of in ROLES for one in model_placements(config, of).values() if one.role.name == name]
    if wish in ("parameters", "all") and not any(one.offloads_parameters for one in alike):
        raise ConfigError(
            f"{key}: {wish}: weights that are trained wait on the host at ZeRO-3 only, and the {name} model is held "
            f"at ZeRO {stage}; set {zero}=3, or {key}={'optimizer' if stage else 'none'}"
        )


def _check_frozen(config: Config, placement: ModelPlacement) -> None:
    name, kind = placement.role.name, placement.engine.frozen
    own = getattr(config.roles, name)
    key = "engine.frozen" if own.frozen is None else f"roles.{name}.frozen"
    # What is said of all models is for the frozen ones, and the reward model is one in PPO.
    if own.frozen not in (None, "auto") and placement.quantization is None and name != "reward":
        raise ConfigError(
            f"{key}: {kind}: the {name} model is trained whole, and has no frozen weights; set roles.{name}.lora_rank, "
            "or leave it out"
        )
    if placement.quantization and placement.zero_stage == 3:
        zero = "engine.zero_stage" if own.zero_stage is None else f"roles.{name}.zero_stage"
        most = (
            2 if placement.role.trained or own.zero_stage is None else 0
        )  # 2, said of all models, is 0 for frozen ones
        raise ConfigError(
            f"{key}: {kind}: ZeRO-3 shards the weights of the {name} model, and quantized ones lie whole on every "
            f"rank; set {zero}={most}, or {key}=auto"
        )


def _check_nvme(config: Config, held: Sequence[ModelPlacement]) -> None:
    if config.engine.nvme is None:
        return
    offloading = [placement for placement in held if placement.offloads_optimizer or placement.offloads_parameters]
    if not offloading:
        raise ConfigError("engine.nvme: nothing is offloaded; set engine.offload=all, or leave engine.nvme out")
    if all(placement.zero_stage < 3 for placement in offloading):
        raise ConfigError(
            "engine.nvme: DeepSpeed uses a disk at ZeRO-3 only, and no model that is offloaded is held so; "
            "set engine.zero_stage=3, or leave engine.nvme out for the host's memory"
        )
    if config.ppo.ema and any(one.role.name == "actor" and one.zero_stage == 3 for one in offloading):
        raise ConfigError(
            "ppo.ema: an average follows weights in memory, and engine.nvme has the actor's on a disk; leave one of "
            "them out, or set roles.actor.offload=none"
        )
