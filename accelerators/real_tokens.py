"""The tokens of a batch that layers must compute: without padding, and without prompts that rows share.

Layers that see one token at a time compute them as one row; only attention needs the rows of the batch.
`register_attention(..., takes_real_tokens=True)` lets an implementation take queries, keys and values of such a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RealTokens:
    """The places of N tokens of a batch [B, T], row by row: all distinct real ones, and perhaps some others.

    A token repeats one of an earlier row if both rows are the same up to its column. In a causal model, its numbers are
    then the same in every layer.

    Args:
        mask: [B, T], not 0 for these tokens; at least one.
        rows: [B, T], the row that has the same token, among these, in this column; the token's own row if it repeats
            none or is padding. None: no token repeats another.
    """

    ARGUMENT = "real_tokens"
    """The argument of a model's forward pass for them, which transformers hands to each attention."""

    def __init__(self, mask: Tensor, rows: Tensor | None = None) -> None:
        self.mask = mask != 0
        """[B, T], True for these tokens."""
        kept = self.mask.flatten()
        self.places = kept.nonzero().squeeze(1)
        """[N], their indices in the flattened batch."""
        self.numbers = (kept.cumsum(0) - 1).clamp_min(0)
        """[B * T], the number of each of them, from 0, or of the one that a token repeats; of padding, any number."""
        self._filled = self.places  # the indices of all tokens that have a number
        if rows is not None:
            places = torch.arange(mask.numel(), device=mask.device)
            originals = rows.flatten() * mask.shape[1] + places % mask.shape[1]
            repeated = (~kept & (originals != places)).nonzero().squeeze(1)
            self.numbers[repeated] = self.numbers[originals[repeated]]
            self._filled = torch.cat([self.places, repeated])
        self._sources = self.numbers[self._filled]

    def select(self, padded: Tensor) -> Tensor:
        """Return the numbers of these tokens: [B, T, ...] -> [1, N, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def spread(self, tokens: Tensor) -> Tensor:
        """Return rows of the batch, with 0 for padding: [1, N, ...] -> [B, T, ...].

        On a CPU, torch adds up the gradients of a token and of those that repeat it in float32.
        """
        filled = tokens[0] if len(self._filled) == len(self.places) else tokens[0].index_select(0, self._sources)
        rows = tokens.new_zeros(self.numbers.numel(), *tokens.shape[2:]).index_copy(0, self._filled, filled)
        return rows.view(*self.mask.shape, *tokens.shape[2:])

    def spread_heads(self, heads: Tensor) -> Tensor:
        """Return queries, keys or values as rows of the batch, with 0 for padding: [1, H, N, D] -> [B, H, T, D]."""
        return self.spread(heads.transpose(1, 2)).transpose(1, 2)
