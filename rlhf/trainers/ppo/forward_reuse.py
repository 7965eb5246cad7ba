"""Decide if the update can differentiate the passes that scored its rollout (`ppo.reuse_forward`).

With one update per rollout, the policy that is scored is also the one that is trained: the ratio is 1 and has the same
gradient. The activations of the passes stay in memory until the advantages are known, for all micro-batches of both
models at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.engine.engine import TrainingEngine
from rlhf.memory.stage import find_reuse_obstacle
from rlhf.models.dropout import is_stochastic
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.memory_choices import MemoryChoices


def explain_separate_passes(
    context: StageContext, engines: Mapping[str, TrainingEngine], choices: MemoryChoices
) -> str:
    """Return why the passes of these models cannot be reused; empty if they can. The same on all ranks."""
    settings, ranks = context.config.ppo, context.world.size
    micro_batches = settings.batch_size // (settings.minibatch(ranks)[1] * ranks)
    trained = [(name, is_stochastic(engine.module), engine.zero_stage) for name, engine in engines.items()]
    if obstacle := find_reuse_obstacle(settings, micro_batches, trained):
        return obstacle
    activations = f"the activations of {'one micro-batch' if micro_batches == 1 else f'{micro_batches} micro-batches'}"
    if choices.unknown:
        return "" if micro_batches == 1 else f"the memory for {activations} of each model is unknown: {choices.unknown}"
    if choices.reuses_passes:
        return ""
    return f"{activations} of each model, at one time, would hardly fit in memory (ppo.micro_batch_size)"
