"""The switch of one model from training to generation and back: the same weights, no second copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from rlhf.engine.training import TrainingEngine


@contextmanager
def generating(engine: TrainingEngine) -> Iterator[nn.Module]:
    """The engine's model with whole weights, in evaluation mode and the engine's precision."""
    with engine.whole_weights() as module, engine.precision.autocast():
        was_training = module.training
        module.eval()
        try:
            yield module
        finally:
            module.train(was_training)
