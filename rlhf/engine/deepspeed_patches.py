"""Every place where rlhf works around DeepSpeed: replaced functions, undone side effects, reset state.

Each function names the upstream code, as DeepSpeed 0.19.8 has it, and the issue if there is one.
`tests/engine/test_deepspeed_patches.py` runs DeepSpeed without each of them and expects the fault, so that a release
that fixes it is noticed and the patch can be removed.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.partition_parameters import register_external_parameter
from torch import Tensor

from rlhf.errors import DependencyError

KNOWN = (0, 19)  # the release series that these patches were written for and are tested with


def check_version(version: str) -> None:
    """Refuse a DeepSpeed whose internals have not been compared with these patches.

    Raises:
        DependencyError: another release series than `KNOWN`.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) != KNOWN:
        series = ".".join(map(str, KNOWN))
        raise DependencyError(
            f"deepspeed: rlhf's patches are written for {series}, got {version}; "
            f"install it with: pip install 'deepspeed=={series}.*'"
        )


def clear_process_groups() -> None:
    """Clear the variables in which DeepSpeed keeps process groups, so that a later session gets its own.

    `deepspeed.comm.comm.cdb` and `deepspeed.utils.groups` outlive `torch.distributed.destroy_process_group`.
    """
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    importlib.reload(groups)


def round_linear_once() -> None:
    """Round the output of linear layers with a bias once, after adding the bias, as below ZeRO-3.

    At ZeRO-3 DeepSpeed replaces `torch.nn.functional.linear` in the whole process by a function that adds the bias to
    a product already rounded to 16 bits (`LinearFunctionForZeroStage3.forward`). It saves the same tensors for the
    backward pass with this patch.
    """
    LinearFunctionForZeroStage3.forward = staticmethod(_linear)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output: Tensor = torch._C._nn.linear(input, weight, bias)  # torch.nn.functional.linear before DeepSpeed
    return output


def undo_setup_step(engine: Any) -> None:
    """Undo the step with zero gradients that DeepSpeed's 16-bit wrapper takes at ZeRO 0 to allocate states.

    `FP16_UnfusedOptimizer.initialize_optimizer_states`. It would shift Adam's bias correction by one; with a learning
    rate of 0 it changes no weight.
    """
    optimizer = getattr(engine.optimizer, "optimizer", None)
    for state in getattr(optimizer, "state", {}).values():
        if torch.is_tensor(state.get("step")):
            state["step"].zero_()


def replace_step(engine: Any, *, ranks: int, loss_scaling: bool) -> None:
    """Leave out the passes over all gradients that change no number, in the step of an engine at ZeRO 0.

    `DeepSpeedEngine._backward_epilogue`, `FP16_UnfusedOptimizer.step`.
    """
    if ranks == 1:
        engine.enable_backward_allreduce = False  # it would copy all gradients into one buffer, and back
    if hasattr(engine.optimizer, "fp16_groups") and not loss_scaling:
        engine.optimizer.step = partial(_step, engine.optimizer)


@torch.no_grad()
def _step(optimizer: Any) -> bool:
    """Take the step of an optimizer with float32 weights, for gradients that cannot overflow.

    DeepSpeed looks for overflow first, copies each gradient for its norm, which it reads on the host one by one, and
    again for the float32 weight, and multiplies all by the factor that clips them. Here each is copied once, one number
    is read, and an optimizer that takes a divisor (torch's fused ones) clips on its way. The operators are the same in
    every step, whether it clips or not: others would be another graph on a lazy device.

    Returns:
        True if the step was skipped.
    """
    weights = [weight for group in optimizer.fp32_groups for weight in group]
    parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
    for weight, parameter in zip(weights, parameters):
        gradient = parameter.grad
        weight.grad = torch.zeros_like(weight) if gradient is None else gradient.to(weight.dtype)
    squares = [torch.dot(gradient, gradient) for gradient in (weight.grad.flatten() for weight in weights)]
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
    for weight, parameter in zip(weights, parameters):
        weight.grad = None
        parameter.copy_(weight)
    return False


