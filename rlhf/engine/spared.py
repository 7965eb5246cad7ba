"""Work of DeepSpeed's that changes no number, left out: at ZeRO 0, passes over all gradients in every step.

As deepspeed 0.19.8 has them (`DeepSpeedEngine._backward_epilogue`, `FP16_UnfusedOptimizer.step`).
"""

from __future__ import annotations

from typing import Any


def spare(engine: Any, *, ranks: int, loss_scaling: bool) -> None:
    """Have a new engine at ZeRO 0 do what its step needs, and no more."""
    if ranks == 1:
        engine.enable_backward_allreduce = False  # it would copy all gradients into one buffer, and back
    checker = getattr(engine.optimizer, "overflow_checker", None)
    if checker is not None and not loss_scaling:
        # The norm, which is looked at next, is not finite where a gradient is not.
        checker.check = lambda *arguments, **options: False
