"""Repeat recorded calls on a device, and compare each result with float64 on the CPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from accelerators.errors import AcceleratorError, describe_error
from accelerators.precisions import holds_float64
from accelerators.testing.numerics.entries import ATTENTION, Call, Spec, find_operator, is_dtype
from accelerators.testing.numerics.errors import (
    CHANGE,
    DRAWS,
    VANISHING,
    Error,
    measure_error,
    measure_spread,
)
from accelerators.testing.numerics.inputs import CASES, applies, draw_arguments

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

SEED = 0
SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALL_DTYPES = (*SIXTEEN_BITS.values(), torch.float64)
UNDEFINED = ("aten.empty", "aten.new_empty")
"""Beginnings of operators whose results have no values. Of these and of drawn numbers, shapes are compared."""

GROUPED = "aten._grouped_mm.default"
"""The product for experts, which the CPU lacks in float64; `_multiply_groups` is its definition."""

ROUNDED = 0.51
"""Error in units of a result that is rounded once: its spread does not matter."""

Outputs = list[Tensor | None]
Place = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Comparison:
    """The result of one call in one case, in units of its rounding, and the factor that is its tolerance."""

    operator: str
    dtype: str
    case: str
    shapes: str
    units: float
    tolerance: float
    place: str = ""
    value: float = 0.0
    expected: float = 0.0
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether the device's result is wrong, or there is none."""
        return bool(self.reason) or not self.units <= self.tolerance

    def describe(self) -> str:
        """Return one line about a failure."""
        what = f"{self.operator} in {self.dtype}, {self.case}, {self.shapes}"
        if self.reason:
            return f"{what}: {self.reason}"
        return (
            f"{what}: {self.value:.6g} at {self.place}, expected {self.expected:.6g}: {self.units:.3g} units of "
            f"rounding off, expected at most {self.tolerance:g}"
        )


def grant_dtypes(accelerator: Accelerator) -> list[torch.dtype]:
    """Return the dtypes that a device computes in, of those that not every device has: 16-bit ones, and float64."""
    granted = []
    for name, dtype in SIXTEEN_BITS.items():
        try:
            granted.append(accelerator.precision(name).dtype)
        except AcceleratorError:
            continue
        assert granted[-1] == dtype
    return [*granted, *([torch.float64] if holds_float64(accelerator.device()) else [])]


def in_dtypes(call: Call, granted: Sequence[torch.dtype]) -> list[Call]:
    """Return a call in the dtypes of a device.

    One with 16-bit floats is repeated in each that is granted. One in float64, in which DeepSpeed adds the squares of
    gradients, is repeated in float32 on a device without: DeepSpeed takes that there.
    """
    if torch.float64 not in granted:
        call = _replace_dtype(call, torch.float64, torch.float32)
    if call.dtype() != "bfloat16":
        return [call]
    return [_replace_dtype(call, torch.bfloat16, dtype) for dtype in granted if dtype in SIXTEEN_BITS.values()]


def _replace_dtype(call: Call, old: torch.dtype, new: torch.dtype) -> Call:
    before, after = (str(dtype).removeprefix("torch.") for dtype in (old, new))

    def replace(item: Any) -> Any:
        if isinstance(item, Spec):
            return item._replace(dtype=after) if item.dtype == before else item
        return new if is_dtype(item) and item == old else item

    is_leaf: Callable[[Any], bool] = lambda item: isinstance(item, Spec)  # noqa: E731
    args, kwargs = tree_map(replace, (call.args, dict(call.kwargs)), is_leaf=is_leaf)
    return Call(call.operator, args, kwargs)


def compare_call(call: Call, device: torch.device, factor: float, seed: int = SEED) -> Iterable[Comparison]:
    """Yield the comparison of a call in each case that makes a difference to it."""
    shapes = " ".join(str(list(spec.shape)) for spec in call.specs()[:4])
    for case in CASES:
        if not applies(case, call):
            continue
        about = (call.operator, call.dtype(), case, shapes)
        arguments = draw_arguments(call, case, seed)
        try:
            reference, is_exact = _refer(call, arguments)
        except (RuntimeError, NotImplementedError, IndexError, TypeError):
            if case == "plain":  # a recorded call must be possible
                raise
            continue  # the CPU refuses it too, such as a view of a strided tensor
        try:
            results = run_on_device(call, arguments, device)
        except (RuntimeError, NotImplementedError, TypeError) as refusal:
            yield Comparison(*about, math.inf, factor, reason=f"the device lacks it: {describe_error(refusal)}")
            continue
        error = _compare(call, results, reference, [None] * len(reference), arguments)
        if error.units > ROUNDED and is_exact:  # in most cases, results are as exact as their dtype
            error = _compare(call, results, reference, _measure_spreads(call, arguments, reference, seed), arguments)
        yield Comparison(*about, error.units, factor, str(list(error.place)), error.value, error.expected)


