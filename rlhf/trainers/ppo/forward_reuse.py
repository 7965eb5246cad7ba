"""Whether the passes that score a rollout can be those that its update differentiates (`ppo.reuse_forward`).

With one update the policy that is scored is the one that is trained: its ratio is 1, whose gradient is the same. What
the passes keep for backward lives until advantages are known, of all micro-batches and both models at once.
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


def why_not(context: StageContext, engines: Mapping[str, TrainingEngine]) -> str:
    """Why the passes of these models cannot be reused; empty: they can. The same on all ranks."""
    settings, ranks = context.config.ppo, context.world.size
    if not settings.reuse_forward:
        return "ppo.reuse_forward is false"
    if settings.updates > 1:
        return f"{settings.updates} updates follow a rollout (ppo.ppo_epochs, ppo.minibatch_size)"
    parts = settings.batch_size // (settings.minibatch(ranks)[1] * ranks)
    for name, engine in engines.items():
        if has_dropout(engine.module):
            return f"the {name} is trained with dropout"
        if engine.zero_stage == 3 and parts > 1:
            return f"at ZeRO-3 DeepSpeed gathers the {name}'s weights in the order of one micro-batch after the other"
    kept = "one micro-batch of each model keeps" if parts == 1 else f"{parts} micro-batches of each model keep"
    try:
        fits = _fits(context)
    except ConfigError as error:
        return "" if parts == 1 else f"how much memory it takes that {kept} is not known: {error}"
    if all(distributed.all_gather_objects(fits)):
        return ""
    return f"what {kept} for backward, at one time, would hardly fit in memory (ppo.micro_batch_size)"


def _fits(context: StageContext) -> bool:
    """Whether the plan has room for it on this rank's device; `context.models` are there already.

    Raises:
        ConfigError: the plan does not know the shape of a model.
    """
    config, held = context.config, context.placements
    local = current_process().count_local_ranks(context.world.size)
    environment, limits = detect_environment(context.accelerator, config, context.world.size, local=local)
    fused = all(getattr(context.configuration(name), "_attn_implementation", None) != "eager" for name in held)
    environment = replace(environment, process=min(environment.process, PROCESS), fused_attention=fused)
    shapes = {
        resolve_base_model(config, placement.role.base).path: context.shape(name) for name, placement in held.items()
    }
    return resolve_auto(config, ["ppo"], environment, limits=limits, shapes=shapes).ppo.reuse_forward
