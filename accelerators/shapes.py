"""The lengths of padded batches.

A backend names a policy, and a collator asks it for the length of the next batch. Fewer distinct lengths mean fewer
compiled graphs, but more padding. This module does not import torch.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShapePolicy:
    """Padded lengths: always the maximum, the next of a few buckets, or the batch's longest row.

    Buckets start at `first` and grow by the factor `growth` (exponential), or by `first` if `growth` is None (linear),
    up to `largest`. Every length except a maximum is a multiple of `pad_to_multiple`.
    """

    kind: Literal["static", "bucketed", "dynamic"]
    pad_to_multiple: int = 1
    first: int = 32
    growth: float | None = 2.0
    largest: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("static", "bucketed", "dynamic"):
            raise ValueError(f"ShapePolicy: kind {self.kind!r} is not static, bucketed or dynamic")
        if self.pad_to_multiple < 1 or self.first < 1 or self.largest < self.first:
            raise ValueError("ShapePolicy: needs pad_to_multiple >= 1 and 1 <= first <= largest")
        if self.growth is not None and self.growth <= 1:
            raise ValueError(f"ShapePolicy: growth {self.growth} never reaches the next bucket; use a number above 1")

    def length(self, longest: int, maximum: int) -> int:
        """Return the columns of a batch whose longest row has `longest` of at most `maximum` tokens.

        Raises:
            ValueError: `longest` is more than `maximum`; rows are cut or left out before they are padded.
        """
        if longest > maximum:
            raise ValueError(f"a row of {longest} tokens is longer than the maximum of {maximum}")
        if self.kind == "static":
            return maximum
        return min(self.bucket(longest) if self.kind == "bucketed" else self._aligned(longest), maximum)

    def bucket(self, n: int) -> int:
        """Return the smallest bucket of at least `n`; above the largest bucket, the next multiple of it (logged once).

        Idempotent, monotone, and never less than `n`.
        """
        largest = self._aligned(self.largest)
        if n > largest:
            fallback = math.ceil(n / largest) * largest
            _log_fallback(fallback, largest)
            return fallback
        size = self._aligned(self.first)
        while size < n:
            size = self._next(size)
        return min(size, largest)

    def _aligned(self, n: int | float) -> int:
        return math.ceil(n / self.pad_to_multiple) * self.pad_to_multiple

    def _next(self, size: int) -> int:
        grown = size + self.first if self.growth is None else size * self.growth
        return max(self._aligned(grown), size + self.pad_to_multiple)


@functools.cache
def _log_fallback(fallback: int, largest: int) -> None:
    logger.warning("a batch is longer than the largest bucket (%d); it is padded to %d", largest, fallback)
