"""The error model of `rlhf accelerators diff`: how far a result may be from the truth, by dtype, and why.

An operator rounds its result once, and accumulates in at least float32. The constants were chosen from clean pairs of
backends (`ci/diff_faults.py`); every report shows them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDINGS = {"float16": 2.0, "bfloat16": 2.0, "float32": 4.0, "float64": 4.0}
"""Roundings of the result, in units of `unit`, by its dtype: 16-bit results may be rounded twice."""

ACCUMULATED = 16.0
"""Roundings of each input, at the precision of the accumulation, that an operator may amplify into its result; times
the square root of the number of its additions."""

SPREAD = 24.0
"""Factor between the deviation of a step whose operators are each perturbed by one rounding, and its band."""

VARIANT = 2.0
"""Factor between the deviation of a step whose AdamW adds eps before the bias correction, and its band."""

ROUNDED_INSIDE = (
    "_scaled_dot_product",
    "embedding_dense_backward",
    "index_add",
    "scatter_add",
    "index_put",
    "cumsum",
    "native_layer_norm_backward",
)
"""Beginnings of the names of operators that round or accumulate in the dtype of their result."""

SAMPLES = 3


def unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to a floating dtype."""
    return torch.finfo(dtype).eps / 2


def describe_bands() -> dict[str, Any]:
    """Return the table of the error model, for reports."""
    return {
        "operator": "roundings x unit x |truth| + "
        "accumulation unit x sqrt(additions) x (accumulated x sensitivity + |truth|)",
        "roundings": ROUNDINGS,
        "units": {name: unit(getattr(torch, name)) for name in ROUNDINGS},
        "accumulated": ACCUMULATED,
        "accumulation": f"float32, or the result's dtype for {', '.join(ROUNDED_INSIDE)}",
        "phase": "spread x RMS deviation of steps whose operators are each perturbed by one rounding",
        "spread": SPREAD,
        "update": "or variant x RMS deviation of a step whose AdamW adds eps before the bias correction",
        "variant": VARIANT,
    }


class PerturbedRounding(TorchDispatchMode):
    """Perturb the result of each operator by one rounding of its dtype, in a random direction of this seed.

    Elements have a direction each, as by rounding; with `together` all of a result have one, as by truncation.
    """

    def __init__(self, seed: int, *, together: bool = False) -> None:
        super().__init__()
        self._random, self._together = torch.Generator().manual_seed(seed), together

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and perturb what it computed."""
        result = func(*args, **(kwargs or {}))
        if not _is_exact(func):
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                    self._perturb(tensor)
        return result

    def _perturb(self, tensor: Tensor) -> None:
        shape = () if self._together else tensor.shape
        direction = torch.rand(shape, generator=self._random).mul_(2).sub_(1)
        relative = (direction * unit(tensor.dtype)).to(tensor.device)
        scale = torch.where(tensor.abs() < torch.finfo(tensor.dtype).max / 2, relative, 0.0)
        if tensor.dtype in (torch.float16, torch.bfloat16):  # one plus half a unit rounds to one
            scale = torch.where(scale.abs() > unit(tensor.dtype) / 2, scale.sign() * 2 * unit(tensor.dtype), 0.0)
        tensor.mul_((1 + scale).to(tensor.dtype))


_EXACT = {
    *("_copy_from", "_local_scalar_dense", "_to_copy", "_unsafe_view", "abs", "argmax", "arange", "cat", "clamp"),
    *("clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy", "detach", "embedding", "empty", "empty_like"),
    *("empty_strided", "fill", "full", "full_like", "gather", "index", "index_copy", "index_select", "lift_fresh"),
    *("masked_fill", "max", "maximum", "min", "minimum", "amax", "neg", "new_empty", "new_empty_strided", "new_full"),
    *("new_ones", "new_zeros", "ones", "ones_like", "rand", "relu", "repeat", "scalar_tensor", "scatter", "set"),
    *("sign", "slice_scatter", "sort", "stack", "topk", "tril", "triu", "where", "zero", "zeros", "zeros_like"),
    *("_foreach_copy", "_foreach_zero", "ge", "gt", "le", "lt", "eq", "ne"),
}


def base_name(func: Any) -> str:
    """Return an operator's name without namespace, overload, and the mark of operators in place."""
    name = str(func.overloadpacket.__name__)
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def is_view(func: Any) -> bool:
    """Return whether an operator's results share memory with its inputs, and nothing is written."""
    schema = func._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def _is_exact(func: Any) -> bool:
    return base_name(func) in _EXACT or is_view(func)
