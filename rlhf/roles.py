"""The models of each stage: where each comes from, whether it is trained, and how it is held.

The settings flow in; a `Holding` for each role flows out, which loading, engines, the check before a run and the plan
read alike. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf.config import Config, EngineConfig, LoraConfig, RoleConfig, Stage

Name = Literal["sft", "reward", "actor", "critic", "reference"]


@dataclass(frozen=True)
class Role:
    """One model of a stage. `start` is the key of `rlhf.settings.STARTS` that names what it is loaded from."""

    name: Name
    start: str
    trained: bool = True
    scalar_head: bool = False


ROLES: Mapping[Stage, tuple[Role, ...]] = {
    "sft": (Role("sft", "model.path"),),
    "reward": (Role("reward", "reward.model", scalar_head=True),),
    "ppo": (
        Role("actor", "ppo.actor"),
        Role("critic", "ppo.reward_model", scalar_head=True),
        Role("reference", "ppo.actor", trained=False),
        Role("reward", "ppo.reward_model", trained=False, scalar_head=True),
    ),
}
"""In the order in which they are loaded."""


@dataclass(frozen=True)
class Holding:
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


def holdings(config: Config, stage: Stage) -> dict[Name, Holding]:
    """How each model of a stage is held. With LoRA on the actor, PPO has no reference: it is the actor without."""
    found = {role.name: _holding(config, stage, role) for role in ROLES[stage]}
    if stage == "ppo" and found["actor"].lora.rank:
        del found["reference"]
    return found


def _holding(config: Config, stage: Stage, role: Role) -> Holding:
    own: RoleConfig = getattr(config.roles, role.name)
    rank = config.lora.rank if own.lora_rank is None else own.lora_rank
    checkpointing = own.gradient_checkpointing
    if checkpointing is None:
        checkpointing = config.model.gradient_checkpointing
    zero_stage = _zero_stage(config.engine.zero_stage if own.zero_stage is None else own.zero_stage, role)
    return Holding(
        role,
        stage,
        gradient_checkpointing=checkpointing and role.trained,
        dropout=_dropout(config, stage, role),
        lora=config.lora.model_copy(
            # Rollouts are scored without dropout: with it, the ratio of new to old policy would not begin at 1.
            update={"rank": rank if role.trained else 0} | ({"dropout": 0.0} if stage == "ppo" else {})
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
    if stage != "ppo":
        return config.sft.dropout if stage == "sft" else config.reward.dropout
    return {"actor": config.ppo.dropout, "critic": config.ppo.critic_dropout}.get(role.name, 0.0)
