"""Switch one model from training to generation and back: the same weights, no second model.

The rank group (`rlhf.generation.rank_groups`) determines how the weights are read. A single rank has them whole, with
LoRA adapters merged if there is memory for that. For lockstep ranks, ZeRO-3 gathers each layer when it is needed, with
the adapters separate. A tensor-parallel group makes a second model, of which each rank holds a part. If the device
reads weights fastest in a special layout, they have it while completions are sampled.
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
def generation_mode(engine: TrainingEngine, rank_group: SingleRank | None = None) -> Iterator[nn.Module]:
    """Yield the engine's model as the rank group reads it, in evaluation mode and the engine's precision.

    Args:
        engine: engine of the policy.
        rank_group: the ranks that generate together; None: this rank alone.
    """
    with (
        _readable_weights(engine, rank_group) as module,
        _inference_layout(module, engine.accelerator),
        engine.precision.autocast(),
    ):
        was_training = module.training
        module.eval()
        try:
            yield module
        finally:
            module.train(was_training)


@contextmanager
def _readable_weights(engine: TrainingEngine, rank_group: SingleRank | None) -> Iterator[nn.Module]:
    if isinstance(rank_group, TensorParallelGroup):
        yield split_model(engine.module, rank_group)
    elif isinstance(rank_group, LockstepRanks):
        yield engine.module
    else:
        memory, lora = engine.accelerator.memory().total, engine.placement.lora
        with engine.whole_weights() as module, adapters_for_rollout(module, lora, memory):
            yield module


@contextmanager
def _inference_layout(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Keep the weights in the device's layout for inference (operation `inference_weights`), made once per block."""
    prepare = accelerator.kernels.get("inference_weights")
    restore = prepare(module, keep=True) if prepare else None
    try:
        yield
    finally:
        if restore:
            restore()
