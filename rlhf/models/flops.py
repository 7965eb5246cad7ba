"""The arithmetic that a model's passes over texts take: operations of its matrix products, counted from its shape.

A `Shape` and the lengths of texts flow in; floating-point operations flow out. Counted as for the model FLOPs
utilization of arXiv:2204.02311, appendix B: a product takes two operations for each number of its matrix and token
(arXiv:2001.08361, section 2.1), attention 4 x T x S x width for T queries that each meet S keys, backward twice what
forward takes. What an implementation does beside that is no arithmetic of the model: padding, layers that gradient
checkpointing computes again, norms and activations, sampling, the optimizer. Nothing is taken off for the half of
T x T pairs that a causal mask hides, for that is how the published figures count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rlhf.models.shape import Shape


class Texts(NamedTuple):
    """What is read of a set of texts: sums over their lengths T, and the positions that an output is computed at.

    `tokens` is the sum of T, `pairs` of T x S: of the queries and keys that meet in attention; real tokens alone.
    """

    tokens: float
    pairs: float
    outputs: float

    @classmethod
    def of(cls, lengths: Iterable[int], outputs: float) -> Texts:
        """Whole texts of these lengths."""
        known = list(lengths)
        return cls(sum(known), sum(length**2 for length in known), outputs)


@dataclass(frozen=True)
class Products:
    """What a token is multiplied with on its way through a model.

    Args:
        matrices: numbers in the matrices of all layers.
        width: layers x heads x the width of a head.
        output: numbers in the output embedding, or in the scalar head.
        adapters: numbers in LoRA adapters; 0: all weights are trained, if any are.
        head_trained: a scalar head is, also beside adapters.
    """

    matrices: int
    width: int
    output: int
    adapters: int = 0
    head_trained: bool = False

    @classmethod
    def of(cls, shape: Shape, *, scalar_head: bool = False, rank: int = 0) -> Products:
        """Those of a model of this shape, with adapters of this rank."""
        beside = 0 if shape.embedding == shape.hidden else 2 * shape.hidden * shape.embedding
        return cls(
            shape.in_linears + beside,
            shape.layers * shape.heads * shape.head_dim,
            shape.embedding if scalar_head else shape.tokens,
            shape.adapters(rank) if rank else 0,
            scalar_head,
        )

    def forward(self, texts: Texts) -> float:
        """Operations of a forward pass."""
        return self._layers(texts) + 2 * self.adapters * texts.tokens + 4 * self.width * texts.pairs + self._head(texts)

    def update(self, texts: Texts) -> float:
        """Operations of a forward and a backward pass: gradients of what goes in, and of weights that are trained."""
        if not self.adapters:
            return 3 * self.forward(texts)
        frozen = self._layers(texts) + (0 if self.head_trained else self._head(texts))
        return 3 * self.forward(texts) - frozen

    def _layers(self, texts: Texts) -> float:
        return 2 * self.matrices * texts.tokens

    def _head(self, texts: Texts) -> float:
        return 2 * self.output * texts.outputs


def generated(rows: float, prompts: Texts, whole: Texts) -> Texts:
    """What sampling reads of `rows` texts with a key-value cache, until all are `whole`.

    A prompt is read at once, then each token that was drawn but a text's last, which meets all before it and itself:
    queries p + 1 ... t - 1 of a text of t tokens after a prompt of p. Each token drawn takes an output.
    """
    drawn = whole.tokens - prompts.tokens
    pairs = prompts.pairs + (whole.pairs - whole.tokens - prompts.pairs - prompts.tokens) / 2
    return Texts(whole.tokens - rows, pairs, drawn)
