"""The switch of one model from training to generation and back: the same weights, no second model.

How the weights are had follows from who generates together (`rlhf.generation.rank_groups`). A rank alone has them
whole, with
LoRA adapters merged if there is room for that (`merges`). Ranks in step have ZeRO-3 gather each layer when it is
needed, the adapters beside it; a team makes a second model, of which each rank holds a part. Where the device reads
weights best in a form of its own, they are in that too, for as long as completions are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from rlhf.generation.rank_groups import LockstepRanks, SingleRank, TensorParallelGroup
from rlhf.generation.tensor_parallel import split_model
from rlhf.models.lora import adapters_for_rollout

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.engine.engine import TrainingEngine


@contextmanager
def generating(engine: TrainingEngine, team: SingleRank | None = None) -> Iterator[nn.Module]:
    """The engine's model as the team reads it, in evaluation mode and the engine's precision.

    Args:
        team: the ranks that generate together; None: this one alone.
    """
    with _weights(engine, team) as module, _prepared(module, engine.accelerator), engine.precision.autocast():
        was_training = module.training
        module.eval()
        try:
            yield module
        finally:
            module.train(was_training)


@contextmanager
def _weights(engine: TrainingEngine, team: SingleRank | None) -> Iterator[nn.Module]:
    if isinstance(team, TensorParallelGroup):
        yield split_model(engine.module, team)
    elif isinstance(team, LockstepRanks):
        yield engine.module
    else:
        memory, lora = engine.accelerator.memory().total, engine.placement.lora
        with engine.whole_weights() as module, adapters_for_rollout(module, lora, memory):
            yield module


@contextmanager
def _prepared(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Weights are as the device reads them best (operation `inference_weights`): made once for all that is drawn."""
    prepare = accelerator.kernels.get("inference_weights")
    restore = prepare(module, keep=True) if prepare else None
    try:
        yield
    finally:
        if restore:
            restore()
