"""Do a server's numbers follow from the weights that it was sent? Compare what both sides say about the same tokens.

A checksum proves that bytes arrived, and not that they are used. So trainer and server score the same rows, the probe,
after each hand-over. Three questions are answered by these numbers alone, whatever the server's software is:

- Are the log-probabilities equal, up to the rounding of the precisions?
- Has the server's answer changed, if the trainer's has? The same numbers to the last bit come from the old weights.
- Of the change on the trainer's side, how much is on the server's? The slope of a regression of one on the other is 1
  if all weights arrived, and 0.5 if those of half of the change did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LIMITS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
"""Nats per token: the mean difference that rounding explains, in each precision (that of the invariant `drawing`)."""

_GROWTH = 5.0  # of the mean difference since the first hand-over
_LEAST = {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.03}  # nats per token: a smaller difference is no growth
_SURE = 5.0  # standard errors
_OFF = 0.2  # a slope that differs less from 1 is no fault
_MEASURABLE = 0.1  # the largest standard error of a slope that says something
# The largest share of rounding in the square of the trainer's change. Rounding of the trainer's numbers lowers the
# slope by as much. That of the server's does not, but moves many tokens together, of which the standard error is
# unaware: at equal size, slopes of healthy servers were between 0.5 and 1.5.
_NOISE, _NOISE_THERE = 0.05, 0.2


class Slope(NamedTuple):
    """The server's change, as a multiple of the trainer's, and its standard error."""

    value: float
    error: float


def measure_gap(here: np.ndarray, there: np.ndarray) -> float:
    """Return the mean absolute difference of log-probabilities [N] of the same tokens, in nats per token."""
    return float(np.abs(here.astype(np.float64) - there).mean())


def regress(change_here: np.ndarray, change_there: np.ndarray) -> Slope:
    """Regress the server's changes [N] on the trainer's, through the origin.

    Returns:
        The slope with its standard error, which is infinite if the trainer's changes are all 0.
    """
    x, y = change_here.astype(np.float64), change_there.astype(np.float64)
    squares = float(x @ x)
    if not squares:
        return Slope(math.nan, math.inf)
    slope = float(x @ y) / squares
    residual = float(np.square(y - slope * x).sum()) / max(len(x) - 1, 1)
    return Slope(slope, math.sqrt(residual / squares))


def _mean_square(sides: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the mean square of the difference of both sides' log-probabilities."""
    return float(np.square(sides[0].astype(np.float64) - sides[1]).mean())


@dataclass
class Ledger:
    """A server's answers about the probe, at each hand-over.

    Attributes:
        precision: the coarser one of trainer and server.
        is_exact: the trainer's own rounding is negligible, as in fp32.
        gap: result of `measure_gap` at the latest hand-over; None before the first.
        slope: of the latest change that was measurable; None before.
    """

    precision: str
    is_exact: bool
    gap: float | None = None
    slope: Slope | None = None
    _first: float | None = None
    _latest: tuple[np.ndarray, np.ndarray] | None = None
    _reference: tuple[np.ndarray, np.ndarray] | None = None  # of the last measurable change

    def check(self, here: np.ndarray, there: np.ndarray) -> str:
        """Record the log-probabilities [N] of both sides after a hand-over.

        Returns:
            The fault in the server's numbers, and its likely cause; empty if they follow from the weights.
        """
        if not np.isfinite(there).all():
            return "its log-probabilities of the probe are not finite"
        self.gap = gap = measure_gap(here, there)
        if self._latest is not None:
            before_here, before_there = self._latest
            if np.array_equal(there, before_there) and not np.array_equal(here, before_here):
                return "it still has the old weights: not a bit of its answer has changed, and the trainer's has"
        slope = self._measure_slope(here, there)
        if slope is not None and abs(slope.value - 1) > max(_OFF, _SURE * slope.error):
            return (
                f"the new weights did not arrive as they are: its change is {slope.value:.2f} +- {slope.error:.2f} "
                "times the trainer's, expected 1; some layers are missing, or are added twice"
            )
        limit = LIMITS[self.precision]
        if gap > limit:
            return (
                f"its log-probabilities differ by {gap:.2g} nats per token (rounding in {self.precision}: below "
                f"{limit:g}); it may have another model, other weights, or a lower precision than it says"
            )
        if self._first is not None and gap > max(_GROWTH * self._first, _LEAST[self.precision]):
            return (
                f"its log-probabilities differ by {gap:.2g} nats per token, after {self._first:.2g} at the first "
                "hand-over; some of the new weights are rounded, or did not arrive"
            )
        self._first = gap if self._first is None else self._first
        self._latest = (here, there)
        if slope is not None or self._reference is None:
            self._reference, self.slope = (here, there), slope
        return ""

    def _measure_slope(self, here: np.ndarray, there: np.ndarray) -> Slope | None:
        """Return the slope since the last measurable change; None if the change is too small, or there is none."""
        if self._reference is None:
            return None
        change = here.astype(np.float64) - self._reference[0]
        # Rounding at both times: about what separates two sides of this precision.
        rounding = 2 * _mean_square(self._reference)
        if not self.is_exact:
            rounding = max(rounding, 2 * _LEAST[self.precision] ** 2)
        if rounding > (_NOISE_THERE if self.is_exact else _NOISE) * float(np.square(change).mean()):
            return None
        slope = regress(change, there - self._reference[1])
        return slope if slope.error <= _MEASURABLE else None  # then several steps together are measurable
