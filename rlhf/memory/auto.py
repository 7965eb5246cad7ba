"""The plan of a run: what is left to it (`auto`) is decided once, for all ranks; each stage says its plan as it begins.

A configuration and the accelerator flow in; a configuration without `auto`, lines, and what is recorded flow out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.memory import environment
from rlhf.memory.advice import changed, plan, remedy, settled
from rlhf.memory.report import peak, said
from rlhf.memory.stage import StagePlan
from rlhf.models.shape import Shape, shape_of
from rlhf.roles.lineage import ResolvedBaseModel, resolve_base_model
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from accelerators import Accelerator

KEYS = ("zero_stage", "offload")
"""Keys of `engine` that the plan may decide."""


def decided(
    config: Config,
    stages: Sequence[Stage],
    accelerator: Accelerator,
    ranks: int,
    local: int,
    recorded: Mapping[str, Any],
) -> tuple[Config, str | None]:
    """The configuration with a value in place of each `auto` of `engine`, and a line that says so.

    Args:
        local: ranks on this machine.
        recorded: `engine` of a run that is resumed: it goes on with what was decided then.

    Raises:
        ConfigError: the shape of a model is not known, so that nothing can be decided.
    """
    left = [key for key in KEYS if getattr(config.engine, key) == "auto"]
    if not left:
        return config, None
    if all(recorded.get(key, "auto") != "auto" for key in left):
        found, why = {key: recorded[key] for key in left}, "as the run was begun"
    else:
        around, room = environment.found(accelerator, config, ranks, local=local)
        resolved = settled(config, stages, around, room=room)
        plans = plan(resolved, stages, around, room=room)
        fullest = max(plans, key=lambda one: one.fullest.device)
        found, why = {key: getattr(resolved.engine, key) for key in left}, f"{fullest.stage}: {peak(fullest, room)}"
    listed = ", ".join(f"engine.{key}={value}" for key, value in found.items())
    return changed(config, {f"engine.{key}": value for key, value in found.items()}), f"auto: {listed} ({why})"


def stage_plan(
    config: Config,
    stage: Stage,
    accelerator: Accelerator,
    bases: Sequence[ResolvedBaseModel],
    *,
    ranks: int,
    local: int,
    fused: bool = True,
) -> tuple[StagePlan | None, list[str]]:
    """The plan of a stage that begins, and what to say of it; None where a model's shape is not known.

    Args:
        bases: the models that the stage starts from, with the paths that they are loaded from now.
        local: ranks on this machine.
    """
    around, room = environment.found(accelerator, config, ranks, local=local)
    around = replace(around, fused=fused)
    try:
        shapes: dict[str | None, Shape] = {
            resolve_base_model(config, base.ref).path: shape_of(base.path) for base in bases if base.path
        }
        (found,) = plan(config, [stage], around, room=room, shapes=shapes)
    except ConfigError:  # nothing that would keep the run from working
        return None, []
    if room.holds(found):
        return found, [f"{stage}: plan: {peak(found, room)}"]
    change = said(remedy(config, [stage], around, room, shapes))
    where = peak(found, room)
    if found.fullest.device <= room.device:
        where = f"peak about {format_bytes(found.host)} of {format_bytes(room.host or 0)} on the host for each rank"
    return found, [f"{stage}: plan: it will hardly fit: {where}; {f'try {change}' if change else 'no change helps'}"]
