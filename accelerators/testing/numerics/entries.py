"""Recorded calls of operators: their form in `operators.json`, and how they are recorded.

A call keeps what decides the work: the operator, the dtype, shape and strides of each tensor, what kind of values it
had, and all other arguments. The device is left out: a call is repeated on the device under test.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DATA = Path(__file__).with_name("operators.json")

ATTENTION = "nn.functional.scaled_dot_product_attention"
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
"""The CPU's own form of attention; recorded as the public function, which every device has in both directions."""

UNINTERESTING = (
    _CPU_ATTENTION.replace(".default", "_backward.default"),
    "aten._pin_memory.default",
    "aten.is_pinned.default",
    "aten.promote_types.default",
    "aten.set_.source_Storage",
    "aten.set_.source_Storage_storage_offset",
    "aten.set_.source_Tensor",
)
"""Calls without numbers, or repeated with `ATTENTION`."""

LIST_LENGTH = 3
"""Tensors of a list argument that are kept for operators that treat each tensor of a list alike (`_foreach_...`)."""

_DROPPED = ("device", "layout", "pin_memory", "generator", "non_blocking")
SCALARS = ("dim", "dims", "dim0", "dim1", "self", "other", "value", "p", "ord")
"""Arguments whose numbers make another kind of call; other numbers are sizes and positions."""


class Spec(NamedTuple):
    """A tensor argument: strides are given if it was not contiguous, and values by their kind."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    values: str

    @property
    def elements(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Call(NamedTuple):
    """A recorded call."""

    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def specs(self) -> list[Spec]:
        """Return the tensor arguments."""
        leaves = tree_leaves((self.args, dict(self.kwargs)), is_leaf=lambda item: isinstance(item, Spec))
        return [leaf for leaf in leaves if isinstance(leaf, Spec)]

    def named_args(self) -> list[tuple[str, Any]]:
        """Return the positional arguments with their names; "" if they have none."""
        return list(zip([*argument_names(self.operator), *[""] * len(self.args)], self.args, strict=False))

    def dtype(self) -> str:
        """Return the dtype in whose row of the table the call is: the least precise floating one, or that of others."""
        names = [spec.dtype for spec in self.specs()]
        names += [str(leaf).removeprefix("torch.") for leaf in tree_leaves(dict(self.kwargs)) if is_dtype(leaf)]
        order = ("bfloat16", "float16", "float32", "float64")
        return next((name for name in order if name in names), names[0] if names else "float32")

    def encode(self) -> str:
        """Return the call as one line of JSON."""
        return json.dumps([self.operator, _to_json(self.args), _to_json(dict(self.kwargs))], separators=(",", ":"))

    @classmethod
    def decode(cls, line: str) -> Call:
        """Return the call of a line of JSON."""
        operator, args, kwargs = json.loads(line)
        return cls(operator, tuple(_from_json(args)), _from_json(kwargs))

    def kind(self) -> tuple[Any, ...]:
        """Return what calls that differ in sizes only have in common."""
        return _generalize(self, lambda spec: (*_shape_class(spec), spec.values.partition(" ")[0]))

    def shape_class(self) -> tuple[Any, ...]:
        """Return the operator with dtype, dimensions and order of strides of each tensor: independent of all values."""
        leaves = tree_leaves((self.args, dict(self.kwargs)), is_leaf=lambda item: isinstance(item, Spec))
        marks = (_shape_class(leaf) if isinstance(leaf, Spec) else str(leaf) for leaf in leaves if _is_typed(leaf))
        return (self.operator, *dict.fromkeys(marks))

    @property
    def is_aten(self) -> bool:
        """Whether it is an operator of torch, and not a function that calls one."""
        return self.operator.startswith("aten.")


def is_dtype(value: Any) -> bool:
    """Return whether an argument is a dtype."""
    return isinstance(value, torch.dtype)


def _is_typed(leaf: Any) -> bool:
    return isinstance(leaf, Spec) or is_dtype(leaf)


def _shape_class(spec: Spec) -> tuple[Any, ...]:
    """Return the dtype, the dimensions and the order of the strides; strides of a row of a larger tensor are sizes."""
    order = tuple(sorted(spec.strides).index(stride) for stride in spec.strides) if spec.strides else None
    return (spec.dtype, len(spec.shape), order)


def _generalize(call: Call, describe: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return a call with each tensor as `describe` has it, without numbers that are sizes or positions."""

    def mark(name: str, value: Any) -> Any:
        if isinstance(value, (Spec, Tensor)):
            return describe(value)
        if isinstance(value, (list, tuple)):
            return (len(value) > 1, *dict.fromkeys(mark(name, item) for item in value))
        size = isinstance(value, (int, float)) and not isinstance(value, bool) and name not in SCALARS
        return type(value).__name__ if size else str(value)

    positional = tuple(mark(name, value) for name, value in call.named_args())
    return (call.operator, positional, tuple((name, mark(name, value)) for name, value in call.kwargs.items()))


@functools.cache
def argument_names(operator: str) -> tuple[str, ...]:
    """Return the names of an operator's arguments; none of a function that calls operators."""
    schema = find_operator(operator)._schema if operator.startswith("aten.") else None
    return tuple(argument.name for argument in schema.arguments) if schema else ()


