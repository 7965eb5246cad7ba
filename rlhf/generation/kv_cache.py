"""A static key-value cache with a window: the model sees only the rows and columns that are in use.

A forward pass sees the first rows and columns of the buffers, as if the cache were no larger. Fewer rows are a
different view of the buffers. If steps are captured, so are more columns: the buffers have their full size from the
start. Otherwise the buffers grow with the columns, because libraries copy a slice of a matrix before they multiply it,
in every step.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache, cache_utils
from transformers.cache_utils import LinearAttentionLayer, StaticLayer, StaticSlidingWindowLayer

logger = logging.getLogger(__name__)
# Layers that keep nothing have a class in transformers 5.23, and none before.
_EMPTY_LAYERS = {cache_utils.DummyLayer} if hasattr(cache_utils, "DummyLayer") else set()


class CacheWindow:
    """The part of the cache in use, and the columns of the current tokens; all layers share it.

    Attributes:
        all_rows: number of rows of the buffers.
        rows: number of visible rows; None before the first forward pass.
        columns: number of visible columns.
        grows: the buffers have as many columns as are visible.
        current_columns: [T], the columns of the current tokens.
        seen: number of tokens before them, an int or a tensor [].
    """

    def __init__(self, rows: int, columns: int, grows: bool) -> None:
        self.all_rows = rows
        self.rows: int | None = None
        self.columns = columns
        self.grows = grows
        self.current_columns = torch.empty(0, dtype=torch.long)
        self.seen: int | Tensor = 0


class WindowedStaticLayer(StaticLayer):
    """One layer; `keys` and `values` are views of the buffers, [rows, heads, columns, head size].

    Layers with a sliding window store the whole row too, and only the attention mask applies the window:
    `StaticSlidingWindowLayer` of transformers 5.x counts tokens in a Python integer, so a replay would repeat the mask
    and the column of the captured step. Rollouts are rarely longer than the window, so this costs little.
    """

    def __init__(self, length: int, window: CacheWindow) -> None:
        super().__init__(max_cache_len=length)
        self._window = window
        self._buffers: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers at the first update."""
        if self._window.grows:
            self.max_cache_len = self._window.columns
        states: tuple[Tensor, ...] = (key_states, value_states)
        if len(key_states) < self._window.all_rows:  # prompts that are read once for several rows
            states = tuple(part[:1].expand(self._window.all_rows, -1, -1, -1) for part in states)
        super().lazy_initialization(*states)
        self._buffers = self.keys, self.values
        self.show()

    def show(self) -> None:
        """Apply the window's sizes to `keys` and `values`."""
        if self._buffers:
            rows, columns = self._window.rows, self._window.columns
            if self._window.grows and columns != self._buffers[0].shape[2]:
                self._buffers = tuple(_resize(buffer, columns) for buffer in self._buffers)
            self.keys, self.values = (buffer[:rows, :, :columns] for buffer in self._buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the current tokens' keys and values, and return those of all visible columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for buffer, states in zip(self._buffers, (key_states, value_states)):
            # Into the buffer: in a slice, accelerators that run lazily would copy all of it.
            rows = buffer if self._window.rows in (None, len(buffer)) else buffer[: self._window.rows]
            rows.index_copy_(2, self._window.current_columns, states)
        if key_states.shape[2] == self._window.columns:
            return key_states, value_states  # equal, and contiguous
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of key columns, offset of the first)."""
        return self._window.columns, 0

    def get_seq_length(self) -> int | Tensor:
        """Return the number of tokens before the current ones."""
        return self._window.seen

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the visible rows `sources` over `targets`."""
        for states in (self.keys, self.values):
            states.index_copy_(0, targets, states.index_select(0, sources))

    def repeat(self, copies: int, columns: int) -> None:
        """Copy each visible row `copies` times, one after the other, up to a column."""
        for buffer in self._buffers:
            rows = buffer[: self._window.rows, :, :columns].repeat_interleave(copies, 0)
            buffer[: len(rows), :, :columns] = rows

    def reset(self) -> None:
        """Fill the buffers with 0."""
        for buffer in self._buffers:
            buffer.zero_()