def run_on_device(call: Call, arguments: Any, device: torch.device) -> Outputs:
    """Return the outputs of a call on a device, read back."""
    copy = functools.partial(_copy_to, device=device)
    return [None if output is None else output.cpu() for output in _run(call, arguments, copy)]


def _copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device with the same strides, which `Tensor.to` does not always keep."""
    if 0 in tensor.stride():
        return tensor.to(device, copy=True)
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return result.copy_(tensor)


def _compare(
    call: Call, results: Outputs, reference: Outputs, spreads: Sequence[Tensor | None], arguments: Any
) -> Error:
    worst = Error(0.0)
    if len(results) != len(reference):
        return Error(math.inf)
    for result, right, spread in zip(results, reference, spreads, strict=True):
        if result is None or right is None:
            error = Error(0.0 if result is right else math.inf)
        elif not has_values(call):
            error = Error(0.0 if result.shape == right.shape else math.inf)
        else:
            error = measure_error(call, result, right, spread)
            if error.units == math.inf and _are_ties(call, result, right, arguments):
                error = Error(0.0)
        worst = max(worst, error)
    return worst


def has_values(call: Call) -> bool:
    """Return whether the result of a call is determined by its arguments."""
    drawn = call.is_aten and torch.Tag.nondeterministic_seeded in find_operator(call.operator).tags
    return not drawn and not call.operator.startswith(UNDEFINED)


def _are_ties(call: Call, result: Tensor, right: Tensor, arguments: Any) -> bool:
    """Return whether two results are indices of equal numbers, as those of the largest one among equals."""
    args, kwargs = arguments
    source = args[0] if args and isinstance(args[0], Tensor) else None
    dimension = next((item for item in (*args[1:], kwargs.get("dim")) if type(item) is int), -1)
    if call.operator.split(".")[1] == "topk":
        dimension = -1
    if source is None or result.dtype != torch.int64 or not source.is_floating_point() or result.shape != right.shape:
        return False
    if result.dim() != source.dim():
        if not result.dim():
            return torch.equal(source.flatten()[result], source.flatten()[right])
        result, right = result.unsqueeze(dimension), right.unsqueeze(dimension)
    found, expected = (source.nan_to_num().gather(dimension, index) for index in (result, right))
    return torch.equal(found, expected)


def _refer(call: Call, arguments: Any) -> tuple[Outputs, bool]:
    """Return the outputs in float64, and True; or in the call's dtypes, if the CPU lacks the operator in float64."""
    if call.operator == "aten.view.dtype":
        return _run(call, arguments, _keep), False
    if call.operator == GROUPED:
        _run(call, arguments, _keep)  # raises for strides that the operator refuses
    try:
        return _run(call, arguments, _to_float64, exact=True), True
    except (RuntimeError, NotImplementedError):
        return _run(call, arguments, _keep), False


