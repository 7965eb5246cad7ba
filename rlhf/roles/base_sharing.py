"""Decide which models share one frozen base under LoRA, from the settings and the adapters' records.

With LoRA most of a model is frozen, and frozen weights that two models have in common are stored once. Needs no
torch; `rlhf.models.shared_base` builds the models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.errors import ConfigError
from rlhf.roles.lineage import ACTOR, REWARD, REWARD_MODEL, STUDENT, TEACHER, ResolvedBaseModel, resolve_base_model
from rlhf.roles.model_identity import StartModel, check_model_files, fingerprint_model, identify_model
from rlhf.roles.roles import ModelPlacement, RoleName, model_placements
from rlhf.utils.atomic_io import atomic_write_json, read_json

ADAPTER = "adapter"
"""The folder of a stage's adapter, next to that of its model."""
BASE_RECORD = "base.json"
"""The record in an adapter's folder of the model that it was trained on."""

Placements = Mapping[RoleName, ModelPlacement]


class Obstacle(NamedTuple):
    """The reason why models cannot share a base, and a remedy."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Sharing:
    """The models that share a frozen base.

    Attributes:
        donors: maps each model that is built on another's frozen weights to that other model.
        adapter: folder of the adapter that turns the base into the reward model, or into the teacher; None if that is
            not built on the base.
        obstacle: the reason why LoRA models do not share more; None if they share as much as possible.
    """

    donors: Mapping[RoleName, RoleName] = field(default_factory=dict)
    adapter: Path | None = None
    obstacle: Obstacle | None = None

    def describe(self, placements: Placements) -> str | None:
        """Return one line for the log; None without LoRA, or if sharing is turned off."""
        if not self.donors and not self.obstacle:
            return None
        groups: dict[str, list[str]] = {}
        if "reference" not in placements:  # the reference is the actor without its adapters
            groups = {"actor": ["actor", "reference"]}
        for name, donor in self.donors.items():
            root = self.donors.get(donor, donor)
            groups.setdefault(root, [root]).append(name)
        line = "; ".join(f"{_enumerate(dict.fromkeys(names))} share one frozen base" for names in groups.values())
        if not self.obstacle:
            return line
        start = f"{line}; the others do not" if line else "no frozen base is shared"
        return f"{start}: {self.obstacle.reason}"


def decide_sharing(config: Config, placements: Placements, actor: str, reward: str | None) -> Sharing:
    """Decide what PPO's models share, given the folders or hub names that the actor and the reward model start from.

    Raises:
        ConfigError: `lora.share_base: true`, and a model cannot share the base.
    """
    adapter = adapter_folder(reward) if reward else None
    return _require(config, _decide(config, placements, lambda: _compare_bases(actor, reward or ""), adapter))


def decide_teacher_sharing(config: Config, placements: Placements, student: ResolvedBaseModel) -> Sharing:
    """Decide if distillation's teacher is built on the student's frozen base: if it is an adapter of the same model.

    No model of a teacher on servers is loaded.
    `student` is the model that the student starts from. The adapter must have been saved by a stage, with its record.
    """
    if "teacher" not in placements:
        return Sharing()
    base, teacher = resolve_base_model(config, TEACHER), placements["teacher"]
    trained = placements["student"]
    record = Path(base.adapter or "", BASE_RECORD)
    possible = config.lora.share_base is not False and trained.lora.rank and trained.zero_stage < 3 > teacher.zero_stage
    if not (possible and base.adapter and record.is_file() and student.path) or student.through:
        return Sharing()
    fingerprint = read_json(record).get("fingerprint")
    if trained.engine.frozen != teacher.engine.frozen or not fingerprint:
        return Sharing()
    if fingerprint != fingerprint_model(student.path):
        return Sharing()
    return Sharing({"teacher": "student"}, Path(base.adapter))


def predict_sharing(config: Config, stage: Stage, placements: Placements) -> Sharing:
    """Predict what a stage's models will share, for the memory plan, from the settings and the folders they name."""
    if stage == "distill":
        return decide_teacher_sharing(config, placements, resolve_base_model(config, STUDENT))
    if stage != "ppo":
        return Sharing()
    return _decide(config, placements, lambda: _predict_obstacle(config, EVERY_STAGE, None), Path())


