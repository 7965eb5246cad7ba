"""Softmax of attention's scores on a CPU, in one pass over memory (`softmax.c`), as an operator of torch.

Torch's own operators need three passes: they copy the mask, add the scores to it, and compute the softmax.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor, library
from torch.utils._python_dispatch import _disable_current_modes

from accelerators.backends.cpu.kernels import compiler
from accelerators.backends.cpu.kernels.dtypes import DTYPES

_pointer, _long = ctypes.c_void_p, ctypes.c_long


class _Softmax(ctypes.Structure):
    """`Softmax` of softmax.c."""

    _fields_ = (
        *(("scores", _pointer), ("mask", _pointer), ("rows", _long), ("columns", _long)),
        *(("sizes", _long * 4), ("steps", _long * 4), ("scale", ctypes.c_float), ("room", _pointer)),
    )


@cache
def _functions(dtype: torch.dtype) -> ctypes.CDLL:
    functions = compiler.compiled("softmax.c", *DTYPES[dtype])
    functions.softmax.argtypes = [_pointer]
    return functions


_operators = library.Library("rlhf_cpu", "DEF")
_operators.define("softmax_(Tensor(a!) scores, Tensor? mask, float scale) -> ()")


@cache
def why_not() -> str:
    """Return why the code cannot be used; "" if it can."""
    if reason := compiler.why_not(_functions, "attention takes 1.2 to 2 times as long", DTYPES):
        return reason
    for dtype in DTYPES:
        with _disable_current_modes():
            scores = torch.linspace(0, 400, 2 * 37, device="cpu").sin().mul(4).view(1, 2, 37).to(dtype)
            mask = torch.zeros(1, 1, 1, 2, 37, dtype=dtype, device="cpu")
            mask[..., 0, 30:], mask[..., 1, :] = -torch.inf, -torch.inf  # the second row sees nothing
            exact = (scores.double() / 2 + mask[0, 0, 0].double().clamp_min(-1e300)).softmax(-1)
            softmax_(scores, mask, 0.5)
            if not torch.allclose(scores.double(), exact, rtol=0.01, atol=1e-6):
                return "the compiled softmax is wrong here"
    return ""


def softmax_(scores: Tensor, mask: Tensor | None, scale: float) -> None:
    """Replace scores, scaled and masked, by their softmax, which is computed in float32.

    A row that the mask hides as a whole gets equal probabilities. Dispatch modes see the call as one operator. On
    the meta device it does nothing. It has no gradient: the caller computes it.

    Args:
        scores: [N, R, S], contiguous, of a dtype in `DTYPES`.
        mask: of the same dtype, [B, G, H, T, S] with B * G * H * T = N * R, possibly expanded; None: none.
        scale: factor of the scores.

    Raises:
        ValueError: the scores or the mask are not as described.
    """
    torch.ops.rlhf_cpu.softmax_(scores, mask, scale)


@library.impl(_operators, "softmax_", "CPU")
def _compute(scores: Tensor, mask: Tensor | None, scale: float) -> None:
    rows, columns = scores.shape[0] * scores.shape[1], scores.shape[2]
    if scores.dtype not in DTYPES or not scores.is_contiguous() or (mask is not None and mask.dtype != scores.dtype):
        raise ValueError(
            "attention: the scores have gaps or another dtype, or the mask has another dtype than they have"
        )
    if mask is not None and (mask.shape[4] != columns or mask.shape[:4].numel() != rows):
        raise ValueError(f"attention: a mask of {[*mask.shape]} does not fit scores of {[*scores.shape]}")
    room = torch.empty(torch.get_num_threads(), columns + 16, dtype=torch.float32)  # 16: the most lanes of a register
    task = _Softmax(scores.data_ptr(), None, rows, columns, scale=scale, room=room.data_ptr())
    if mask is not None:
        mask = mask if mask.stride(4) == 1 else mask.contiguous()
        task.mask = mask.data_ptr()
        task.sizes[:], task.steps[:] = mask.shape[:4], mask.stride()[:4]
    _functions(scores.dtype).softmax(ctypes.byref(task))


@library.impl(_operators, "softmax_", "Meta")
def _compute_nothing(scores: Tensor, mask: Tensor | None, scale: float) -> None:
    """Do nothing: there are no numbers."""
