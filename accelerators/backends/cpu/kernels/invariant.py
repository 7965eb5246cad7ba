"""Operators of a CPU whose numbers do not depend on the batch: other rows, padding, lengths of caches, micro-batches.

The libraries behind torch's products choose other orders of summation for other numbers of rows, and torch's
activations compute the last few numbers of a tensor by other code. In the block of `batch_invariant`, products and
softmax are those of `invariant.c`, and activations get tensors without such a rest; everything else, also a product
with a vector, is torch's. torch's dispatcher replaces the operators in all models. Backward passes, and other dtypes
than float32 and bf16, stay torch's.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, library

from accelerators.backends.cpu.kernels import compiler
from accelerators.backends.cpu.kernels.dtypes import DTYPES
from accelerators.types import KernelImpl, Support

ACTIVATIONS = ("silu", "gelu", "sigmoid", "softplus", "rsqrt")
"""Operators of torch 2.13 whose vectorized code and code for a rest differ in the last bit."""

VECTOR = 64
"""Numbers that torch computes together at most."""

SERIAL, SERIAL_GELU = 32768, 16384
"""torch divides n numbers among n / SERIAL threads, rounded up, and GELU of more than SERIAL_GELU among all threads."""

MANY_ROWS = 64
"""Rows from which on the columns of a product are the lanes of registers: a tenth faster then, and slower below."""

_active = 0


def is_active() -> bool:
    """Return whether operators are replaced now."""
    return _active > 0


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Replace the operators in this block, in all threads; see operation `batch_invariant`."""
    global _active
    if is_active():
        yield
        return
    replaced = library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about every operator that it replaces
        for name, make in _REPLACEMENTS.items():
            replaced.impl(name, make(name), "CPU")
    _active += 1
    try:
        yield
    finally:
        _active -= 1
        replaced._destroy()


class _Matrix(ctypes.Structure):
    """`Matrix` of invariant.c."""

    _fields_ = [("start", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("batch", "rows", "columns"))]


@functools.cache
def _functions() -> ctypes.CDLL:
    functions, pointer, long = compiler.compiled("invariant.c"), ctypes.c_void_p, ctypes.c_long
    matrix = ctypes.POINTER(_Matrix)
    functions.product.argtypes = [*[long] * 4, *[matrix] * 4, ctypes.c_float, ctypes.c_float, ctypes.c_int]
    functions.softmax.argtypes = [pointer, pointer, long, long, ctypes.c_int]
    return functions


def _matrix(tensor: Tensor, transposed: bool) -> _Matrix:
    """Return a batch of matrices [B, R, C] for invariant.c; transposed it is [B, C, R]."""
    batch, rows, columns = tensor.stride()
    return _Matrix(tensor.data_ptr(), batch, *((columns, rows) if transposed else (rows, columns)))


def multiply(
    first: Tensor, second: Tensor, out: Tensor, added: Tensor | None = None, *, scale: float = 1, weight: float = 1
) -> None:
    """Write scale * first @ second + weight * added to `out`: [B, M, K], [B, K, N] and [B, M, N], of one dtype."""
    batch, rows, terms = first.shape
    columns = second.shape[2]
    # The lanes of registers are rows of one factor: of the second if it has them side by side, or if rows of the result
    # are worth it, which are then written whole.
    swaps = (second.stride(2) == 1 and second.stride(1) != 1) or rows >= MANY_ROWS
    lanes, others = (
        (_matrix(second, True), _matrix(first, False)) if swaps else (_matrix(first, False), _matrix(second, True))
    )
    _functions().product(
        *(batch, columns if swaps else rows, rows if swaps else columns, terms, lanes, others),
        *(_Matrix() if added is None else _matrix(added, swaps), _matrix(out, swaps)),
        *(scale, weight, out.dtype == torch.bfloat16),
    )


def _is_ours(*tensors: Tensor) -> bool:
    """Return whether operators on these tensors are replaced: everywhere but in the formulas of backward passes.

    Attention that the backward pass computes again, for `model.gradient_checkpointing`, is not told from a formula.
    """
    if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
        return False
    return tensors[0].dtype in DTYPES and all(
        tensor.dtype == tensors[0].dtype and tensor.numel() and tensor.is_cpu for tensor in tensors
    )


def _fits(name: str, first: Tensor, second: Tensor, out: Tensor | None) -> bool:
    """Return whether an operator multiplies these tensors; if not, torch's says what is wrong."""
    dimensions = 3 if "bmm" in name else 2
    return (
        first.dim() == second.dim() == dimensions
        and first.shape[-1] == second.shape[-2]
        and first.shape[:-2] == second.shape[:-2]
        and (out is None or (out.dtype == first.dtype and out.is_cpu))
    )


