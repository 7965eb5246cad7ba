"""Which of PPO's models stand on one frozen base: decided from settings, folders and what the reward stage left there.

With LoRA most of a model is frozen, and what is frozen in two models alike need be there once. Needs no torch; how
the weights are shared is `rlhf.models.shared_base`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.config.schema import STAGES, Config, Stage
from rlhf.errors import ConfigError
from rlhf.roles.lineage import ACTOR, REWARD, REWARD_MODEL
from rlhf.roles.roles import ModelPlacement, RoleName, model_placements
from rlhf.utils.atomic_io import atomic_write_json, read_json

ADAPTER = "adapter"
"""The folder of a stage's adapter, beside that of its model."""
_BASE = "base.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_BLOCKS, _BLOCK = 256, 4096


@dataclass(frozen=True)
class Sharing:
    """`donors`: for each model that is built on another's frozen weights, which one that is.

    `adapter`: what the reward model adds to the actor's base, where it stands on that. `why_not` says what keeps models
    apart that LoRA could bring together; `remedy` what could be done about it.
    """

    donors: Mapping[RoleName, RoleName] = field(default_factory=dict)
    adapter: Path | None = None
    why_not: str = ""
    remedy: str = ""

    def line(self, held: Mapping[RoleName, ModelPlacement]) -> str | None:
        """What to say of it; None: LoRA trains nothing, or sharing was not asked for."""
        with_reference = "reference" not in held  # it is the actor without its adapters
        because = f": {self.why_not}" if self.why_not else ""
        if not self.donors and not because:
            return None
        if not self.donors and not with_reference:
            return f"no frozen base is shared{because}"
        groups: dict[str, list[str]] = {"actor": ["actor", "reference"]} if with_reference else {}
        for name, donor in self.donors.items():
            root = self.donors.get(donor, donor)
            groups.setdefault(root, [root]).append(name)
        said = "; ".join(f"{_listed(dict.fromkeys(names))} share one frozen base" for names in groups.values())
        return f"{said}; not more{because}" if because else said


def decide_sharing(config: Config, held: Mapping[RoleName, ModelPlacement], actor: str, reward: str | None) -> Sharing:
    """What PPO's models share that start from the folders or hub names `actor` and `reward`; None: no reward model.

    Raises:
        ConfigError: as `check_sharing`.
    """
    apart = partial(_apart, actor, reward) if reward else None
    return _granted(config, _decide(config, held, apart, adapter_of(reward) if reward else None))


def predict_sharing(config: Config, held: Mapping[RoleName, ModelPlacement]) -> Sharing:
    """What PPO's models will share, as far as settings, and folders that they name, tell it; for a plan."""
    return _decide(config, held, lambda: _would_be_apart(config, STAGES, None), Path())


def check_sharing(config: Config, pending: Sequence[Stage], model_of: Callable[[Stage, str], str]) -> None:
    """Refuse what is asked of the frozen weights under LoRA and cannot be: one base for all, merging quantized ones.

    Raises:
        ConfigError: with the reason, and what to do.
    """
    if "ppo" not in pending:
        return
    held = model_placements(config, "ppo")
    if config.lora.merge is True and held["actor"].lora.rank and held["actor"].engine.frozen != "auto":
        raise ConfigError(
            f"lora.merge: true, but the actor's frozen weights are {held['actor'].engine.frozen}, to which nothing can "
            "be added; leave it at auto, or set roles.actor.frozen=auto"
        )
    _granted(config, _decide(config, held, lambda: _would_be_apart(config, pending, model_of), Path()))


def adapter_of(model: str) -> Path:
    """Where the reward stage that left `model` has left its adapter."""
    return Path(model).with_name(ADAPTER)


def record_base(folder: Path, base: str | None, merged: str | None = None) -> None:
    """Note in the folder of an adapter which model it was trained on, and which one beside it has it `merged`."""
    known = {"path": base, "fingerprint": fingerprint(base) if base else None}
    atomic_write_json(folder / _BASE, known | {"merged": fingerprint(merged) if merged else None})


