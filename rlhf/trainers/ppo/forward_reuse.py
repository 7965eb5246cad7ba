"""Decide if the update can differentiate the passes that scored its rollout (`ppo.reuse_forward`).

With one update per rollout, the policy that is scored is also the one that is trained: the ratio is 1 and has the same
gradient. The activations of the passes stay in memory until the advantages are known, for all micro-batches of both
models at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.errors import ConfigError
from rlhf.memory.advice import resolve_auto
from rlhf.memory.environment import PROCESS, detect_environment
from rlhf.memory.stage import find_reuse_obstacle
from rlhf.models.dropout import has_dropout
from rlhf.roles.lineage import resolve_base_model
from rlhf.trainers.context import StageContext


def explain_separate_passes(context: StageContext, engines: Mapping[str, TrainingEngine]) -> str:
    """Return why the passes of these models cannot be reused; empty if they can. The same on all ranks."""
    settings, ranks = context.config.ppo, context.world.size
    micro_batches = settings.batch_size // (settings.minibatch(ranks)[1] * ranks)
    trained = [(name, has_dropout(engine.module), engine.zero_stage) for name, engine in engines.items()]
    if obstacle := find_reuse_obstacle(settings, micro_batches, trained):
        return obstacle
    activations = f"the activations of {'one micro-batch' if micro_batches == 1 else f'{micro_batches} micro-batches'}"
    try:
        fits = _fits(context)
    except ConfigError as error:
        return "" if micro_batches == 1 else f"the memory for {activations} of each model is unknown: {error}"
    if all(distributed.all_gather_objects(fits)):
        return ""
    return f"{activations} of each model, at one time, would hardly fit in memory (ppo.micro_batch_size)"


def _fits(context: StageContext) -> bool:
    """Return whether the plan expects enough memory on this rank's device; the models are already loaded.

    Raises:
        ConfigError: the plan does not know the shape of a model.
    """
    config, placements = context.config, context.placements
    environment = detect_environment(context.accelerator, config, context.world.size)
    fused = all(getattr(context.configuration(name), "_attn_implementation", None) != "eager" for name in placements)
    environment = replace(environment, process=min(environment.process, PROCESS), fused_attention=fused)
    shapes = {
        resolve_base_model(config, placement.role.base).path: context.shape(name)
        for name, placement in placements.items()
    }
    return resolve_auto(config, ["ppo"], environment, shapes).ppo.reuse_forward
