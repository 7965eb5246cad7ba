"""GPT-Neo's local attention over a static cache.

GPT-Neo looks its masks up in a table of its own, by the number of keys, as if the newest key stood last (transformers
5.x: `GPTNeoSelfAttention.bias`). In a static cache it stands where its token does, and the columns behind it are
empty: a window counted from the end would hide what it should show. While a session generates, the table is one whose
rows are those of the tokens at hand, where the layers look for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class LocalAttention:
    """The masks of one session, for rows of `length` tokens; of a model without local attention, nothing."""

    def __init__(self, model: nn.Module, length: int) -> None:
        self._layers = [module for module in model.modules() if type(module).__name__ == "GPTNeoSelfAttention"]
        self._whole: list[Tensor] = [layer.bias for layer in self._layers]  # [1, 1, positions, positions]
        self._shown = [whole[:, :, :length, :length].clone() for whole in self._whole]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The layers read the session's masks in this block."""
        try:
            for layer, mask in zip(self._layers, self._shown):
                layer.bias = mask
            yield
        finally:
            for layer, mask in zip(self._layers, self._whole):
                layer.bias = mask

    def prompt(self, tokens: int, keys: int) -> None:
        """The next tokens are the first `tokens` columns, and there are `keys` columns in all."""
        for shown, whole in zip(self._shown, self._whole):
            shown[:, :, keys - tokens : keys].copy_(whole[:, :, :tokens, : shown.shape[-1]])

    def token(self, column: Tensor, keys: int) -> None:
        """The next token is that of `column` [1] among `keys`; nothing is read on the host."""
        for shown, whole in zip(self._shown, self._whole):
            shown[:, :, keys - 1 : keys].copy_(whole.index_select(2, column)[..., : shown.shape[-1]])
