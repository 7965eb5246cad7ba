"""The switch of one model from training to generation and back: the same weights, no second copy.

Where LoRA adapters are trained they are merged for generation, if there is room for that; see `merges`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from rlhf.models.lora import adapters_for_rollout

if TYPE_CHECKING:
    from rlhf.engine.training import TrainingEngine


@contextmanager
def generating(engine: TrainingEngine) -> Iterator[nn.Module]:
    """The engine's model with whole weights, in evaluation mode and the engine's precision."""
    memory, lora = engine.accelerator.memory().total, engine.holding.lora
    with engine.whole_weights() as module, adapters_for_rollout(module, lora, memory), engine.precision.autocast():
        was_training = module.training
        module.eval()
        try:
            yield module
        finally:
            module.train(was_training)
