"""Faults that can be planted in the simulated device, one at a time, to test tools that look for faults.

RLHF_GAUDI_SIM_FAULT=NAME plants one when the device is loaded; `plant(NAME)` does so for a block. A fault replaces the
kernel of one operator, or a part of a fused kernel; no code is compiled.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library
from torch.utils._pytree import tree_map

from accelerators import AcceleratorError
from gaudi_sim.activation import NAME

VARIABLE = "RLHF_GAUDI_SIM_FAULT"

Run = Callable[..., Any]
Change = Callable[..., Any]
"""(run, *arguments) -> result: on tensors of the host; `run` is the correct operator."""


@dataclass(frozen=True)
class Fault:
    """A fault of the device.

    Attributes:
        kind: the kind of mistake.
        operator: what a tool should name.
        change: what the operator does instead; for a fused kernel, what replaces `part` of it.
        part: "module:attribute" of a fused kernel in the shim; empty for an operator.
        kernel: the device's kernel that is replaced, if it has another name than the operator.
        backward: only in backward passes (True), only outside of them (False), or in both (None).
        when: the arguments with which it occurs.
    """

    kind: str
    operator: str
    change: Change
    part: str = ""
    kernel: str = ""
    backward: bool | None = None
    when: Callable[..., bool] = lambda *args, **options: True


def after(function: Callable[[Any], Any]) -> Change:
    """Return a change that applies a function to the correct result."""
    return lambda run, *args, **options: function(run(*args, **options))


def coarse(bits: int) -> Change:
    """Return a change that rounds results to so many bits."""

    def rounded(result: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(result)
        return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)

    return after(rounded)


def scaled(factor: float) -> Change:
    """Return a change that multiplies results."""
    return after(lambda result: result * factor)


def as_if_transposed(run: Run, first: Tensor, second: Tensor, *rest: Any, **options: Any) -> Any:
    """Read operands in the order of their memory if they are not contiguous."""
    operands = [part if part.is_contiguous() else part.mT.contiguous().view(part.shape) for part in (first, second)]
    return run(*operands, *rest, **options)


def accumulate_in_bf16(run: Run, first: Tensor, second: Tensor, *rest: Any) -> Tensor:
    """Add the products of two matrices up in bf16."""
    total = torch.zeros(*first.shape[:-1], second.shape[-1], dtype=torch.bfloat16)
    for column in range(first.shape[-1]):
        total += first[..., column : column + 1].bfloat16() * second[..., column : column + 1, :].bfloat16()
    return total.to(first.dtype)


def overflow(run: Run, *args: Any, **options: Any) -> Any:
    """Compute in fp16 with a scale that leaves its range."""
    result = run(*args, **options)
    return (result * 2**16).half().to(result.dtype) / 2**16


def first_row(value: float) -> Change:
    """Return a change that sets the first row of results."""

    def spoil(result: Tensor) -> Tensor:
        result = result.clone()
        result[(0,) * max(result.dim() - 1, 1)] = value
        return result

    return after(spoil)


def over_wrong_axis(run: Run, values: Tensor, dim: int, *rest: Any) -> Any:
    """Reduce over another axis than the last."""
    return run(values, dim - 1 if dim < 0 else (dim + values.dim() - 1) % values.dim(), *rest)


def write_input(run: Run, values: Tensor, *rest: Any, **options: Any) -> Any:
    """Write the result's first number into the input."""
    result = run(values, *rest, **options)
    values.view(-1)[:1] += 1.0
    return result


_pending: list[Callable[[], Any]] = []


def not_awaited(run: Run, *args: Any, **options: Any) -> Tensor:
    """Return before the result is there; it is complete after the next wait for the device."""
    right = run(*args, **options)
    result = torch.zeros_like(right)
    _pending.append(lambda: result.copy_(right))
    return result