def check_sharing(config: Config, pending: Collection[Stage], finished_model: Callable[[Stage, str], str]) -> None:
    """Check settings of frozen weights that may be impossible: one base for all models, merging quantized weights.

    The arguments are those of `resolve_base_model`.

    Raises:
        ConfigError: with the reason, and what to do.
    """
    if "ppo" not in pending:
        return
    placements = model_placements(config, "ppo")
    frozen = placements["actor"].engine.frozen
    if config.lora.merge is True and placements["actor"].lora.rank and frozen != "auto":
        raise ConfigError(
            f"lora.merge: adapters cannot be merged into {frozen} weights (the actor's); leave lora.merge at auto, or "
            "set roles.actor.frozen=auto"
        )
    if config.lora.share_base is True:  # comparing bases reads their files
        _require(
            config, _decide(config, placements, lambda: _predict_obstacle(config, pending, finished_model), Path())
        )


def adapter_folder(model: str) -> Path:
    """Return the folder of the adapter that the reward stage saved next to its `model`."""
    return Path(model).with_name(ADAPTER)


def identify_bases(config: Config, stage: Stage, bases: Iterable[ResolvedBaseModel]) -> dict[str, StartModel]:
    """Return the content of the models that a stage starts from, by key, after a check of the files that rlhf wrote.

    Models that have yet to be trained, or are built for the run, are left out. `model.tokenizer` replaces the tokenizer
    of the model that fine-tuning starts from. A reward model's adapter counts, since PPO may build the model with it.

    Raises:
        ModelError: a file differs from its manifest.
    """
    models: dict[str, StartModel] = {}
    for base in bases:
        if base.path is None or base.through:
            continue
        check_model_files(base.path)
        identity = identify_model(base.path)
        if stage == "sft" and config.model.tokenizer:
            identity.pop("tokenizer", None)
        adapter = adapter_folder(base.path)
        if base.adapter:
            check_model_files(base.adapter)
            identity["adapter"] = str(fingerprint_model(base.adapter))
        elif base.ref == REWARD_MODEL and (adapter / BASE_RECORD).is_file():
            check_model_files(adapter)
            identity["adapter"] = str(fingerprint_model(str(adapter)))
        if identity:
            models[base.ref.key] = StartModel(base.adapter or base.path, identity)
    if stage == "sft" and (path := config.model.tokenizer):
        check_model_files(path)
        if digest := identify_model(path).get("tokenizer"):
            models["model.tokenizer"] = StartModel(path, {"tokenizer": digest})
    return models


def record_base(folder: Path, base: str | None, merged: str | None = None) -> None:
    """Record in an adapter's folder the model that it was trained on, and the model next to it that has it `merged`."""
    record = {"path": base, "fingerprint": fingerprint_model(base) if base else None}
    atomic_write_json(folder / BASE_RECORD, record | {"merged": fingerprint_model(merged) if merged else None})


def _decide(
    config: Config, placements: Placements, compare: Callable[[], Obstacle | None], adapter: Path | None
) -> Sharing:
    """Decide what is shared; `compare` returns the reason why the reward model cannot use the actor's base.

    Models that only evaluations use keep their own base.
    """
    placements = {name: placement for name, placement in placements.items() if placement.role.in_steps}
    ranks = {name: placement.lora.rank for name, placement in placements.items() if placement.role.trained}
    if config.lora.share_base is False:
        return Sharing()
    if not any(ranks.values()):
        if config.lora.share_base is not True:
            return Sharing()
        return Sharing(obstacle=Obstacle("no model is trained with LoRA", "set lora.rank"))
    if sharded := [name for name, placement in placements.items() if placement.zero_stage == 3]:
        reason = f"at ZeRO-3 DeepSpeed shards each model's weights separately ({_enumerate(sharded)})"
        return Sharing(obstacle=Obstacle(reason, "set engine.zero_stage=2"))
    if len({placement.engine.frozen for placement in placements.values()}) > 1:
        reason = "the models' frozen weights have different precisions (roles.*.frozen)"
        return Sharing(obstacle=Obstacle(reason, "set engine.frozen alone"))
    reference: dict[RoleName, RoleName] = {"reference": "actor"} if "reference" in placements and ranks["actor"] else {}
    critic_is_reward = "critic" in placements and placements["critic"].role.base == REWARD_MODEL
    on_critic: dict[RoleName, RoleName] = {"reward": "critic"} if critic_is_reward and ranks["critic"] else {}
    obstacle = _find_obstacle(config, placements, ranks, critic_is_reward=critic_is_reward)
    if obstacle and ("reward" not in placements or not ranks["actor"]):
        return Sharing(reference | on_critic, None, obstacle)
    if "reward" in placements and (other_base := compare()):
        return Sharing(reference | on_critic, None, obstacle or other_base)
    if critic_is_reward and not obstacle:
        return Sharing({"critic": "actor", **reference, **on_critic}, adapter)
    return Sharing(reference | ({"reward": "actor"} if "reward" in placements else {}), adapter, obstacle)


