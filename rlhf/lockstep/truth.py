"""The float64 truth of one operator: the same operator on the host, on the device's own inputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from rlhf.lockstep.rounding import ACCUMULATED, ROUNDED_INSIDE, ROUNDINGS, SAMPLES, base_name, unit

HOST = torch.Generator().device
"""The host: generators are there unless they are asked to be elsewhere."""

_RELATIVE = 2.0**-20  # perturbations of inputs: far above float64's rounding, far below the results' curvature


def to_host(value: Any) -> Any:
    """Return arguments or results with each tensor copied to the host."""
    return tree_map(lambda item: item.detach().to(HOST, copy=True) if isinstance(item, Tensor) else item, value)


def results_of(func: Any, returned: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator returned, or else those that it wrote in place."""
    tensors = [item for item in tree_flatten(returned)[0] if isinstance(item, Tensor)]
    return tensors or [item for item in written_by(func, args, kwargs) if isinstance(item, Tensor)]


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator writes, by its schema."""
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += tree_flatten(value)[0]
    return written


def compute_truth(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return an operator's results in float64, from arguments on the host.

    Raises:
        Exception: the host does not have the operator, or not in float64.
    """
    args, kwargs = tree_map(_in_float64, (args, kwargs))
    if base_name(func) in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # whether a 16-bit input gives a float32 result
    return results_of(func, func(*args, **kwargs), args, kwargs)


def find_error(func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> tuple[float, int, tuple[int, ...]] | None:
    """Return how far an operator's results are beyond their band, or None.

    Args:
        func: the operator.
        args, kwargs: its arguments as they were before the call, on the host.
        results: its results, on the host.

    Returns:
        The error in bands, the number of the result, and the index of the element.
    """
    truths = compute_truth(func, args, kwargs)
    sensitivities: list[Tensor] | None = None
    for number, (result, truth) in enumerate(zip(results, truths)):
        if result.shape != truth.shape:
            return float("inf"), number, ()
        if not result.numel():
            continue
        if not result.is_floating_point():
            wrong = result != truth.to(result.dtype)
            if bool(wrong.any()):
                return float("inf"), number, _index(wrong)
            continue
        error = _distance(result, truth)
        band = _rounding_band(result.dtype, truth)
        if bool((error <= band).all()):
            continue
        if sensitivities is None:
            sensitivities = _measure_sensitivities(func, args, kwargs, truths)
        inside = unit(result.dtype if base_name(func).startswith(ROUNDED_INSIDE) else _accumulation(result.dtype))
        length = math.sqrt(_reduction_length(func, args, kwargs, truth))
        band = band + inside * length * (ACCUMULATED * sensitivities[number] + truth.abs().nan_to_num(0.0, 0.0, 0.0))
        ratio = torch.where(error > band, error / band, 0.0)
        if bool((ratio > 0).any()):
            return float(ratio.max()), number, _index(ratio == ratio.max())
    return None


def _reduction_length(func: Any, args: Any, kwargs: Any, truth: Tensor) -> float:
    """Return about how many numbers an operator adds up for an element of its result; 1 if it is elementwise."""
    if torch.Tag.pointwise in func.tags:
        return 1.0
    inputs = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor) and item.numel()]
    longest = max((max(item.shape, default=1) for item in inputs), default=1)
    return max(float(longest), max((item.numel() for item in inputs), default=1) / max(truth.numel(), 1))


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.clone()
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.device):
        return HOST
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value


def _distance(result: Tensor, truth: Tensor) -> Tensor:
    """Return |result - truth|; infinite if only one is finite, unless the truth is out of the dtype's range."""
    exact = result.double()
    largest = torch.finfo(result.dtype).max
    beyond = truth.abs() > largest * (1 - unit(result.dtype))
    agree = (exact == truth) | (exact.isnan() & truth.isnan()) | (beyond & (exact.sign() == truth.sign()))
    gap = (exact - truth).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return torch.where(agree, 0.0, gap)


def _rounding_band(dtype: torch.dtype, truth: Tensor) -> Tensor:
    finite = truth.abs().nan_to_num(nan=0.0, posinf=0.0)
    largest = finite.max() if finite.numel() else finite.new_zeros(())
    floor = 4 * unit(_accumulation(dtype)) * largest + torch.finfo(dtype).tiny
    return ROUNDINGS[str(dtype).removeprefix("torch.")] * unit(dtype) * finite + floor


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _measure_sensitivities(func: Any, args: Any, kwargs: Any, truths: list[Tensor]) -> list[Tensor]:
    """Return the change of each result per relative change of the inputs, in random directions."""
    random = torch.Generator().manual_seed(0)

    def perturb(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=random) * 2 - 1
        return value.double() * (1 + _RELATIVE * signs)

    squares = [torch.zeros_like(truth) for truth in truths]
    for _ in range(SAMPLES):
        moved = compute_truth(func, *tree_map(perturb, (args, kwargs)))
        for square, other, truth in zip(squares, moved, truths):
            change = ((other - truth) / _RELATIVE).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            square += change.square() if truth.is_floating_point() else 0
    # An element that no direction moved by chance is as sensitive as the tensor's typical one, divided by 16.
    return [(square.sqrt() + square.mean().sqrt() / 16) if square.numel() else square for square in squares]


def _index(mask: Tensor) -> tuple[int, ...]:
    number = int(mask.flatten().to(torch.uint8).argmax())
    return tuple(int(part) for part in torch.unravel_index(torch.tensor(number), mask.shape)) if mask.dim() else ()
