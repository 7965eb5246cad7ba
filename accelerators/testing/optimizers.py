"""Checks of an optimizer's step: AdamW on the device and on the host, offloaded tensors, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerators.testing.reference import ADAMW, assert_close, difference

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

_ROUNDING = 1e-5
"""Difference of float32 from float64 in a few steps of AdamW, as a fraction of the largest number."""

LAYOUTS: dict[str, Callable[[Sequence[nn.Parameter]], list[Any]]] = {
    "a list of parameters": list,
    "groups": lambda p: [{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:], "weight_decay": 0.0}],
    "groups, one of them empty": lambda p: [{"params": list(p), "lr": 0.05}, {"params": [], "weight_decay": 0.0}],
}
"""Ways to hand parameters to an optimizer."""


def check_adamw(accelerator: Accelerator) -> None:
    """Check steps over a list of parameters, over groups, and over groups with an empty one."""
    kernel = accelerator.kernels.get("adamw", required=True)
    for layout, groups in LAYOUTS.items():
        expected = _adamw_steps(torch.optim.AdamW, groups, torch.device("cpu"))
        try:
            results = _adamw_steps(kernel, groups, accelerator.device())
        except Exception as error:
            raise AssertionError(f"adamw over {layout} failed ({type(error).__name__}: {error})") from error
        for number, (result, reference) in enumerate(zip(results, expected)):
            assert_close(f"adamw over {layout}: parameter {number} after 4 steps", result, reference)


def check_clip_grad_norm(accelerator: Accelerator) -> None:
    """Check norm and gradients, clipped and not, with a parameter that has no gradient."""
    clip = accelerator.kernels.get("clip_grad_norm", required=True)
    for max_norm in (1.0, 1e3):
        expected, expected_norm = _clipped(nn.utils.clip_grad_norm_, max_norm, torch.device("cpu"))
        gradients, norm = _clipped(clip, max_norm, accelerator.device())
        scalar = isinstance(norm, Tensor) and norm.numel() == 1
        assert scalar, f"clip_grad_norm gives {norm!r}, expected the norm as a scalar tensor"
        assert_close(f"clip_grad_norm to {max_norm:g}: the norm", norm.reshape(()), expected_norm)
        assert_close(f"clip_grad_norm to {max_norm:g}: the gradients", gradients, expected)


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
    what = f"pin_memory() of a {tensor.dtype} on {tensor.device}"
    assert pinned.is_pinned(), f"{what} gives a tensor that is not page-locked"
    return pinned


def _check_steps(accelerator: Accelerator, host: torch.device) -> None:
    kernel = accelerator.kernels.get("adamw_cpu_offload")
    if kernel is None:
        return
    for layout, groups in LAYOUTS.items():
        what = f"adamw_cpu_offload over {layout}"
        expected = _adamw_steps(torch.optim.AdamW, groups, torch.device("cpu"), torch.float64)
        try:
            results = _adamw_steps(kernel, groups, host)
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


def _adamw_steps(
    adamw: Callable[..., torch.optim.Optimizer],
    groups: Callable[[Sequence[nn.Parameter]], list[Any]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return parameters after four steps of an optimizer over `groups` of them, one of `LAYOUTS`."""
    shapes = ((16, 8), (8,), (3, 5, 2))
    values = [torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) for shape in shapes]
    parameters = [nn.Parameter(value.to(device, dtype)) for value in values]
    optimizer = adamw(groups(parameters), lr=0.1, **ADAMW)
    for step in range(4):
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * (step + 2)) + 0.1
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters]


def _clipped(
    clip: Callable[[list[nn.Parameter], float], Tensor], max_norm: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in (10, 3, 4)]
    for parameter in parameters[:2]:
        parameter.grad = torch.linspace(-3, 4, parameter.numel(), device=device)
    norm = clip(parameters, max_norm)
    return torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None]), norm
