"""Decide if the update can differentiate the passes that scored its rollout (`ppo.reuse_forward`).

With one update per rollout, the policy that is scored is also the one that is trained: the ratio is 1, and has the same
    gradient. The activations of
the passes stay in memory until advantages are known, for all micro-batches of both models at one time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.errors import ConfigError
from rlhf.memory.advice import resolve_auto
from rlhf.memory.environment import PROCESS, detect_environment
from rlhf.models.dropout import has_dropout
from rlhf.roles.lineage import resolve_base_model
from rlhf.trainers.context import StageContext
from rlhf.utils.process_info import current_process


def find_reuse_obstacle(context: StageContext, engines: Mapping[str, TrainingEngine]) -> str:
    """Return why the passes of these models cannot be reused; empty if they can. The same on all ranks."""
    settings, ranks = context.config.ppo, context.world.size
    if not settings.reuse_forward:
        return "ppo.reuse_forward is false"
    if settings.updates > 1:
        return f"{settings.updates} updates follow a rollout (ppo.ppo_epochs, ppo.minibatch_size)"
    micro_batches = settings.batch_size // (settings.minibatch(ranks)[1] * ranks)
    for name, engine in engines.items():
        if has_dropout(engine.module):
            return f"the {name} is trained with dropout"
        if engine.zero_stage == 3 and micro_batches > 1:
            return f"at ZeRO-3 DeepSpeed gathers the {name}'s weights in the order of one micro-batch after the other"
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
    local = current_process().count_local_ranks(context.world.size)
    environment = detect_environment(context.accelerator, config, context.world.size, local=local)
    fused = all(getattr(context.configuration(name), "_attn_implementation", None) != "eager" for name in placements)
    environment = replace(environment, process=min(environment.process, PROCESS), fused_attention=fused)
    shapes = {
        resolve_base_model(config, placement.role.base).path: context.shape(name)
        for name, placement in placements.items()
    }
    return resolve_auto(config, ["ppo"], environment, shapes).ppo.reuse_forward
