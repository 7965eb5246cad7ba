"""Decide what PPO and distillation keep in memory only to save time, by the plan of the models that are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rlhf.engine import distributed
from rlhf.errors import ConfigError
from rlhf.generation.hybrid_engine import WeightLayout
from rlhf.memory.advice import resolve_auto
from rlhf.memory.environment import PROCESS, detect_environment
from rlhf.memory.stage import plan_stage
from rlhf.roles.lineage import resolve_base_model
from rlhf.roles.roles import ROLES
from rlhf.trainers.context import StageContext


class MemoryChoices(NamedTuple):
    """What fits in memory, on every rank.

    Attributes:
        reuses_passes: the passes that scored a rollout, until the update.
        copies_weights: a copy of the policy's weights in the device's layout, during a rollout.
        unknown: the reason why the plan does not know the models, or "".
    """

    reuses_passes: bool = False
    copies_weights: bool = False
    unknown: str = ""

    @property
    def layout(self) -> WeightLayout:
        """How rollouts convert the weights."""
        return "copied" if self.copies_weights else "in place"


def choose_by_memory(context: StageContext) -> MemoryChoices:
    """Return the choices, the same on all ranks; a line says if weights are not copied."""
    every = distributed.all_gather_objects(_choose(context))
    fitting = MemoryChoices(
        reuses_passes=all(choices.reuses_passes for choices in every),
        copies_weights=all(choices.copies_weights for choices in every),
    )
    choices = next((choices for choices in every if choices.unknown), fitting)
    stage, settings = context.directory.name, context.config.ppo
    # Exact rollouts read the weights as training does, and servers have their own.
    converts = stage != "ppo" or not (settings.generation_exact or settings.rollout.where)
    if converts and not choices.copies_weights and context.accelerator.kernels.get("inference_weights"):
        context.say(
            f"{ROLES[stage][0].name}: rollouts convert the weights in place, or not at all if they share a buffer: "
            + (choices.unknown or "a copy in the device's layout would hardly fit in memory")
        )
    return choices


def _choose(context: StageContext) -> MemoryChoices:
    config, placements, stage = context.config, context.placements, context.directory.name
    environment = detect_environment(context.accelerator, config, context.world.size)
    fused = all(getattr(context.configuration(name), "_attn_implementation", None) != "eager" for name in placements)
    # The models are loaded: the process's memory is no longer that of a process without models.
    environment = replace(environment, process=min(environment.process, PROCESS), fused_attention=fused)
    try:
        shapes = {
            resolve_base_model(config, placement.role.base).path: context.shape(name)
            for name, placement in placements.items()
        }
        resolved = resolve_auto(config, [stage], environment, shapes)
        plan = plan_stage(resolved, stage, environment, shapes)
    except ConfigError as error:
        return MemoryChoices(unknown=str(error))
    return MemoryChoices(resolved.ppo.reuse_forward, plan.copies_weights)