class WindowedStaticCache(StaticCache):
    """transformers' static cache for `rows` of `length` tokens, with layers that can be partly visible.

    Layers with other states (recurrent layers, convolutions) are those of transformers, and are always whole.

    Attributes:
        can_narrow: columns can be hidden.
        can_drop_rows: rows can be dropped, and repeated.
    """

    def __init__(self, config: Any, rows: int, length: int, *, grows: bool = False) -> None:
        super().__init__(config=config, max_cache_len=length)
        self.window = CacheWindow(rows, length, grows)
        self._states: list[Tensor] = []
        self.layers: list[Any] = [
            WindowedStaticLayer(length, self.window)
            if type(layer) in (StaticLayer, StaticSlidingWindowLayer)
            else layer
            for layer in self.layers
        ]
        types = {type(layer) for layer in self.layers}
        self.can_narrow = types <= {WindowedStaticLayer, LinearAttentionLayer} | _EMPTY_LAYERS
        self.can_drop_rows = types <= {WindowedStaticLayer} | _EMPTY_LAYERS
        if not self.can_drop_rows:
            others = ", ".join(sorted(cls.__name__ for cls in types - {WindowedStaticLayer} - _EMPTY_LAYERS))
            slower = "rows that have ended are still computed, and a prompt is read for each of its completions"
            logger.debug("%s: %s of transformers needs all rows", slower, others)

    def show(self, rows: int, columns: int, current_columns: Tensor, seen: int | Tensor) -> None:
        """Set the window of the next forward pass; see `CacheWindow`."""
        self.window.current_columns, self.window.seen = current_columns, seen
        if (self.window.rows, self.window.columns) != (rows, columns):
            self.window.rows, self.window.columns = rows, columns
            self._states.clear()  # a kernel may keep the list, and would keep the tensors that layers replace
            for layer in self._windowed_layers():
                layer.show()

    def decode_buffers(self, groups: int, size: int, dtype: torch.dtype) -> tuple[list[Tensor], int] | None:
        """Return the buffers for a kernel that computes all layers in one call; None if a layer has other states.

        Args:
            groups: heads of keys and values, for buffers that do not exist yet.
            size: numbers in a head.
            dtype: of keys and values.

        Returns:
            Keys and values of each layer in turn, the same list until `show` changes the sizes; and the column of the
            first of the current tokens, read from the device.
        """
        if not self._states:
            layers = self._windowed_layers()
            if len(layers) < len(self.layers):
                return None
            rows, device = self.window.rows or self.window.all_rows, self.window.current_columns.device
            like = torch.empty(1, groups, 1, size, dtype=dtype, device=device).expand(rows, -1, -1, -1)
            for layer in layers:
                if not layer.is_initialized:
                    layer.lazy_initialization(like, like)
            self._states = [states for layer in layers for states in (layer.keys, layer.values)]
        return self._states, int(self.window.current_columns[0])

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the visible rows `sources` over `targets`; both [N], and no row is in both."""
        for layer in self._windowed_layers():
            layer.move(sources, targets)

    def repeat(self, copies: int, columns: int) -> None:
        """Copy each visible row `copies` times, one after the other, up to a column; the rest is as it was."""
        for layer in self._windowed_layers():
            layer.repeat(copies, columns)

    def uncapturable_layers(self) -> list[str]:
        """Return the classes of the layers that count tokens in Python, which a captured step cannot repeat."""
        return sorted({type(layer).__name__ for layer in self.layers if getattr(layer, "is_sliding", False)})

    def nbytes(self) -> int:
        """Return the bytes of all layers' states."""
        values = [value for layer in self.layers for value in vars(layer).values()]
        for states in [value for value in values if isinstance(value, dict)]:  # of layers with linear attention
            values += states.values()
        # Not their storages: an accelerator that runs lazily may not have allocated them.
        bases = [value if value._base is None else value._base for value in values if isinstance(value, Tensor)]
        return sum({id(base): base.nbytes for base in bases}.values())

    def _windowed_layers(self) -> list[WindowedStaticLayer]:
        return [layer for layer in self.layers if isinstance(layer, WindowedStaticLayer)]


def _resize(buffer: Tensor, columns: int) -> Tensor:
    """Copy the common columns, [B, H, S, D] -> [B, H, columns, D]; the rest is 0, as hidden columns may be."""
    common = min(columns, buffer.shape[2])
    resized = buffer.new_empty(*buffer.shape[:2], columns, buffer.shape[3])
    resized[:, :, :common] = buffer[:, :, :common]
    resized[:, :, common:] = 0
    return resized