@functools.cache
def find_operator(name: str) -> Any:
    """Return the operator or function of this name."""
    found: Any = torch.ops if name.startswith("aten.") else torch
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _to_json(value: Any) -> Any:
    if isinstance(value, Spec):
        return {
            "t": value.dtype,
            "s": value.shape,
            **({"st": value.strides} if value.strides else {}),
            "v": value.values,
        }
    if is_dtype(value):
        return {"d": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"m": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and "t" in value:
        strides = tuple(value["st"]) if "st" in value else None
        return Spec(value["t"], tuple(value["s"]), strides, value["v"])
    if isinstance(value, dict) and value.keys() in ({"d"}, {"m"}):
        return getattr(torch, *value.values())
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value


def describe_values(tensor: Tensor) -> str:
    """Return the kind of a tensor's values: words for their signs and order, and the range of integers.

    Floats: `positive`, `unit` (0 to 1), `negative` (at most 0) or `any`; `masked` has entries of -inf, `lowest` entries
    near the least number. `rising` along the last dimension. Integers: their range; `distinct` if none occurs twice.
    """
    if tensor.dtype == torch.bool or tensor.is_complex() or tensor.numel() == 0:
        return "any"
    numbers = tensor.detach()
    steps = numbers.diff() if numbers.dim() and numbers.shape[-1] > 1 else None
    rising = "-rising" if steps is not None and bool((steps >= 0).all()) and bool((steps > 0).any()) else ""
    if not numbers.is_floating_point():
        low, high = int(numbers.min()), int(numbers.max())
        distinct = "-distinct" if 1 < numbers.numel() == len(numbers.unique()) else ""
        return f"integer{rising}{distinct} {low} {high}"
    numbers = numbers.float()
    masked = "-masked" if bool(torch.isneginf(numbers).any()) else ""
    finite = numbers[torch.isfinite(numbers)]
    lowest = "-lowest" if len(finite) and bool((finite < -1e30).any()) else ""
    if not len(finite) or bool((finite < 0).any()):
        sign = "negative" if len(finite) and bool((finite <= 0).all()) else "any"
    else:
        sign = "unit" if bool((finite <= 1).all()) else "positive"
    return f"{sign}{masked}{lowest}{rising if numbers.dim() else ''}"


LOOKS = 3
"""How often a recorder looks at the values of calls that differ in nothing else, which takes longer than the calls."""


class Recorder(TorchDispatchMode):
    """Records the calls of a block, by the line of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}
        self._looks: dict[tuple[Any, ...], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("aten.") and name not in UNINTERESTING:
            form = _generalize(Call(name, args, kwargs), lambda tensor: (tensor.shape, tensor.dtype, tensor.stride()))
            self._looks[form] = looks = self._looks.get(form, 0) + 1
            tensors = (
                [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)] if looks <= LOOKS else []
            )
            if looks <= LOOKS and not any(tensor.is_meta or tensor.layout != torch.strided for tensor in tensors):
                call = _describe(name, args, kwargs)
                self.calls.setdefault(call.encode(), call)
        return func(*args, **kwargs)


def _describe(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    if name.startswith(("aten._foreach", "aten._fused_adam")):
        args = [item[:LIST_LENGTH] if isinstance(item, (list, tuple)) else item for item in args]
    kept = {key: value for key, value in kwargs.items() if key not in _DROPPED and value is not None}
    described = tree_map(_describe_leaf, (tuple(args), kept))
    if name == _CPU_ATTENTION:
        return _describe_attention(*described)
    return Call(name, *described)


def _describe_leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None if isinstance(value, (torch.device, torch.layout, torch.Generator)) else value
    strides = None if value.is_contiguous() else tuple(value.stride())
    return Spec(str(value.dtype).removeprefix("torch."), tuple(value.shape), strides, describe_values(value))


def _describe_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return the call of the public function that the CPU's form of attention came from."""
    query, key, value, *rest = args
    _, causal = (*rest, 0.0, False)[:2]
    mask = kwargs.get("attn_mask")
    options = {"is_causal": causal} | {"scale": kwargs["scale"]} if "scale" in kwargs else {"is_causal": causal}
    if mask is not None:
        options["attn_mask"] = mask
    return Call(ATTENTION, (query, key, value), options)


def reduce(calls: Mapping[str, int]) -> dict[str, int]:
    """Return the calls to keep of all recorded ones: of those that differ in sizes only, the largest and the smallest.

    Args:
        calls: the line of each call, with the set of its sources as bits.

    Returns:
        The lines of the calls that are kept, each with the sources of all calls of its kind.
    """
    kinds: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    sources: dict[tuple[Any, ...], int] = {}
    for line, bits in calls.items():
        call = Call.decode(line)
        kind = call.kind()
        kinds.setdefault(kind, []).append((sum(spec.elements for spec in call.specs()), line))
        sources[kind] = sources.get(kind, 0) | bits
    return {line: sources[kind] for kind, sized in kinds.items() for _, line in (min(sized), max(sized))}


def read_calls(path: Path = DATA) -> tuple[list[str], dict[str, int]]:
    """Return the names of the sources, and the line of each recorded call with its sources as bits."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["sources"], {json.dumps(line, separators=(",", ":")): bits for bits, *line in document["calls"]}


def iterate_calls(path: Path = DATA) -> Iterator[Call]:
    """Yield the recorded calls."""
    for line in read_calls(path)[1]:
        yield Call.decode(line)
