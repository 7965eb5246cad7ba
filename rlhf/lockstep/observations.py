"""The tensors of one step on one backend, by phase, and their comparison with those of another backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.lockstep.rounding import SPREAD, VARIANT, unit


class Observed(NamedTuple):
    """A tensor that a step reported, copied to the host; see `rlhf.engine.observer.Place`."""

    phase: str
    role: str
    name: str
    update: int
    micro_batch: int
    tensor: Tensor

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What the same tensor has on every backend."""
        return self[:5]


class Difference(NamedTuple):
    """A tensor beyond its band.

    Attributes:
        measure: how much the tensors differ: the root of the mean square; infinite if only one is finite.
        band: how much they may.
        element, value_a, value_b: the element that differs most, and its values.
    """

    phase: str
    role: str
    name: str
    update: int
    measure: float
    band: float
    element: tuple[int, ...]
    value_a: float
    value_b: float

    @property
    def ratio(self) -> float:
        """The difference in bands; infinite for an exact tensor."""
        return self.measure / self.band if self.band else float("inf")


Bands = dict[tuple[str, str, str, int, int], float]
"""The band of each tensor of a step; 0: it must be equal."""


def measure_bands(
    reference: Sequence[Observed],
    perturbed: Sequence[Sequence[Observed]],
    variant: Sequence[Observed],
    dtype: torch.dtype,
) -> Bands:
    """Return how much each tensor of a step may differ; integers may not differ at all.

    Args:
        reference: the step's tensors.
        perturbed: those of repetitions with perturbed operators, whose deviation counts `SPREAD` times.
        variant: those of a repetition with another definition that backends may use, whose deviation counts
            `VARIANT` times.
        dtype: the compute dtype, whose rounding of a tensor's own elements is always allowed.
    """
    bands = {}
    variants = {item.key: item.tensor for item in variant}
    others = [{item.key: item.tensor for item in step} for step in perturbed]
    for item in reference:
        if item.tensor.is_floating_point():
            deviations = [_rms(item.tensor, other[item.key]) for other in others if item.key in other]
            finite = [number for number in deviations if number != float("inf")]
            own = unit(torch.float32 if item.phase == "update" else dtype) * _norm(item.tensor)
            defined = VARIANT * _rms(item.tensor, variants[item.key]) if item.key in variants else 0.0
            bands[item.key] = max(SPREAD * max(finite, default=0.0), own, defined)
        else:
            bands[item.key] = 0.0
    # DPO scores by its reference before the first step, so no repetition of a step perturbs it.
    for key in [key for key in bands if key[2] == "reference"]:
        bands[key] = max(bands[key], bands.get((*key[:2], "log_probs", *key[3:]), 0.0))
    return bands


def compare(reference: Sequence[Observed], other: Sequence[Observed], bands: Bands) -> list[Difference]:
    """Return the tensors beyond their bands, in the order of computation; a tensor that is missing is one."""
    found = {item.key: item.tensor for item in other}
    differences = []
    for item in reference:
        tensor = found.get(item.key)
        measure = float("inf") if tensor is None or tensor.shape != item.tensor.shape else _rms(item.tensor, tensor)
        if measure > bands[item.key]:
            differences.append(_describe(item, tensor, measure, bands[item.key]))
    return differences


def measure_ratios(reference: Sequence[Observed], other: Sequence[Observed], bands: Bands) -> dict[str, float]:
    """Return the largest difference of each phase, in bands."""
    found = {item.key: item.tensor for item in other}
    ratios: dict[str, float] = {}
    for item in reference:
        if bands[item.key] and item.key in found and found[item.key].shape == item.tensor.shape:
            ratio = _rms(item.tensor, found[item.key]) / bands[item.key]
            ratios[item.phase] = max(ratios.get(item.phase, 0.0), ratio)
    return ratios


def _describe(item: Observed, other: Tensor | None, measure: float, band: float) -> Difference:
    place = (item.phase, item.role, item.name, item.update, measure, band)
    if other is None or other.shape != item.tensor.shape or not item.tensor.numel():
        return Difference(*place, (), float("nan"), float("nan"))
    gap = (item.tensor.double() - other.double()).abs().nan_to_num(nan=float("inf")).flatten()
    number = int(gap.argmax())
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(number), item.tensor.shape))
    return Difference(*place, index, float(item.tensor.flatten()[number]), float(other.flatten()[number]))


def _rms(first: Tensor, second: Tensor) -> float:
    """Return the root mean square difference; elements that are not finite must be the same in both."""
    first, second = first.double(), second.double()
    finite = first.isfinite() & second.isfinite()
    same = (first == second) | (first.isnan() & second.isnan())
    if not bool((finite | same).all()):
        return float("inf")
    gap = torch.where(finite, first - second, 0.0)
    return float(gap.square().mean().sqrt()) if gap.numel() else 0.0


def _norm(tensor: Tensor) -> float:
    finite = torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor)).double()
    return float(finite.square().mean().sqrt()) if tensor.numel() else 0.0
