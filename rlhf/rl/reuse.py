"""Whether the passes that score a rollout can be those that its update differentiates (`ppo.reuse_forward`).

With one update the policy that is scored is the one that is trained: its ratio is 1, whose gradient is the same. What
the passes keep for backward lives until advantages are known, of all micro-batches and both models at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.engine.training import TrainingEngine
from rlhf.models.dropout import drops
from rlhf.stages.context import StageContext


def why_not(context: StageContext, engines: Mapping[str, TrainingEngine]) -> str:
    """Why the passes of these models cannot be reused; empty: they can. The same on all ranks."""
    settings, ranks = context.config.ppo, context.world.size
    if not settings.reuse_forward:
        return "ppo.reuse_forward is false"
    if settings.updates > 1:
        return f"{settings.updates} updates follow a rollout (ppo.ppo_epochs, ppo.minibatch_size)"
    parts = settings.batch_size // (settings.minibatch(ranks)[1] * ranks)
    for name, engine in engines.items():
        if drops(engine.module):
            return f"the {name} is trained with dropout"
        if engine.zero_stage == 3 and parts > 1:
            return f"at ZeRO-3 DeepSpeed gathers the {name}'s weights in the order of one micro-batch after the other"
    return ""