def _finish(synchronize: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Complete what is pending, and wait."""
    while _pending:
        _pending.pop()()
    return synchronize(*args, **options)


def in_place_rolled(run: Run, target: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Write one column too early."""
    return run(target, dim, (index - 1).clamp_min(0), source)


def without(number: int) -> Change:
    """Return a change that leaves one positional argument of a fused kernel out."""

    def change(run: Run, *args: Any, **options: Any) -> Any:
        return run(*(None if place == number else value for place, value in enumerate(args)), **options)

    return change


def adamw(**changed: Any) -> Change:
    """Return a change of the settings that FusedAdamW's kernel gets."""

    def change(run: Run, parameters: Any, group: dict[str, Any], states: Any) -> None:
        wrong = {name: value(group) for name, value in changed.items()}
        run(parameters, group | wrong, states)
        group["step"] = group.get("step", 0) + 1

    return change


def _scale_query(run: Run, context: Any, query: Tensor, *rest: Any) -> Any:
    return run(context, query * 1.05, *rest)


def _wrap(limit: int, place: int) -> Change:
    def change(run: Run, *args: Any, **options: Any) -> Any:
        values = list(args)
        values[place] = values[place] % limit
        return run(*values, **options)

    return change


def _rolled(run: Run, source: Tensor, *rest: Any) -> Any:
    return run(source.roll(1, -1), *rest)


def _is_matrix(*args: Any, **options: Any) -> bool:
    return isinstance(args[0], Tensor) and args[0].dim() > 1 and args[0].is_floating_point()


def _is_lookup(table: Tensor, dim: int, *args: Any) -> bool:
    return table.dim() == 2 and dim == 0


def _is_table(values: Any, *args: Any, **options: Any) -> bool:
    """Return whether a copy is that of the random numbers of a rollout, which come from the host."""
    return isinstance(values, Tensor) and values.dim() == 2 and values.is_floating_point() and values.shape[1] <= 8


_SDPA = "habana_frameworks.torch.hpex.kernels:FusedSDPA.forward"
_ADAMW = "habana_frameworks.torch.hpex.optimizers:_step"
_ATTENTION, _OPTIMIZER = "attention (gaudi_fused_sdpa)", "adamw (FusedAdamW)"

FAULTS: dict[str, Fault] = {
    "mm-rounds-to-bf16": Fault("rounding", "aten::mm", after(lambda result: result.bfloat16().to(result.dtype))),
    "mm-rounds-to-14-bits": Fault("rounding", "aten::mm", coarse(14)),
    "mm-transposed-strides": Fault("transposed strides", "aten::mm", as_if_transposed, backward=False),
    "mm-bf16-accumulation": Fault("bf16 accumulation", "aten::mm", accumulate_in_bf16),
    "mm-scale": Fault("wrong scale", "aten::mm", scaled(1.01), backward=False),
    "mm-overflow": Fault("fp16 overflow", "aten::mm", overflow, backward=False),
    "mm-nan-row": Fault("NaN of empty rows", "aten::mm", first_row(math.nan), backward=False),
    "mm-not-awaited": Fault("missed synchronization", "aten::mm", not_awaited, backward=False),
    "mm-writes-input": Fault("aliasing", "aten::mm", write_input, backward=False),
    "bmm-bf16-accumulation": Fault("bf16 accumulation", "aten::bmm", accumulate_in_bf16),
    "bmm-row-late": Fault("off by one", "aten::bmm", after(lambda result: result.roll(1, -2)), backward=False),
    "embedding-wraps": Fault(
        "index wrap", "aten::embedding", _wrap(8, 2), kernel="aten::index_select", when=_is_lookup
    ),
    "embedding-off-by-one": Fault(
        "off by one",
        "aten::embedding",
        lambda run, table, dim, ids: run(table, dim, (ids - 1).clamp_min(0)),
        kernel="aten::index_select",
        when=_is_lookup,
    ),
    "softmax-wrong-axis": Fault(
        "wrong reduction axis", "aten::_safe_softmax", over_wrong_axis, kernel="aten::_softmax", when=_is_matrix
    ),
    "softmax-nan-row": Fault("NaN of empty rows", "aten::_safe_softmax", first_row(math.nan), kernel="aten::_softmax"),
    "mean-wrong-scale": Fault("wrong scale", "aten::mean", scaled(63 / 64), when=_is_matrix),
    "rsqrt-rounds": Fault("rounding", "aten::rsqrt", coarse(9)),
    "silu-not-awaited": Fault("missed synchronization", "aten::silu", not_awaited),
    "silu-writes-input": Fault("aliasing", "aten::silu", write_input),
    "cos-off-by-one": Fault("off by one", "aten::cos", lambda run, values: run(values + 1)),
    "cumsum-wrong-axis": Fault(
        "wrong reduction axis", "aten::cumsum", lambda run, values, dim, **options: run(values, 0, **options)
    ),
    "cat-order": Fault("off by one", "aten::cat", lambda run, parts, dim=0: run(list(reversed(parts)), dim)),
    "pow-rounds": Fault("rounding", "aten::pow", coarse(8), when=_is_matrix),
    "log-rounds": Fault("rounding", "aten::log", coarse(8)),
    "silu-backward-scale": Fault("wrong scale", "aten::silu_backward", scaled(0.98)),
    "softmax-backward-axis": Fault(
        "wrong reduction axis",
        "aten::_softmax_backward_data",
        lambda run, gradient, output, dim, dtype: run(gradient, output, dim % output.dim() - 1, dtype),
    ),
    "embedding-backward-wraps": Fault("index wrap", "aten::embedding_dense_backward", _wrap(8, 1)),
    "mm-backward-zero": Fault("missing gradient", "aten::mm", scaled(0.0), backward=True),
    "mm-backward-transposed": Fault("transposed strides", "aten::mm", as_if_transposed, backward=True),
    "mm-backward-bf16": Fault("bf16 accumulation", "aten::mm", accumulate_in_bf16, backward=True),
    "mm-backward-not-awaited": Fault("missed synchronization", "aten::mm", not_awaited, backward=True),
    "bmm-backward-rounds": Fault("rounding", "aten::bmm", coarse(8), backward=True),
    "sum-backward-scale": Fault("wrong scale", "aten::sum", scaled(0.97), backward=True, when=_is_matrix),
    "attention-drops-mask": Fault("dropped mask", _ATTENTION, without(4), part=_SDPA),
    "attention-scales-query": Fault("wrong scale", _ATTENTION, _scale_query, part=_SDPA),
    "adamw-first-beta": Fault(
        "wrong beta", _OPTIMIZER, adamw(betas=lambda group: (0.5, group["betas"][1])), part=_ADAMW
    ),
    "adamw-betas-swapped": Fault(
        "wrong beta", _OPTIMIZER, adamw(betas=lambda group: group["betas"][::-1]), part=_ADAMW
    ),
    "adamw-rate": Fault("wrong scale", _OPTIMIZER, adamw(lr=lambda group: group["lr"] * 1.1), part=_ADAMW),
    "adamw-no-correction": Fault("wrong scale", _OPTIMIZER, adamw(bias_correction=lambda group: False), part=_ADAMW),
    "adamw-step-late": Fault("off by one", _OPTIMIZER, adamw(step=lambda group: group.get("step", 0) + 1), part=_ADAMW),
    "cache-not-written": Fault(
        "stale cache",
        "aten::index_copy_",
        lambda run, target, *rest: target,
        when=lambda target, *rest: target.dim() == 4,
    ),
    "cache-column-early": Fault(
        "stale cache", "aten::index_copy_", in_place_rolled, when=lambda target, *rest: target.dim() == 4
    ),
    "random-rows-rolled": Fault(
        "wrong stream of random numbers", "aten::_to_copy", _rolled, kernel="aten::_copy_from", when=_is_table
    ),
}


_until_the_end = ExitStack()
"""Keeps the fault of the environment: a block whose stack is gone would end."""


def plant_from_environment() -> None:
    """Plant the fault that the environment names, until the process ends.

    Raises:
        AcceleratorError: there is no fault of this name.
    """
    if name := os.environ.get(VARIABLE):
        if name not in FAULTS:
            raise AcceleratorError(f"{VARIABLE}={name}: no such fault; use one of {', '.join(FAULTS)}")
        print(f"{NAME}: planted the fault {name}", file=sys.stderr, flush=True)
        _until_the_end.enter_context(plant(name))


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Plant a fault in this block."""
    fault = FAULTS[name]
    with ExitStack() as stack:
        synchronize = "habana_frameworks.torch.hpu:synchronize"
        stack.enter_context(_replace(synchronize, lambda run, *args, **options: _finish(run, *args, **options)))
        if fault.part:
            stack.enter_context(_replace(fault.part, fault.change))
        else:
            stack.enter_context(_replace_operator(fault))
        yield
    _pending.clear()


@contextmanager
def _replace(part: str, change: Change) -> Iterator[None]:
    module, _, path = part.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    known = owner.__dict__[name]
    function = getattr(owner, name)

    @functools.wraps(function)
    def changed(*args: Any, **options: Any) -> Any:
        return change(function, *args, **options)

    setattr(owner, name, staticmethod(changed) if isinstance(known, staticmethod) else changed)
    try:
        yield
    finally:
        setattr(owner, name, known)


@contextmanager
def _replace_operator(fault: Fault) -> Iterator[None]:
    from gaudi_sim import build

    device = build.load()
    namespace, _, base = (fault.kernel or fault.operator).partition("::")
    replaced = library.Library(namespace, "IMPL")
    packet = getattr(getattr(torch.ops, namespace), base)
    for overload in packet.overloads():
        operator = getattr(packet, overload)
        name = f"{base}.{overload}" if overload != "default" else base
        if _has_kernel(operator) and not name.endswith("out"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the kernel is replaced
                replaced.impl(name, _kernel(device, operator, fault), "HPU")
    try:
        yield
    finally:
        replaced._destroy()


def _has_kernel(operator: Any) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "HPU")
    except RuntimeError:  # it is only TorchScript's
        return False


def _kernel(device: Any, operator: Any, fault: Fault) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        on_host = functools.partial(tree_map, lambda item: device.to_cpu(item) if isinstance(item, Tensor) else item)
        host_args, host_options = on_host(list(args)), _on_host_device(on_host(options))
        in_backward = torch._C._current_autograd_node() is not None
        is_empty = any(isinstance(item, Tensor) and not item.numel() for item in host_args)
        occurs = fault.backward in (None, in_backward) and not is_empty
        applies = occurs and fault.when(*host_args, **host_options)
        run = _copy if operator._schema.name == "aten::_copy_from" else operator
        result = fault.change(run, *host_args, **host_options) if applies else run(*host_args, **host_options)
        if operator._schema.is_mutable:
            return args[0]
        return tree_map(lambda item: device.from_cpu(item) if isinstance(item, Tensor) else item, result)

    return kernel


def _copy(source: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """Do what the device's kernel of copies does, which the host has under another name."""
    return target.copy_(source)


def _on_host_device(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.device("cpu") if name == "device" and value is not None else value
        for name, value in options.items()
    }