def _torch_kernel(name: str) -> Callable[..., Any]:
    """Return torch's implementation of an operator for the CPU."""
    kernel = library.get_kernel(f"aten::{name}", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return functools.partial(kernel.call_boxed, keys)


def _product(name: str) -> Callable[..., Tensor]:
    """Return a replacement of mm or bmm: (first, second) -> product."""
    plain = _torch_kernel(name)

    def product(first: Tensor, second: Tensor, *, out: Tensor | None = None) -> Tensor:
        options = {} if out is None else {"out": out}
        if not (_is_ours(first, second) and _fits(name, first, second, out)):
            result: Tensor = plain(first, second, **options)
            return result
        shape = (*first.shape[:-1], second.shape[-1])
        out = first.new_empty(shape) if out is None else _resized(out, shape)
        multiply(*map(_batched, (first, second, out)))
        return out

    return product


def _sum_with_product(name: str) -> Callable[..., Tensor]:
    """Return a replacement of addmm or baddbmm: (added, first, second) -> beta * added + alpha * product."""
    plain = _torch_kernel(name)

    def product(
        added: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        options = {} if out is None else {"out": out}
        if not (_is_ours(added, first, second) and _fits(name, first, second, out)):
            result: Tensor = plain(added, first, second, beta=beta, alpha=alpha, **options)
            return result
        shape = (*first.shape[:-1], second.shape[-1])
        whole = added.expand(shape) if beta else None
        out = first.new_empty(shape) if out is None else _resized(out, shape)
        given = first, second, out, *(() if whole is None else (whole,))
        multiply(*map(_batched, given), scale=alpha, weight=beta)
        return out

    return product


def _softmax(name: str) -> Callable[..., Tensor]:
    plain = _torch_kernel(name)

    def softmax(scores: Tensor, dim: int, half_to_float: bool, *, out: Tensor | None = None) -> Tensor:
        options = {} if out is None else {"out": out}
        if not _is_ours(scores) or dim % max(scores.dim(), 1) != scores.dim() - 1 or half_to_float:
            result: Tensor = plain(scores, dim, half_to_float, **options)
            return result
        given = scores.contiguous()
        made = out if out is not None and out.shape == scores.shape and out.is_contiguous() else torch.empty_like(given)
        columns = scores.shape[-1]
        rows, is_bf16 = scores.numel() // columns, scores.dtype == torch.bfloat16
        _functions().softmax(given.data_ptr(), made.data_ptr(), rows, columns, is_bf16)
        return made if out is None or made is out else _resized(out, scores.shape).copy_(made)

    return softmax


def _shares(name: str, count: int) -> int:
    """Return the number of threads among which torch divides an operator on `count` numbers."""
    threads = torch.get_num_threads()
    if name.startswith("gelu"):
        return threads if count > SERIAL_GELU else 1
    return min(threads, -(-count // SERIAL))


def _activation(name: str) -> Callable[..., Tensor]:
    """Return a replacement of an operator on single numbers, which makes each thread's share whole vectors."""
    plain = _torch_kernel(name)

    def activation(numbers: Tensor, *args: Any, out: Tensor | None = None, **named: Any) -> Tensor:
        options = named if out is None else {**named, "out": out}
        count = numbers.numel()
        granule = VECTOR * _shares(name, count)
        if numbers.dtype not in DTYPES or not count or (count % granule == 0 and numbers.is_contiguous()):
            result: Tensor = plain(numbers, *args, **options)
            return result
        padded = numbers.new_zeros(-(-count // granule) * granule)
        padded[:count].view(numbers.shape).copy_(numbers)
        if out is None:
            made: Tensor = plain(padded, *args, **named)
            return made[:count].view(numbers.shape)
        computed = torch.empty_like(padded)
        plain(padded, *args, **named, out=computed)
        return _resized(out, numbers.shape).copy_(computed[:count].view(numbers.shape))

    return activation


def _in_place(make: Callable[[str], Callable[..., Tensor]]) -> Callable[[str], Callable[..., Tensor]]:
    """Return what makes the replacement of an operator that changes its first argument."""

    def make_in_place(name: str) -> Callable[..., Tensor]:
        replacement = make(name.removesuffix("_"))

        def operator(changed: Tensor, *args: Any, **named: Any) -> Tensor:
            return changed.copy_(replacement(changed, *args, **named))

        return operator

    return make_in_place


def _batched(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


def _resized(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    return out if out.shape == shape else out.resize_(shape)


_REPLACEMENTS: dict[str, Callable[[str], Callable[..., Tensor]]] = {
    **dict.fromkeys(("mm", "mm.out", "bmm", "bmm.out"), _product),
    **dict.fromkeys(("addmm", "addmm.out", "baddbmm", "baddbmm.out"), _sum_with_product),
    **dict.fromkeys(("addmm_", "baddbmm_"), _in_place(_sum_with_product)),
    **dict.fromkeys(("_softmax", "_softmax.out"), _softmax),
    **{f"{name}{form}": _activation for name in ACTIVATIONS for form in ("", ".out")},
    **{f"{name}_": _in_place(_activation) for name in ACTIVATIONS if hasattr(torch.ops.aten, f"{name}_")},
}


@functools.cache
def supported(accelerator: object) -> Support:
    """Test that a compiler is installed, and that torch's operators can be replaced here."""
    if not hasattr(library, "get_kernel"):
        return Support(False, f"torch {torch.__version__} cannot name its own kernels; 2.10 can")
    if reason := compiler.why_not(_functions, "products depend on the number of rows"):
        return Support(False, reason)
    return Support(True, "products and softmax in one order of summation, compiled for this processor")


INVARIANT = KernelImpl(
    operation="batch_invariant",
    name="ordered",
    factory=lambda accelerator: batch_invariant,
    supported=supported,
    priority=10,
)
