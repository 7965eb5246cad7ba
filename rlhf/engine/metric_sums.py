"""Sums of statistics over micro-batches and ranks, read from the device once, at the end of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.engine import distributed

Metrics = dict[str, float]
"""Numbers of a step or an evaluation, by the names under which they are recorded."""


class MetricSums:
    """Named running sums of this rank."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, **numbers: Tensor) -> None:
        """Add scalars, on the device."""
        for name, number in numbers.items():
            number = number.detach().float()
            self._sums[name] = self._sums[name] + number if name in self._sums else number

    def extend(self, other: MetricSums, *names: str) -> None:
        """Add the sums of `other` under `names`, if it has them."""
        self.add(**{name: other._sums[name] for name in names if name in other._sums})

    def read(self) -> Metrics:
        """Return the sums over all ranks; it costs one collective and one host read."""
        stacked = distributed.all_sum(torch.stack([number.reshape(()) for number in self._sums.values()]))
        return dict(zip(self._sums, stacked.tolist()))


def padding_share(sums: Metrics) -> float:
    """Return the share of the computed `positions` that hold no token of a real row (`present` counts those)."""
    return 1 - sums["present"] / max(sums["positions"], 1)
