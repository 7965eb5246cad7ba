"""A static key-value cache of which a model sees a part: the rows and columns in use at the moment.

A forward pass is shown the first rows and columns of the buffers, as if the cache were no larger. Fewer rows are
another view, and so are more columns where steps are recorded, over buffers that are made once at full size. Elsewhere
buffers grow with the columns: libraries copy what is no whole matrix before they multiply it, once in every step.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import DummyLayer, LinearAttentionLayer, StaticLayer, StaticSlidingWindowLayer

logger = logging.getLogger(__name__)


class CacheWindow:
    """What all layers of a cache have in common: the part in use, and where the tokens at hand are written.

    `rows`, `columns`: sizes of the part. `place` [T]: the columns of the tokens at hand. `seen`: how many tokens there
    are before them, a number or a tensor []. `grows`: buffers have as many columns as are in use.
    """

    def __init__(self, columns: int, grows: bool) -> None:
        self.rows: int | None = None
        self.columns = columns
        self.grows = grows
        self.place = torch.empty(0, dtype=torch.long)
        self.seen: int | Tensor = 0


class WindowedStaticLayer(StaticLayer):
    """One layer. Its `keys` and `values` are views of the buffers, [rows, heads, columns, head size].

    Layers with a sliding window hold the whole row too, and the attention mask alone keeps the window: transformers'
    own (5.x: StaticSlidingWindowLayer) counts tokens in a Python integer, and a replay would repeat the mask and the
    place of the recorded step. Rollouts are rarely longer than the window, so it costs little.
    """

    def __init__(self, length: int, view: CacheWindow) -> None:
        super().__init__(max_cache_len=length)
        self._view = view
        self._buffers: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self._view.grows:
            self.max_cache_len = self._view.columns
        super().lazy_initialization(key_states, value_states)
        self._buffers = self.keys, self.values
        self.show()

    def show(self) -> None:
        """Take the view's sizes."""
        if self._buffers:
            rows, columns = self._view.rows, self._view.columns
            if self._view.grows and columns != self._buffers[0].shape[2]:
                self._buffers = tuple(_resized(buffer, columns) for buffer in self._buffers)
            self.keys, self.values = (buffer[:rows, :, :columns] for buffer in self._buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._view.place, key_states)
        self.values.index_copy_(2, self._view.place, value_states)
        if key_states.shape[2] == self._view.columns:
            return key_states, value_states  # the same, and contiguous
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._view.columns, 0

    def get_seq_length(self) -> int | Tensor:
        return self._view.seen

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Write some rows of the view over others."""
        for part in (self.keys, self.values):
            part.index_copy_(0, targets, part.index_select(0, sources))

    def reset(self) -> None:
        for buffer in self._buffers:
            buffer.zero_()


class WindowedStaticCache(StaticCache):
    """transformers' static cache for rows of `length` tokens, made of layers that can be seen in part.

    `narrows`: whether columns can be left out, `drops_rows`: whether rows can; layers that keep their past in other
    ways (recurrent states, convolutions) are transformers' own, and whole.
    """

    def __init__(self, config: Any, length: int, *, grows: bool = False) -> None:
        super().__init__(config=config, max_cache_len=length)
        self.view = CacheWindow(length, grows)
        self._kept: list[Tensor] = []
        self.layers: list[Any] = [
            WindowedStaticLayer(length, self.view) if type(layer) in (StaticLayer, StaticSlidingWindowLayer) else layer
            for layer in self.layers
        ]
        kinds = {type(layer) for layer in self.layers}
        self.narrows = kinds <= {WindowedStaticLayer, LinearAttentionLayer, DummyLayer}
        self.drops_rows = kinds <= {WindowedStaticLayer, DummyLayer}
        if not self.drops_rows:
            whole = ", ".join(sorted(kind.__name__ for kind in kinds - {WindowedStaticLayer, DummyLayer}))
            logger.debug("rows that have ended are computed on, since %s of transformers holds all rows", whole)

    def show(self, rows: int, columns: int, place: Tensor, seen: int | Tensor) -> None:
        """What the next forward pass sees; see `View`."""
        self.view.place, self.view.seen = place, seen
        if (self.view.rows, self.view.columns) != (rows, columns):
            self.view.rows, self.view.columns = rows, columns
            self._kept = []
            for layer in self._viewed():
                layer.show()

    def room(self) -> tuple[list[Tensor], int] | None:
        """For a device that computes all layers in one call; None where a layer keeps its past in other ways.

        Returns:
            Keys and values of each layer in turn, the same list until `show` takes other sizes; and the column of the
            token at hand, read from the device.
        """
        if not self._kept:
            layers = self._viewed()
            if len(layers) < len(self.layers) or not all(layer.is_initialized for layer in layers):
                return None
            self._kept = [states for layer in layers for states in (layer.keys, layer.values)]
        return self._kept, int(self.view.place[-1])

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Write the rows `sources` of the view over `targets`; both [N], and no row is in both."""
        for layer in self._viewed():
            layer.move(sources, targets)

    def counting(self) -> list[str]:
        """The classes of the layers that count tokens in Python, which a recorded step cannot repeat."""
        return sorted({type(layer).__name__ for layer in self.layers if getattr(layer, "is_sliding", False)})

    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        held = [value for layer in self.layers for value in vars(layer).values()]
        for states in [value for value in held if isinstance(value, dict)]:  # of layers with linear attention
            held += states.values()
        storages = [value.untyped_storage() for value in held if isinstance(value, Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _viewed(self) -> list[WindowedStaticLayer]:
        return [layer for layer in self.layers if isinstance(layer, WindowedStaticLayer)]


def _resized(buffer: Tensor, columns: int) -> Tensor:
    """[B, H, S, D] -> [B, H, columns, D]: the columns that both have, and 0, which hidden columns may hold, beyond."""
    kept = min(columns, buffer.shape[2])
    resized = buffer.new_empty(*buffer.shape[:2], columns, buffer.shape[3])
    resized[:, :, :kept] = buffer[:, :, :kept]
    resized[:, :, kept:] = 0
    return resized
