"""The error of a result, in units of the rounding that its operator may do.

    unit = eps(dtype) * |y| + eps(sums) * sqrt(n) * spread + eps(sums)^2 * max |y| + the least normal number

y is the result in float64. The first term rounds it once to its dtype. The second is of the sums in it: `n` is the
length of the longest one, whose rounding errors grow as a random walk, and `spread` is the condition of the operator at
this input: the change of y if each number of an argument changes by its own size, up or down at random, to first order,
added over the arguments. Sums of 16-bit numbers must be made in float32, so eps(sums) is at most float32's, except for
`OWN_SUMS`. The third term allows for intermediate numbers that vanish next to 1, as in the tail of an exponential.

The factors in `tolerances.json` are multiples of this unit, by operator and dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from accelerators.testing.numerics.entries import ATTENTION, Call, find_operator

UNIT = "eps(dtype) |y| + eps(sums) sqrt(n) spread + eps(sums)^2 max |y| + the least normal number"
TABLE = Path(__file__).with_name("tolerances.json")
MARGIN = 4.0
"""A tolerance is this many times the largest error of torch on the CPU, up to the next power of two; at least `LEAST`.
Another device adds in another order, and evaluates functions by other polynomials."""
LEAST = 4.0
DRAWS = 4
"""Changes of an argument by which its spread is estimated; the largest one counts."""
CHANGE = 2.0**-20
OWN_SUMS = (
    "aten.embedding_dense_backward",
    "aten.native_layer_norm_backward",
    "nn.functional.scaled_dot_product_attention",
)
"""Operators whose sums torch itself makes in their own dtype, on the CPU at least."""
VANISHING = ("aten.gelu", "aten.gelu_backward")
"""Operators whose result is a product with a difference from 1: where it vanishes, it is as exact as this product."""


class Error(NamedTuple):
    """The largest error of a result: in units, and the place, the value and the expected value of the worst element."""

    units: float
    place: tuple[int, ...] = ()
    value: float = 0.0
    expected: float = 0.0


def read_table(path: Path = TABLE) -> dict[str, dict[str, float]]:
    """Return the factors by operator and dtype; 0: the result must be exact."""
    table: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    return table


def derive_factor(largest: float, dtype: str) -> float:
    """Return the factor of an operator whose largest error on the CPU is `largest` units.

    In float64 the CPU is compared with itself, so its error says nothing: the factor is `LEAST`.
    """
    if dtype == "float64":
        return LEAST
    return 0.0 if largest == 0 else max(LEAST, 2.0 ** math.ceil(math.log2(MARGIN * largest)))


def find_length(call: Call, elements: int) -> int:
    """Return the number of terms in the longest sum of a call whose result has some elements.

    It is 1 for operators on single elements, the inner dimension of a product, and for others the longest dimension, or
    the number of elements of an argument for each element of the result, if there are more.
    """
    specs = call.specs()
    if not specs or (call.is_aten and torch.Tag.pointwise in find_operator(call.operator).tags):
        return 1
    if call.operator.split(".")[1] in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"):
        shape = next(spec.shape for spec in reversed(specs) if len(spec.shape) > 1)
        return shape[-2]
    return max(*(max(spec.shape, default=1) for spec in specs), specs[0].elements // max(elements, 1))


def measure_spread(reference: Tensor | None, changed: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
    """Return the spread of an output from its values, by argument and draw, after changes by `CHANGE`."""
    if reference is None or not reference.is_floating_point():
        return None
    spread = torch.zeros_like(reference)
    for draws in changed:
        largest = torch.zeros_like(reference)
        for other in draws:
            if other is not None and other.shape == reference.shape:
                largest = torch.maximum(largest, ((other - reference).abs() / CHANGE).nan_to_num(0.0, 0.0, 0.0))
        spread += largest
    return spread


def measure_error(call: Call, result: Tensor, reference: Tensor, spread: Tensor | None) -> Error:
    """Return the largest error of a result on the CPU; infinite if the shape, the dtype's kind or a NaN differs."""
    if result.shape != reference.shape or result.is_floating_point() != reference.is_floating_point():
        return Error(math.inf)
    if not result.numel():
        return Error(0.0)
    if not result.is_floating_point():
        wrong = result != reference
        return _worst(wrong.double() * math.inf if wrong.any() else wrong.double(), result, reference)
    limits = torch.finfo(result.dtype)
    own_sums = call.operator.startswith(OWN_SUMS)
    sums = limits.eps if own_sums else min(limits.eps, torch.finfo(torch.float32).eps)
    found, right = result.double(), reference.double()
    rounded = right.to(result.dtype).double()  # infinite beyond the dtype's range
    largest = right.where(right.isfinite(), 0.0).abs().max()
    # The gradient of attention is a difference of sums, which are equal if one column has all the weight.
    vanishing = sums if call.operator == ATTENTION else sums**2
    unit = limits.eps * right.abs() + vanishing * largest + limits.smallest_normal
    if spread is not None:
        unit = unit + sums * math.sqrt(find_length(call, result.numel())) * spread
    units = (found - right).abs() / unit
    same = (found == rounded) | (found.isnan() & rounded.isnan())
    # Next to the largest number, rounding decides between it and infinity.
    edge = (right.abs() > 0.99 * limits.max) & right.isfinite() & (found.abs() > 0.98 * limits.max)
    units = torch.where(same & ~rounded.isfinite() | edge, 0.0, units).nan_to_num(math.inf, math.inf)
    return _worst(units, result, reference)


def _worst(units: Tensor, result: Tensor, reference: Tensor) -> Error:
    index = int(units.argmax())
    place = tuple(int(part) for part in torch.unravel_index(torch.tensor(index), units.shape))
    value, expected = (float(tensor.flatten()[index]) for tensor in (result, reference))
    return Error(float(units.flatten()[index]), place, value, expected)
