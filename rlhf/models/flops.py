"""The arithmetic of a model's passes over texts: operations of its matrix products, counted from its shape.

A `Shape` and the lengths of texts flow in; floating-point operations flow out. Counted as for the model FLOPs
utilization of arXiv:2204.02311, appendix B: a product takes two operations for each number of its matrix and token
(arXiv:2001.08361, section 2.1), attention 4 x T x S x width for T queries that each meet S keys, backward twice the
operations of forward. Work of an implementation beyond that is not counted: padding, layers that gradient checkpointing
recomputes, norms and activations, sampling, the optimizer. The half of T x T pairs that a causal mask hides is counted,
as in the published figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rlhf.models.shape import Shape


class TextLengths(NamedTuple):
    """Sums over the lengths T of a set of texts, real tokens only.

    `tokens` is the sum of T, `pairs` of T x S queries and keys that meet in attention, `outputs` of positions that an
    output is computed at.
    """

    tokens: float
    pairs: float
    outputs: float

    @classmethod
    def of(cls, lengths: Iterable[int], outputs: float) -> TextLengths:
        """Return the sums of whole texts of these lengths."""
        known = list(lengths)
        return cls(sum(known), sum(length**2 for length in known), outputs)


@dataclass(frozen=True)
class ModelFlops:
    """Counter of a model's operations.

    Attributes:
        matrices: numbers in the matrices of all layers.
        width: layers x heads x the width of a head.
        output: numbers in the output embedding, or in the scalar head.
        adapters: numbers in LoRA adapters; 0: all weights are trained, if any are.
        head_trained: a scalar head is trained, with adapters too.
    """

    matrices: int
    width: int
    output: int
    adapters: int = 0
    head_trained: bool = False

    @classmethod
    def of(cls, shape: Shape, *, scalar_head: bool = False, rank: int = 0) -> ModelFlops:
        """Return the counter of a model of this shape, with adapters of this rank."""
        projections = 0 if shape.embedding == shape.hidden else 2 * shape.hidden * shape.embedding
        return cls(
            shape.in_linears + projections,
            shape.layers * shape.heads * shape.head_dim,
            shape.embedding if scalar_head else shape.tokens,
            shape.adapters(rank) if rank else 0,
            scalar_head,
        )

    def forward(self, texts: TextLengths) -> float:
        """Return the operations of a forward pass."""
        return self._layers(texts) + 2 * self.adapters * texts.tokens + 4 * self.width * texts.pairs + self._head(texts)

    def update(self, texts: TextLengths) -> float:
        """Return the operations of a forward and a backward pass, with gradients of inputs and of trained weights."""
        if not self.adapters:
            return 3 * self.forward(texts)
        frozen = self._layers(texts) + (0 if self.head_trained else self._head(texts))
        return 3 * self.forward(texts) - frozen

    def _layers(self, texts: TextLengths) -> float:
        return 2 * self.matrices * texts.tokens

    def _head(self, texts: TextLengths) -> float:
        return 2 * self.output * texts.outputs


def generation_lengths(rows: float, prompts: TextLengths, whole: TextLengths) -> TextLengths:
    """Return the sums of generating `rows` texts with a key-value cache, from their prompts until they are `whole`.

    A prompt is read at once, then each drawn token but a text's last, which meets all tokens before it and itself:
    queries p + 1 ... t - 1 of a text of t tokens after a prompt of p. Each drawn token takes an output.
    """
    drawn = whole.tokens - prompts.tokens
    pairs = prompts.pairs + (whole.pairs - whole.tokens - prompts.pairs - prompts.tokens) / 2
    return TextLengths(whole.tokens - rows, pairs, drawn)
