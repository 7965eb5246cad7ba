"""The check of offload: what waits on the host comes to the device and back bit for bit, and steps are taken there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelerators.testing.precision import LAYOUTS, adamw_steps
from accelerators.testing.reference import difference

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

_ROUNDING = 1e-5
"""Of float32 against float64, in a few steps of AdamW: a part of the largest number."""


def check_offload(accelerator: Accelerator) -> None:
    """Tensors of every kind that weights, moments and buffers are made of; then `adamw_cpu_offload` on the host."""
    host, pins = accelerator.host_device(), accelerator.pins_memory()
    assert isinstance(host, torch.device), f"host_device() gives {host!r}, expected a torch.device"
    assert isinstance(pins, bool), f"pins_memory() gives {pins!r}, expected a bool"
    for tensor in _values():
        waiting = tensor.to(host)
        if pins:
            waiting = _pinned(waiting)
        there = accelerator.to_device(waiting)
        accelerator.step_boundary("check/offload")
        accelerator.synchronize()
        back = there.to(host)
        same = back.dtype == tensor.dtype and torch.equal(_bits(back), _bits(tensor))
        assert same, f"a {tensor.dtype} that comes from {host} to {there.device} and back has changed"
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
            found = adamw_steps(kernel, groups, host)
        except Exception as error:
            raise AssertionError(f"{what} failed ({type(error).__name__}: {error})") from error
        for number, (mine, torchs) in enumerate(zip(found, expected)):
            assert mine.device == host, f"{what}: parameter {number} is on {mine.device} after 4 steps, not on {host}"
            off = difference(mine, torchs)
            assert off <= _ROUNDING, (
                f"{what}: parameter {number} after 4 steps: differs by {off:.2g} of the largest number from float64, "
                f"expected at most {_ROUNDING:g}"
            )


def _values() -> list[Tensor]:
    """Numbers of all sizes, the odd ones too."""
    odd = torch.tensor([0.0, -0.0, 1e-45, float("inf"), float("-inf"), 3.4e38])
    floats = torch.cat([odd, torch.linspace(-3, 3, 1001).exp(), -torch.linspace(-80, 80, 1001).exp()])
    whole = torch.arange(-128, 128)
    return [floats, floats.bfloat16(), floats.half(), whole.to(torch.int8), whole.long(), whole > 7]


def _bits(tensor: Tensor) -> Tensor:
    """Of which -0 and 0 are not equal."""
    tensor = tensor.cpu()
    return tensor if tensor.dtype == torch.bool else tensor.view(getattr(torch, f"int{8 * tensor.itemsize}"))