def _find_obstacle(
    config: Config, placements: Placements, ranks: Mapping[RoleName, int], *, critic_is_reward: bool
) -> Obstacle | None:
    """Return the reason why a trained model shares no base, regardless of the reward model's base."""
    if in_full := [name for name, rank in ranks.items() if not rank]:
        return Obstacle(f"the {in_full[0]} is trained in full", f"remove roles.{in_full[0]}.lora_rank")
    if "critic" in placements and not critic_is_reward:
        remedy = "remove ppo.critic" if config.ppo.critic else "set ppo.reward_weight"
        return Obstacle("the critic does not start from the reward model", remedy)
    return None


def _require(config: Config, sharing: Sharing) -> Sharing:
    if config.lora.share_base is True and sharing.obstacle:
        reason, remedy = sharing.obstacle
        raise ConfigError(f"lora.share_base: true, but {reason}; {remedy}, or leave lora.share_base at auto")
    return sharing


def _compare_bases(actor: str, reward: str) -> Obstacle | None:
    """Return the reason why the reward model cannot use the actor's base, from the record of its adapter."""
    record = adapter_folder(reward) / BASE_RECORD
    if not record.is_file():
        return Obstacle(f"{reward} has no adapter next to it", "train the reward model with LoRA")
    base = read_json(record)
    if (merged := base.get("merged")) and merged != fingerprint_model(reward):
        return Obstacle(f"the adapter next to {reward} belongs to another model", "train the reward model with LoRA")
    recorded, current = base["fingerprint"], fingerprint_model(actor)
    if (recorded == current) if recorded and current else (base["path"] == actor):
        return None
    if base["path"] == actor:
        return Obstacle(
            f"the weights or the configuration of {actor} changed after {reward} was trained",
            "train the reward model again",
        )
    reason = f"{reward} was trained on {base['path']}, and the actor starts from {actor}"
    return Obstacle(reason, "start both from the same model")


def _predict_obstacle(
    config: Config, pending: Collection[Stage], finished_model: Callable[[Stage, str], str] | None
) -> Obstacle | None:
    """Predict `_compare_bases` for a run whose `pending` stages have not been trained."""
    actor = resolve_base_model(config, ACTOR, pending, finished_model)
    reward = resolve_base_model(config, REWARD_MODEL, pending, finished_model)
    if "reward" in reward.through and not model_placements(config, "reward")["reward"].lora.rank:
        return Obstacle("the reward model is trained in full", "remove roles.reward.lora_rank")
    if "reward" in reward.through:
        base = resolve_base_model(config, REWARD, pending, finished_model)
        if (base.path, base.through) == (actor.path, actor.through):
            return None
        names = [
            model.ref.named_in(config) or f"the model of the {model.ref.trained_by} stage" for model in (base, actor)
        ]
        reason = f"the reward model is trained on {names[0]}, and the actor starts from {names[1]}"
        return Obstacle(reason, "start both from the same model")
    if actor.through:
        return Obstacle("the reward model was trained before the actor's base", "train the reward model again")
    assert actor.path and reward.path  # none is pending, and an embedded model is never used untrained
    return _compare_bases(actor.path, reward.path)


def _enumerate(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)