def find_loss_scaler(optimizer: Any) -> Any:
    """Return what holds an optimizer's loss scale; None in fp32 at ZeRO 0."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def missing_loss_scale(engine: Any, *, loss_scaling: bool, zero_stage: int) -> float:
    """Return the factor that DeepSpeed should multiply the loss by and does not; 1 if nothing is missing.

    At ZeRO 0 it divides fp16 gradients by the loss scale without having multiplied the loss by it
    (https://github.com/deepspeedai/DeepSpeed/pull/8393).
    """
    return float(engine.optimizer.loss_scale) if loss_scaling and zero_stage == 0 else 1.0


def begin_micro_batch(engine: Any) -> None:
    """Make ZeRO count the next backward pass as that of a new micro-batch.

    DeepSpeed resets this count in the forward pass (`DeepSpeedEngine.forward`), but that of this micro-batch may have
    come before the backward pass of the last one.
    """
    if isinstance(engine.optimizer, ZeROOptimizer):
        engine.optimizer.clear_backward_seen_flag()


def step_at_lowest_scale(engine: Any) -> bool:
    """Take a step with loss scaling; return True if gradients overflowed although the scale cannot fall further.

    DeepSpeed raises a bare `Exception` then at ZeRO 1 to 3 (`DynamicLossScaler`,
    https://github.com/deepspeedai/DeepSpeed/issues/4017), and skips every step from then on at ZeRO 0
    (`FP16_UnfusedOptimizer`, whose `loss_scale_config` is its scaler).
    """
    optimizer, before = engine.optimizer, float(engine.optimizer.loss_scale)
    scaler = find_loss_scaler(optimizer)
    lowest = getattr(scaler, "min_scale", None) or getattr(scaler, "min_loss_scale", None)
    if lowest is None:  # a constant scale
        engine.step()
        return False
    scaler.raise_error_at_min_scale = False
    engine.step()
    return bool(before <= lowest and scaler.last_overflow_iter == scaler.cur_iter - 1)


def gradients_overflow(optimizer: Any) -> bool:
    """Return True if the gradients that wait for a step are not all finite; every rank calls it.

    An optimizer decides this in `has_overflow`, for all ranks (`DeepSpeedZeroOptimizer`, its Stage3) or for gradients
    that all ranks have (`overflow_checker` of `FP16_UnfusedOptimizer` and `FP16_Optimizer`).
    """
    checker = getattr(optimizer, "overflow_checker", None)
    return bool(optimizer.has_overflow() if checker is None else checker.check())


@contextmanager
def override_overflow(optimizer: Any, *, skip: bool, lower: bool) -> Iterator[None]:
    """In this block, decide for the optimizer whether it skips its step and whether its loss scale is lowered.

    It learns the second from `_update_scale`. The norm, which it looks at too, is finite if all fp16 gradients are.
    """
    checker = getattr(optimizer, "overflow_checker", optimizer)
    update = optimizer._update_scale
    checker.has_overflow = lambda *arguments, **options: skip
    optimizer._update_scale = lambda *arguments: update(lower)
    try:
        yield
    finally:
        del checker.has_overflow, optimizer._update_scale


def restart_trace(engine: Any) -> None:
    """Make ZeRO-3 record the order in which layers need their weights, from the next pass on.

    It records whichever pass comes first, and gathers weights ahead in that order. A scoring pass tells it nothing
    about backward: every training pass would end the recording, and the next one would make the ranks compare their
    orders again, with values read on the host (`PartitionedParameterCoordinator`,
    https://github.com/deepspeedai/DeepSpeed/issues/5662).
    """
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def declare_adapters(layers: Iterable[Any]) -> None:
    """Tell ZeRO-3 that layers with adapters read the type of their adapters' first factors, as peft does.

    DeepSpeed counts a weight of another module among those of a layer once the layer reads it while it is released. If
    that happens after it has recorded the order of weights, the next backward pass raises "tracing error"
    (`ZeROOrderedDict`, `PartitionedParameterCoordinator`): in a resumed run, the step after an evaluation.
    """
    for layer in layers:
        for factor in layer.lora_A.values():
            register_external_parameter(layer, factor.weight)


@contextmanager
def without_hooks(engine: Any) -> Iterator[None]:
    """In this block, run the model without DeepSpeed's hooks.

    ZeRO-3's would release gathered weights after every layer. The engine's own read counters of training steps, so that
    a generation step compiled with them would be compiled again after every training step.

    The same hooks come back in the same order. New ones (`DeepSpeedZeRoOffload.setup_zero_stage3_hooks`) would make
    DeepSpeed record its trace again (https://github.com/deepspeedai/DeepSpeed/pull/8043).
    """
    handles = [engine.module_forward_pre_hook, engine.module_forward_post_hook]
    if offload := getattr(engine.optimizer, "parameter_offload", None):
        handles += [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
    removed = []
    for handle in sorted(handles, key=lambda handle: handle.id):  # the order in which they were registered and run
        hooks = handle.hooks_dict_ref()
        removed.append((hooks, handle.id, hooks.pop(handle.id)))
    try:
        yield
    finally:
        for hooks, key, hook in removed:
            hooks[key] = hook
