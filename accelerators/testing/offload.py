"""The check of offload: tensors move from the host to the device and back bit for bit, and AdamW steps on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelerators.testing.precision import LAYOUTS, adamw_steps
from accelerators.testing.reference import difference

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

_ROUNDING = 1e-5
"""Difference of float32 from float64 in a few steps of AdamW, as a fraction of the largest number."""


def check_offload(accelerator: Accelerator) -> None:
    """Check tensors of every dtype of weights, moments and buffers; then `adamw_cpu_offload` on the host."""
    host, pins = accelerator.host_device(), accelerator.pins_memory()
    for tensor in _values():
        offloaded = tensor.to(host)
        if pins:
            offloaded = _pinned(offloaded)
        moved = accelerator.to_device(offloaded)
        accelerator.step_boundary("check/offload")
        accelerator.synchronize()
        returned = moved.to(host)
        same = returned.dtype == tensor.dtype and torch.equal(_bits(returned), _bits(tensor))
        assert same, f"a {tensor.dtype} that comes from {host} to {moved.device} and back has changed"
    _check_steps(accelerator, host)


def _pinned(tensor: Tensor) -> Tensor:
    what = f"pins_memory() is true, but a {tensor.dtype} on {tensor.device} cannot be page-locked"
    try:
        pinned = tensor.pin_memory()
    except Exception as error:
        raise AssertionError(f"{what} ({type(error).__name__}: {error})") from error
    assert pinned.is_pinned(), what
    return pinned


def _check_steps(accelerator: Accelerator, host: torch.device) -> None:
    kernel = accelerator.kernels.get("adamw_cpu_offload")
    if kernel is None:
        return
    for layout, groups in LAYOUTS.items():
        what = f"adamw_cpu_offload over {layout}"
        expected = adamw_steps(torch.optim.AdamW, groups, torch.device("cpu"), torch.float64)
        try:
            results = adamw_steps(kernel, groups, host)
        except Exception as error:
            raise AssertionError(f"{what} failed ({type(error).__name__}: {error})") from error
        for number, (result, reference) in enumerate(zip(results, expected)):
            assert result.device == host, (
                f"{what}: parameter {number} is on {result.device} after 4 steps, not on {host}"
            )
            off = difference(result, reference)
            assert off <= _ROUNDING, (
                f"{what}: parameter {number} after 4 steps: differs by {off:.2g} of the largest number from float64, "
                f"expected at most {_ROUNDING:g}"
            )


def _values() -> list[Tensor]:
    """Return numbers of all magnitudes and special values."""
    odd = torch.tensor([0.0, -0.0, 1e-45, float("inf"), float("-inf"), 3.4e38])
    floats = torch.cat([odd, torch.linspace(-3, 3, 1001).exp(), -torch.linspace(-80, 80, 1001).exp()])
    whole = torch.arange(-128, 128)
    return [floats, floats.bfloat16(), floats.half(), whole.to(torch.int8), whole.long(), whole > 7]


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits as integers, so that -0 and 0 differ."""
    tensor = tensor.cpu()
    return tensor if tensor.dtype == torch.bool else tensor.view(getattr(torch, f"int{8 * tensor.itemsize}"))
