"""An exponential moving average of the weights that an engine trains (arXiv:1412.6980, section 7.2).

An optimizer flows in; the average follows each step that it takes. For saving and evaluating it changes places
with the weights. A rank holds the average of its own masters only, so at ZeRO 1-3 its share, and with LoRA that of the
adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.engine.fp32_weights import get_fp32_weights, round_fp32_weights

if TYPE_CHECKING:
    from accelerators import Accelerator

CHUNK = 1 << 24
"""Elements that are on their way between the host and the device at a time."""


class EMA:
    """average := decay * average + (1 - decay) * weights, in float32, beginning at the weights.

    Args:
        optimizer: an engine's, which has the weights.
        on_host: it waits in the host's memory, and is computed there; else on the device.

    Attributes:
        tensors: this rank's part of the average.
    """

    def __init__(self, optimizer: Any, decay: float, accelerator: Accelerator, *, on_host: bool = False) -> None:
        self.decay = decay
        self._optimizer = optimizer
        self._host = accelerator.host_device()
        place = self._host if on_host else accelerator.device()
        self.tensors = [master.to(place, copy=True) for master in get_fp32_weights(optimizer)]
        if on_host and accelerator.pins_memory():
            self.tensors = [average.pin_memory() for average in self.tensors]

    @torch.no_grad()
    def follow(self) -> None:
        """Follow a step that the optimizer has taken."""
        for average, master in _pieces(self.tensors, get_fp32_weights(self._optimizer)):
            average.lerp_(master.to(average.device), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The weights are the average's for the block, and afterwards bit for bit what they were.

        Every rank enters it; no step is taken in it.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def save_state(self) -> list[Tensor]:
        """This rank's part of the average, in the host's memory."""
        return [average.to(self._host) for average in self.tensors]

    def load_state(self, state: list[Tensor]) -> None:
        for average, saved in zip(self.tensors, state, strict=True):
            average.copy_(saved)

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in _pieces(self.tensors, get_fp32_weights(self._optimizer)):
            kept = average.to(master.device, copy=True)
            average.copy_(master)
            master.copy_(kept)
        round_fp32_weights(self._optimizer)


def _pieces(averages: list[Tensor], of: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of both, piece by piece: no more than a piece is ever copied."""
    for average, master in zip(averages, of, strict=True):
        yield from zip(average.view(-1).split(CHUNK), master.view(-1).split(CHUNK), strict=True)
