"""The tokens of a batch that layers must compute: without padding, and without prompts that rows share.

Layers that see one token at a time compute them as one row; only attention needs the rows of the batch.
`register_attention(..., takes_real_tokens=True)` lets an implementation take queries, keys and values of such a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RealTokens:
    """The places of N tokens of a batch [B, T], row by row: all distinct real ones, and perhaps some others.

    A token repeats one of an earlier row if both rows are the same up to its column, and so are its numbers in every
    layer of a causal model.

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
        """[B * T], the number of each of them, from 0, and of each token that repeats one; of padding, any."""
        self._repeated = self.places[:0]  # the indices of tokens that repeat one of these
        if rows is not None:
            places = torch.arange(mask.numel(), device=mask.device)
            originals = rows.flatten() * mask.shape[1] + places % mask.shape[1]
            self._repeated = (~kept & (originals != places)).nonzero().squeeze(1)
            self.numbers[self._repeated] = self.numbers[originals[self._repeated]]
        self._shared, self._original = self.numbers[self._repeated].unique(return_inverse=True)

    def select(self, padded: Tensor) -> Tensor:
        """Return the numbers of these tokens: [B, T, ...] -> [1, N, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def spread(self, tokens: Tensor) -> Tensor:
        """Return rows of the batch, with 0 for padding: [1, N, ...] -> [B, T, ...].

        The gradients of a token and of those that repeat it are added up in float32.
        """
        rows: Tensor = _Spread.apply(tokens[0], self)
        return rows.view(*self.mask.shape, *tokens.shape[2:])

    def spread_heads(self, heads: Tensor) -> Tensor:
        """Return queries, keys or values as rows of the batch, with 0 for padding: [1, H, N, D] -> [B, H, T, D]."""
        return self.spread(heads.transpose(1, 2)).transpose(1, 2)


class _Spread(torch.autograd.Function):
    """From tokens [N, ...] to all of the batch, [B * T, ...]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, real: RealTokens) -> Tensor:
        ctx.real = real
        rows = tokens.new_zeros(real.numbers.numel(), *tokens.shape[1:]).index_copy_(0, real.places, tokens)
        return rows.index_copy_(0, real._repeated, tokens.index_select(0, real.numbers[real._repeated]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        real: RealTokens = ctx.real
        of_tokens = gradient.index_select(0, real.places)
        if not len(real._repeated):
            return of_tokens, None
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        sums = of_tokens.index_select(0, real._shared).to(dtype)
        sums.index_add_(0, real._original, gradient.index_select(0, real._repeated).to(dtype))
        return of_tokens.index_copy_(0, real._shared, sums.to(gradient.dtype)), None
