"""Inputs of recorded calls: drawn by a seed, with the recorded kind of values, and extreme in some cases."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from accelerators.testing.numerics.entries import ATTENTION, Call, Spec

CASES = {
    "plain": "values of the recorded kind",
    "large": "values 1,024 times as large, in float16 8 times",
    "masked": "a row of -inf, and of True in a mask; if the recorded call had -inf or the lowest number",
    "empty": "a row of zeros, as padding leaves it",
    "strided": "the first tensor is every second element of a larger one",
}

SOLVERS = ("aten.linalg_solve_triangular",)
"""Operators that divide by their first argument: it is drawn near the identity, since random matrices are singular in
practice, and neither large nor with a row of zeros."""

_LARGE = {"float16": 8.0}
_MASKS = ("masked", "lowest")


def applies(case: str, call: Call) -> bool:
    """Return whether a case makes a difference to a call."""
    specs = call.specs()
    floats = [spec for spec in specs if torch.empty(0, dtype=getattr(torch, spec.dtype)).is_floating_point()]
    if case in ("masked", "large") and call.operator == ATTENTION:
        # Over nothing it has no right result, and rlhf lets such rows see one column. If one column has all the weight,
        # gradients are differences of equal numbers, and no digit of them is right.
        return False
    if case in ("large", "empty") and call.operator.startswith(SOLVERS):
        return False
    if case == "masked":
        return any(word in spec.values for spec in floats for word in _MASKS)
    if case == "strided":
        return bool(specs) and specs[0].elements > 1 and len(specs[0].shape) > 0 and specs[0].strides is None
    return case == "plain" or bool(floats)


def draw_arguments(call: Call, case: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call on the CPU; the same for the same call, case and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {call.encode()}".encode()))

    first = next(iter(call.specs()), None)

    def draw(item: Any) -> Any:
        if not isinstance(item, Spec):
            return item
        return _draw(item, "plain" if case == "strided" and item is not first else case, generator)

    is_leaf: Callable[[Any], bool] = lambda item: isinstance(item, Spec)  # noqa: E731
    args: Any = tree_map(draw, call.args, is_leaf=is_leaf)
    kwargs: Any = tree_map(draw, dict(call.kwargs), is_leaf=is_leaf)
    if call.operator.startswith(SOLVERS):
        args = (args[0].div_(32).add_(torch.eye(args[0].shape[-1])), *args[1:])
    return args, kwargs


def _draw(spec: Spec, case: str, generator: torch.Generator) -> Tensor:
    tensor = _draw_values(spec, case, generator)
    if spec.strides is not None:
        return _with_strides(tensor, spec.strides)
    if case == "strided":
        return torch.stack([tensor, tensor.flip(-1)], -1).flatten(-2)[..., ::2]
    return tensor


def _draw_values(spec: Spec, case: str, generator: torch.Generator) -> Tensor:
    dtype, words = getattr(torch, spec.dtype), spec.values.partition(" ")[0].split("-")
    if dtype == torch.bool:
        values = torch.rand(spec.shape, generator=generator) < 0.5
    elif words[0] == "integer":
        low, high = map(int, spec.values.split(" ")[1:])
        values = _draw_integers(spec, low, high, "distinct" in words, generator)
    elif not dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=dtype)
    else:
        values = torch.randn(spec.shape, generator=generator)
        values = {
            "any": lambda: values,
            "positive": lambda: values.abs() + 2**-6,
            "unit": lambda: torch.rand(spec.shape, generator=generator),
            "negative": lambda: -values.abs(),
        }[words[0]]()
        if case == "large" and words[0] != "unit":
            values = values * _LARGE.get(spec.dtype, 1024.0)
    if "rising" in words:
        values = values.sort(-1).values
        if words[0] == "integer":  # offsets end with the last row
            values[..., -1] = high
    values = values.to(dtype)
    if values.dim() and values.numel() and (case == "empty" and dtype.is_floating_point):
        values[(0,) * (values.dim() - 1)] = 0
    if values.dim() and values.numel() and case == "masked":
        if dtype == torch.bool:
            values[(0,) * (values.dim() - 1)] = True
        elif any(word in words for word in _MASKS):
            values[(0,) * (values.dim() - 1)] = float("-inf")
            values[..., 0] = float("-inf")
    return values


def _draw_integers(spec: Spec, low: int, high: int, distinct: bool, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if distinct and high - low < 2**20:
        values = torch.randperm(high - low + 1, generator=generator)[: spec.elements] + low
        return values.view(spec.shape).to(dtype)
    return torch.randint(low, high + 1 if high < 2**62 else high, spec.shape, generator=generator).to(dtype)


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor with these strides, and these values if no two of its elements share memory."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    result = torch.zeros(max(size, 1), dtype=tensor.dtype).as_strided(tensor.shape, strides)
    if 0 in strides:  # expanded: one value for all
        index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        result[index] = tensor[index]
    else:
        result.copy_(tensor)
    return result
