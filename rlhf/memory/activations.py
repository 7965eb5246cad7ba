"""Bytes that passes through a model take beside its weights: what the backward pass needs, logits, the cache.

A `Shape`, rows and their lengths flow in; bytes flow out. What is counted was read from transformers' modules and
PyTorch's derivatives: a norm keeps its input, a linear layer too, attention its queries, keys, values and result.
"""

from __future__ import annotations

from typing import NamedTuple

from rlhf.models.shape import Shape

_CHUNK, _FEWEST = 1 << 22, 256  # logits that are worked on at a time, and columns (rlhf.losses)
_LARGE = 64 << 20  # bytes of 16-bit logits from which on there are none (rlhf.models.lm_head)


class Rows(NamedTuple):
    """`number` rows of `length` tokens in numbers of `width` bytes; `fused`: no matrix of attention weights is made."""

    number: int
    length: int
    width: int
    fused: bool = True

    @property
    def tokens(self) -> int:
        return self.number * self.length


def kept(shape: Shape, rows: Rows, *, dropout: bool = False) -> int:
    """Bytes that all layers keep for the backward pass."""
    return shape.layers * _layer(shape, rows, dropout)


def kept_by_checkpoints(shape: Shape, rows: Rows, *, dropout: bool = False) -> int:
    """The same with gradient checkpointing: each layer's input, and one layer anew."""
    return shape.layers * rows.tokens * shape.hidden * rows.width + _layer(shape, rows, dropout)


def passing(shape: Shape, rows: Rows) -> int:
    """Bytes of one layer in a pass that keeps nothing: its widest moment, and the residual."""
    attention = shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim + 2 * shape.hidden
    feed_forward = (3 if shape.gated else 2) * shape.intermediate + 2 * shape.hidden
    return rows.tokens * rows.width * max(attention, feed_forward) + _attention_weights(shape, rows)


def logits(shape: Shape, rows: Rows, tokens: int, copies: int) -> list[int]:
    """Bytes of the logits of `tokens` columns, `copies` of them at a time, and of the chunks that are worked on.

    Where logits are made and used up part by part (rlhf.models.lm_head), the chunks are all there is.
    """
    positions = rows.number * tokens
    one = positions * shape.vocabulary
    fused = shape.plain_logits and (rows.width == 4 or one * rows.width > _LARGE)
    chunks = 3 * [4 * min(one, max(_CHUNK, _FEWEST * positions))]
    return chunks if fused else copies * [one * rows.width] + chunks


def cache(shape: Shape, rows: Rows) -> int:
    """Bytes of the key-value cache."""
    return rows.tokens * shape.cached * rows.width


def sampling(shape: Shape, rows: Rows) -> int:
    """Bytes around drawing one token a row: logits, their float32 copy, probabilities, and an order of them."""
    return rows.number * shape.vocabulary * (rows.width + 16)


def _layer(shape: Shape, rows: Rows, dropout: bool) -> int:
    width, hidden = rows.width, shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Each of the two parts keeps its norm's input and what the norm gives; gains alone compute in float32 besides.
    norms = 2 * 2 * hidden * width + (2 * 4 * hidden if shape.rms else 0)
    attention = (2 * queries + 2 * keys) * width + 4 * shape.heads
    feed_forward = shape.kept * shape.intermediate * width
    dropped = 2 * hidden * width if dropout and not shape.rms else 0
    return rows.tokens * (norms + attention + feed_forward + dropped) + _attention_weights(shape, rows)


def _attention_weights(shape: Shape, rows: Rows) -> int:
    """Where attention is not fused: the softmax in float32, and its result in the compute precision."""
    if rows.fused:
        return 0
    return rows.tokens * shape.heads * rows.length * (4 + (rows.width if rows.width < 4 else 0))
