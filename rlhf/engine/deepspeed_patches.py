"""Work of DeepSpeed's that changes no number, left out: at ZeRO 0, passes over all gradients in every step.

As deepspeed 0.19.8 has them (`DeepSpeedEngine._backward_epilogue`, `FP16_UnfusedOptimizer.step`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch


def spare(engine: Any, *, ranks: int, loss_scaling: bool) -> None:
    """Have a new engine at ZeRO 0 do what its step needs, and no more."""
    if ranks == 1:
        engine.enable_backward_allreduce = False  # it would copy all gradients into one buffer, and back
    if hasattr(engine.optimizer, "fp16_groups") and not loss_scaling:
        engine.optimizer.step = partial(_step, engine.optimizer)


@torch.no_grad()
def _step(optimizer: Any) -> bool:
    """The step of an optimizer with masters, for gradients that cannot overflow: whether it was skipped.

    DeepSpeed looks for overflow first, copies each gradient for its norm, which it reads on the host one by one, and
    again for the master, and multiplies all by what clips them. Here each is copied once, one number is read, and an
    optimizer that takes a divisor (torch's fused ones) clips on its way. The operators are those of every step, be
    there something to clip or not: other ones would be another graph.
    """
    masters = [master for group in optimizer.fp32_groups for master in group]
    parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
    for master, parameter in zip(masters, parameters):
        gradient = parameter.grad
        master.grad = torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
    squares = [torch.dot(gradient, gradient) for gradient in (master.grad.flatten() for master in masters)]
    optimizer.overflow, optimizer._global_grad_norm = False, float(torch.stack(squares).sum().sqrt())
    if not math.isfinite(optimizer._global_grad_norm):
        return bool(optimizer._skip_invalid_grad_norm())
    optimizer._update_scale(False)
    inner = optimizer.optimizer
    divides = getattr(inner, "_step_supports_amp_scaling", False)
    divisor = optimizer.unscale_and_clip_grads(optimizer._global_grad_norm, apply_scale=not divides)
    inner.grad_scale = torch.tensor(divisor, dtype=torch.float32) if divides else None
    try:
        inner.step()
    finally:
        del inner.grad_scale
    for master, parameter in zip(masters, parameters):
        master.grad = None
        parameter.copy_(master)
    return False
