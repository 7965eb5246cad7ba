"""The switch of one model from training to generation and back: the same weights, no second copy.

Where LoRA adapters are trained they are merged for generation; see `merged_adapters` for what that takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from rlhf.models.lora import merged_adapters

if TYPE_CHECKING:
    from rlhf.engine.training import TrainingEngine


@contextmanager
def generating(engine: TrainingEngine) -> Iterator[nn.Module]:
    """The engine's model with whole weights, in evaluation mode and the engine's precision."""
    with engine.whole_weights() as module, merged_adapters(module), engine.precision.autocast():
        was_training = module.training
        module.eval()
        try:
            yield module
        finally:
            module.train(was_training)
