"""How often each row was read in an epoch: a loader that repeats rows, on one rank or on two, trains on fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlhf.engine import distributed
from rlhf.engine.engine import Metrics

if TYPE_CHECKING:
    from accelerators import Accelerator


class RowCounts:
    """Counts how often this process has read each of `rows` rows in the current epoch."""

    def __init__(self, rows: int, accelerator: Accelerator) -> None:
        self._counts, self._accelerator = torch.zeros(rows), accelerator

    def start_epoch(self) -> None:
        """Forget the rows that were read."""
        self._counts.zero_()

    def add(self, numbers: Sequence[int]) -> None:
        """Count these rows."""
        self._counts.index_put_((torch.tensor(numbers, dtype=torch.int64),), torch.ones(1), accumulate=True)

    def compare(self) -> Metrics:
        """Return the number of rows that the ranks have read more than once."""
        counts = distributed.all_sum(self._accelerator.to_device(self._counts.clone()))
        return {"repeated_rows": float((counts > 1).sum())}
