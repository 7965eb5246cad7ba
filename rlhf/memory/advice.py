"""Whether a run fits a device, and what to change where it does not: the least that helps, in words.

A configuration, its models and the surroundings flow in; plans, and `Change`s that make them fit, flow out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.memory.model_state import Surroundings
from rlhf.memory.models import Shapes, models_of
from rlhf.memory.stage import StagePlan, plan_stage
from rlhf.roles import roles

_MOST_DEVICES = 1024
_LORA_RANK = 8


@dataclass(frozen=True)
class Room:
    """Bytes of memory of one device, and of the host for each rank; None: not known."""

    device: int
    host: int | None = None

    def holds(self, plan: StagePlan) -> bool:
        return plan.fullest.device <= self.device and (self.host is None or plan.host <= self.host)


@dataclass(frozen=True)
class Change:
    """Settings to give, and what they cost."""

    settings: dict[str, Any]
    cost: str

    def __str__(self) -> str:
        return ", ".join(f"{key}={_written(value)}" for key, value in self.settings.items())


def plan(
    config: Config,
    stages: Sequence[Stage],
    around: Surroundings,
    *,
    room: Room | None = None,
    shapes: Shapes | None = None,
) -> list[StagePlan]:
    """The plan of each stage, with what is left to the plan (`auto`) decided by `room`, where that is known.

    Raises:
        ConfigError: the shape of a model is not known, or a batch cannot be divided over the ranks.
    """
    config = settled(config, stages, around, room=room, shapes=shapes)
    return [plan_stage(config, stage, models_of(config, stage, shapes), around) for stage in stages]


def settled(
    config: Config,
    stages: Sequence[Stage],
    around: Surroundings,
    *,
    room: Room | None = None,
    shapes: Shapes | None = None,
) -> Config:
    """The configuration with numbers in place of each `auto` that the plan decides: the first that fits, or the last.

    ZeRO: the least sharding; offload: the least; rollouts at ZeRO-3: `whole`, `tensor_parallel`, `layerwise`; PPO's
    passes are reused.
    """
    choices = [config]
    for key, values in _choices(config, around):
        made = [changed(choice, {key: value}) for choice in choices for value in values]
        choices = [choice for choice in made if _possible(choice, stages, around)] or made[:1]
    if room is None:
        return choices[0]
    for choice in choices:
        plans = (plan_stage(choice, stage, models_of(choice, stage, shapes), around) for stage in stages)
        if all(map(room.holds, plans)):
            return choice
    return choices[-1]


def _choices(config: Config, around: Surroundings) -> Iterator[tuple[str, Sequence[Any]]]:
    if config.engine.offload == "auto":
        yield "engine.offload", ("none", "optimizer", "all")
    if config.engine.zero_stage == "auto":
        yield "engine.zero_stage", (0, 1, 2, 3) if around.ranks > 1 else (0,)
    if config.ppo.generation_weights == "auto":
        yield "ppo.generation_weights", ("whole", "tensor_parallel", "layerwise") if around.ranks > 1 else ("whole",)
    if config.ppo.reuse_forward and config.ppo.updates == 1:
        yield "ppo.reuse_forward", (True, False)


def fits(
    config: Config, stages: Sequence[Stage], around: Surroundings, room: Room, shapes: Shapes | None = None
) -> bool:
    """Whether all stages fit."""
    return all(room.holds(found) for found in plan(config, stages, around, room=room, shapes=shapes))


def remedy(
    config: Config, stages: Sequence[Stage], around: Surroundings, room: Room, shapes: Shapes | None = None
) -> list[Change]:
    """The cheapest changes that make the stages fit; empty where nothing does, or where they fit as they are.

    One change is cheaper than two; of single ones the first of `changes` that is enough. Where none is enough alone
    they are taken together, in that order, and those that turn out not to be needed are left out again.
    """
    if fits(config, stages, around, room, shapes):
        return []
    known = [one for one in changes(config, stages, around) if _possible(changed(config, one.settings), stages, around)]
    for change in known:
        if fits(changed(config, change.settings), stages, around, room, shapes):
            return [change]
    taken: list[Change] = []
    for change in known:
        taken.append(change)
        if fits(_with(config, taken), stages, around, room, shapes):
            break
    else:
        return []
    for change in reversed(taken[:-1]):  # the dearer ones first
        fewer = [other for other in taken if other is not change]
        if fits(_with(config, fewer), stages, around, room, shapes):
            taken = fewer
    return taken


def changes(config: Config, stages: Sequence[Stage], around: Surroundings) -> Iterator[Change]:
    """What could be changed, the cheapest first; each only where it would change something."""
    share = config.ppo.batch_size // around.ranks
    if "ppo" in stages and share > 1:
        for rows in _parts(config.ppo.generation_batch_size or share):
            yield Change({"ppo.generation_batch_size": rows}, f"rollouts in parts of {rows} rows; the same samples")
    besides = "dpo" in stages and "reference" in roles.model_placements(config, "dpo")
    if besides:
        yield Change({"dpo.reference": "precomputed"}, "one pass over the pairs before training; the same numbers")
    for smaller in _smaller_micro_batches(config, stages, around):
        yield Change(smaller, "more passes for a step; the same numbers")
    if not config.model.gradient_checkpointing:
        yield Change({"model.gradient_checkpointing": True}, "about a third more time for updates; the same numbers")
    stage = config.engine.zero_stage
    if around.ranks > 1 and stage != "auto":
        cost = {1: "hardly slower", 2: "hardly slower", 3: "weights are sent around in every pass"}
        for more in range(stage + 1, 4):
            yield Change({"engine.zero_stage": more}, f"{cost[more]}; the same numbers")
    if "ppo" in stages and config.ppo.ema and not config.ppo.ema_on_host and not around.one_memory:
        yield Change({"ppo.ema_on_host": True}, "the average is computed on the host; the same numbers")
    if config.engine.offload == "none" and not around.one_memory:
        sharded = {} if stage else {"engine.zero_stage": 1}
        yield Change({"engine.offload": "optimizer"} | sharded, "the optimizer steps on the host: slower updates")
        yield Change(
            {"engine.offload": "all", "engine.zero_stage": 3}, "weights come from the host in every pass: slow"
        )
    rank = config.lora.rank or _LORA_RANK
    if not config.lora.rank:
        yield Change({"lora.rank": rank}, "adapters are trained in place of all weights: other results")
    if config.engine.frozen == "auto" and (config.lora.rank or "ppo" in stages or besides):
        yield Change({"engine.frozen": "int8"}, "frozen weights are rounded to 8 bits")
        yield Change({"engine.frozen": "int4"}, "frozen weights are rounded to 4 bits")
    if config.engine.frozen == "auto" and not config.lora.rank:
        yield Change({"lora.rank": rank, "engine.frozen": "int8"}, "adapters on weights that are rounded to 8 bits")


def fewest_devices(
    config: Config, stages: Sequence[Stage], around: Surroundings, room: Room, shapes: Shapes | None = None
) -> int | None:
    """The smallest number of devices on which the stages fit; None: there is none."""
    shared = math.gcd(*(_rows_of_a_rank(config, stage, replace(around, ranks=1)) for stage in stages))
    for ranks in (ranks for ranks in range(1, min(shared, _MOST_DEVICES) + 1) if shared % ranks == 0):
        with contextlib.suppress(ConfigError):  # a micro-batch that does not divide a share
            if fits(config, stages, replace(around, ranks=ranks), room, shapes):
                return ranks
    return None


def largest_micro_batch(
    config: Config, stage: Stage, around: Surroundings, room: Room, shapes: Shapes | None = None
) -> int | None:
    """The most rows in one forward pass of a rank with which the stage fits; None: not even one."""
    rows = _rows_of_a_rank(config, stage, around)
    for part in [rows, *_parts(rows)]:
        if fits(changed(config, {f"{stage}.micro_batch_size": part}), [stage], around, room, shapes):
            return part
    return None


def changed(config: Config, settings: dict[str, Any]) -> Config:
    """The configuration with other values of the keys; `ppo.batch_size` is one."""
    for key, value in settings.items():
        section, name = key.split(".")
        own = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: own})
    return config


def _possible(config: Config, stages: Sequence[Stage], around: Surroundings) -> bool:
    """Whether the models can be held so."""
    try:
        roles.check_placements(config, stages)
    except ConfigError:
        return False
    return True


def _with(config: Config, taken: Sequence[Change]) -> Config:
    for change in taken:
        config = changed(config, change.settings)
    return config


def _smaller_micro_batches(config: Config, stages: Sequence[Stage], around: Surroundings) -> Iterator[dict[str, Any]]:
    """Of all stages at once, half as many rows each time."""
    rows = {
        stage: getattr(config, stage).micro_batch_size or _rows_of_a_rank(config, stage, around) for stage in stages
    }
    while any(count > 1 for count in rows.values()):
        rows = {stage: next(iter(_parts(count)), 1) for stage, count in rows.items()}
        yield {f"{stage}.micro_batch_size": count for stage, count in rows.items()}


def _rows_of_a_rank(config: Config, stage: Stage, around: Surroundings) -> int:
    """Rows of one optimizer step that a rank has."""
    if stage == "ppo":
        return (config.ppo.minibatch_size or config.ppo.batch_size) // around.ranks
    return config.supervised(stage).batch_size // around.ranks


def _parts(rows: int) -> Iterator[int]:
    """Numbers of rows into which `rows` divide, the largest first, each at most half the one before."""
    last = rows
    for part in range(rows // 2, 0, -1):
        if rows % part == 0 and part <= last // 2:
            last = part
            yield part


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
