"""How often each row was read in an epoch: a faulty loader repeats some rows, and skips others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlhf.engine import distributed
from rlhf.engine.engine import Metrics

if TYPE_CHECKING:
    from accelerators import Accelerator


class RowCounts:
    """Counts how often this process has read each of `rows` rows in the current epoch, a byte for each row."""

    def __init__(self, rows: int, accelerator: Accelerator) -> None:
        self._counts, self._accelerator = bytearray(rows), accelerator

    def start_epoch(self) -> None:
        """Forget the rows that were read."""
        self._counts = bytearray(len(self._counts))

    def add(self, numbers: Sequence[int]) -> None:
        """Count these rows."""
        for number in numbers:
            self._counts[number] = min(self._counts[number] + 1, 2)  # only "more than once" matters

    def compare(self) -> Metrics:
        """Return the number of rows that all ranks together have read more than once."""
        repeated = 0.0
        for counts in torch.frombuffer(self._counts, dtype=torch.uint8).split(self._accelerator.chunk_elements):
            total = distributed.all_sum(self._accelerator.to_device(counts.float()))
            repeated += float((total > 1).sum())
        return {"repeated_rows": repeated}