def _measure_spreads(call: Call, arguments: Any, reference: Outputs, seed: int) -> list[Tensor | None]:
    """Return how much each output changes with the arguments."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        exact = _to_float64(tensor)
        if not exact.is_floating_point():
            return exact
        signs = torch.randint(0, 2, exact.shape, generator=generator) * 2 - 1
        return torch.where(exact.isfinite(), exact * (1 + signs * CHANGE), exact)

    args, kwargs = arguments
    changed: list[list[Outputs]] = []
    for place in range(len(args) + len(kwargs)):
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves([*args, *kwargs.values()][place])):
            continue
        changed.append([])
        for _ in range(DRAWS):
            others = [
                _apply(change if at == place else _to_float64, one) for at, one in enumerate([*args, *kwargs.values()])
            ]
            moved = tuple(others[: len(args)]), dict(zip(kwargs, others[len(args) :], strict=True))
            changed[-1].append(_run(call, moved, _keep, exact=True))
    spreads = [
        measure_spread(output, [[draw[at] for draw in draws] for draws in changed])
        for at, output in enumerate(reference)
    ]
    if call.operator.rsplit(".", 1)[0] in VANISHING:
        sizes = torch.stack([argument.double().abs() for argument in args if isinstance(argument, Tensor)])
        spreads = [None if spread is None else torch.maximum(spread, sizes.prod(0)) for spread in spreads]
    return spreads


def _apply(change: Place, argument: Any) -> Any:
    return tree_map(lambda item: change(item) if isinstance(item, Tensor) else item, argument)


def _to_float64(tensor: Tensor) -> Tensor:
    return _copy(tensor, torch.float64 if tensor.is_floating_point() else tensor.dtype)


def _keep(tensor: Tensor) -> Tensor:
    return _copy(tensor, tensor.dtype)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy with the same strides, because some operators change their inputs, and some need strides."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return tensor.to(dtype).clone() if 0 in tensor.stride() else result.copy_(tensor)


def _run(call: Call, arguments: Any, place: Place, *, exact: bool = False) -> Outputs:
    """Return the outputs of a call and the arguments that it changed; in float64 if `exact`.

    Args:
        place: returns an argument on the device; a copy, if the argument is there already.
    """
    args, kwargs = tree_map(lambda item: _place(item, place, exact), arguments)
    if call.operator == ATTENTION:
        return _run_attention(args, kwargs)
    if exact and call.operator == GROUPED:
        return [_multiply_groups(*args)]
    operator = find_operator(call.operator)
    device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    names = [argument.name for argument in operator._schema.arguments]
    if "device" in names and device is None:
        kwargs = dict(kwargs) | {"device": place(torch.zeros(1)).device}
    if "generator" in names:
        kwargs = dict(kwargs) | {"generator": None}
    with torch.no_grad():
        result = operator(*args, **kwargs)
    written = [
        value
        for argument, value in zip(operator._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    leaves = tree_leaves((result, written))
    return [
        leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf) if _is_number(leaf) else None for leaf in leaves
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _place(item: Any, place: Place, exact: bool) -> Any:
    if isinstance(item, Tensor):
        return place(item)
    return torch.float64 if exact and is_dtype(item) and item.is_floating_point else item


def _run_attention(args: Any, kwargs: Mapping[str, Any]) -> Outputs:
    """Return attention, and the gradients of queries, keys and values for a fixed gradient of the result."""
    leaves = [tensor.detach().requires_grad_() for tensor in args]
    result = torch.nn.functional.scaled_dot_product_attention(*leaves, **kwargs)
    gradient = torch.linspace(-1, 1, result.numel()).view(result.shape).to(torch.bfloat16).to(result)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


def _multiply_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group of rows with its matrix, or of each group of columns with its rows."""
    places = [0, *ends.tolist()]
    groups = [slice(start, end) for start, end in itertools.pairwise(places)]
    if right.dim() == 3:
        return torch.cat([left[group] @ matrix for group, matrix in zip(groups, right, strict=True)])
    return torch.stack([left[:, group] @ right[group] for group in groups])


def summarize(comparisons: Iterable[Comparison], most: int = 25) -> dict[str, Any]:
    """Return facts for a report: counts, all failures by operator, and the worst cases relative to their tolerance."""
    done = list(comparisons)
    failed = [comparison for comparison in done if comparison.failed]
    ranked = sorted(done, key=lambda one: one.units / one.tolerance if one.tolerance else one.units, reverse=True)
    seen: set[tuple[str, str]] = set()
    worst = []
    for comparison in ranked:
        if (key := (comparison.operator, comparison.dtype)) not in seen:
            seen.add(key)
            worst.append({name: value for name, value in asdict(comparison).items() if name != "reason"})
    lines: dict[str, str] = {}
    for comparison in failed:
        lines.setdefault(comparison.operator, comparison.describe())
    return {
        "operators": len({one.operator for one in done}),
        "comparisons": len(done),
        "failures": [{"operator": operator, "failure": line} for operator, line in lines.items()],
        "worst": worst[:most],
    }