def fingerprint(model: str) -> str | None:
    """Of the weights in a folder, or in the copy on this machine of the hub's; None where there are none.

    Of each file its size and blocks spread over it: whatever training does to a model, it changes nearly all numbers of
    the tensors that it changes.
    """
    folder = _folder(model)
    digest = hashlib.sha256()
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)) if folder else []
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for index in range(_BLOCKS):
                file.seek(max(0, size - _BLOCK) * index // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest() if files else None


def _decide(config: Config, held: Mapping[RoleName, ModelPlacement], apart: Any, adapter: Path | None) -> Sharing:
    """`apart`: gives (why the reward model is not on the actor's base, what to do about it), or empty texts."""
    ranks = {name: placement.lora.rank for name, placement in held.items() if placement.role.trained}
    if config.lora.share_base is False:
        return Sharing()
    if not any(ranks.values()):
        if config.lora.share_base is not True:
            return Sharing()
        return Sharing(why_not="nothing is trained with LoRA", remedy="set lora.rank")
    if sharded := [name for name, placement in held.items() if placement.zero_stage == 3]:
        return Sharing(
            why_not=f"at ZeRO-3 DeepSpeed shards and gathers each model's weights by itself ({_listed(sharded)})",
            remedy="set engine.zero_stage=2",
        )
    if len({placement.engine.frozen for placement in held.values()}) > 1:
        return Sharing(
            why_not="the models hold their frozen weights in different numbers (roles.*.frozen)",
            remedy="set engine.frozen alone",
        )
    own_reference: dict[RoleName, RoleName] = {"reference": "actor"} if "reference" in held and ranks["actor"] else {}
    alike = "critic" in held and held["critic"].role.start == REWARD_MODEL.key  # it begins as the reward model
    of_critic: dict[RoleName, RoleName] = {"reward": "critic"} if alike and ranks["critic"] else {}
    why, remedy = _alone(config, held, ranks, alike=alike)
    if why and ("reward" not in held or not ranks["actor"]):
        return Sharing(own_reference | of_critic, None, why, remedy)
    kept_apart = apart() if "reward" in held else ("", "")
    if kept_apart[0]:
        return Sharing(own_reference | of_critic, None, *((why, remedy) if why else kept_apart))
    if alike and not why:
        return Sharing({"critic": "actor", **own_reference, **of_critic}, adapter)
    return Sharing(own_reference | ({"reward": "actor"} if "reward" in held else {}), adapter, why, remedy)


def _alone(
    config: Config, held: Mapping[RoleName, ModelPlacement], ranks: Mapping[RoleName, int], *, alike: bool
) -> tuple[str, str]:
    """Why a model that is trained shares no base, whatever the reward model is, and what to do about it."""
    if whole := [name for name, rank in ranks.items() if not rank]:
        return f"the {whole[0]} is trained whole", f"leave roles.{whole[0]}.lora_rank out"
    if "critic" in held and not alike:
        remedy = "leave ppo.critic out" if config.ppo.critic else "set ppo.reward_weight"
        return "the critic does not begin as the reward model", remedy
    return "", ""


def _granted(config: Config, found: Sharing) -> Sharing:
    if config.lora.share_base is True and found.why_not:
        raise ConfigError(f"lora.share_base: true, but {found.why_not}; {found.remedy}, or leave it at auto")
    return found


def _apart(actor: str, reward: str) -> tuple[str, str]:
    record = adapter_of(reward) / _BASE
    if not record.is_file():
        return f"{reward} has no adapter beside it, so it is a base of its own", "train the reward model with LoRA"
    base = read_json(record)
    if (merged := base.get("merged")) and merged != fingerprint(reward):
        return f"the adapter beside {reward} is another model's", "train the reward model with LoRA"
    there, now = base["fingerprint"], fingerprint(actor)
    if (there == now) if there and now else (base["path"] == actor):
        return "", ""
    if base["path"] == actor:
        return f"{actor} has other weights now than when {reward} was trained on it", "train the reward model anew"
    why = f"{reward} was trained on {base['path']}, and the actor starts from {actor}"
    return why, "start both from the same model"


def _would_be_apart(
    config: Config, pending: Sequence[Stage], model_of: Callable[[Stage, str], str] | None
) -> tuple[str, str]:
    """Predict `_apart` for stages that have not run; `model_of` returns the model of a finished stage."""
    values = config.model_dump()
    actor, reward = ACTOR, REWARD_MODEL
    before = REWARD
    if reward.named(values) is None and "reward" in pending:
        if not model_placements(config, "reward")["reward"].lora.rank:
            return "the reward model is trained whole", "leave roles.reward.lora_rank out"
        mine, theirs = actor.named(values), before.named(values)
        if mine == theirs:
            return "", ""
        of_run = "the model of the sft stage"
        return (
            f"the reward model is trained on {theirs or of_run}, and the actor starts from {mine or of_run}",
            "start both from the same model",
        )
    if actor.named(values) is None and "sft" in pending:
        return "the reward model is trained before the model that the actor starts from", "train it anew"
    mine, theirs = actor.named(values), reward.named(values)
    if model_of:
        mine = mine or model_of("sft", actor.key)
        theirs = theirs or model_of("reward", reward.key)
    assert mine and theirs  # named, where every stage is still to be run
    return _apart(mine, theirs)


def _folder(model: str) -> Path | None:
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _listed(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)
