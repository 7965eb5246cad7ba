"""The real tokens of a padded batch: layers that see one token at a time compute them alone, as one row.

Only attention needs the rows of the batch. `register_attention(..., takes_real_tokens=True)` lets an implementation
take queries, keys and values of such a row.
"""

from __future__ import annotations

from torch import Tensor


class RealTokens:
    """The places of N tokens of a batch [B, T], row by row: all real ones, and perhaps some padding.

    Args:
        mask: [B, T], not 0 for these tokens; at least one.
    """

    ARGUMENT = "real_tokens"
    """The argument of a model's forward pass for them, which transformers hands to each attention."""

    def __init__(self, mask: Tensor) -> None:
        self.shape = mask.shape
        self.places = mask.flatten().nonzero().squeeze(1)
        """[N], their indices in the flattened batch."""
        self.numbers = (mask.flatten().ne(0).cumsum(0) - 1).clamp_min(0)
        """[B * T], the number of each of them, from 0; of others, that of the one before, or 0."""

    def select(self, padded: Tensor) -> Tensor:
        """Return the numbers of real tokens: [B, T, ...] -> [1, N, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def spread(self, tokens: Tensor) -> Tensor:
        """Return rows of the batch, with 0 for padding: [1, N, ...] -> [B, T, ...]."""
        rows = tokens.new_zeros(self.numbers.numel(), *tokens.shape[2:]).index_copy(0, self.places, tokens[0])
        return rows.view(*self.shape, *tokens.shape[2:])

    def spread_heads(self, heads: Tensor) -> Tensor:
        """Return queries, keys or values as rows of the batch, with 0 for padding: [1, H, N, D] -> [B, H, T, D]."""
        return self.spread(heads.transpose(1, 2)).transpose(1, 2)
