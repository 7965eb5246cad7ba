"""Checks of a backend's description of itself: types, operations, shape policy and precisions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerators import compatibility
from accelerators.accelerator import Accelerator
from accelerators.errors import AcceleratorError, PluginError
from accelerators.shapes import ShapePolicy
from accelerators.testing.reference import assert_close, batch, model
from accelerators.types import OPERATIONS, DeviceInfo, Health, KernelImpl, Memory, Precision, Support

if TYPE_CHECKING:
    from accelerators.registry import Selection

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNKNOWN = "fp12"
RETURNS: Mapping[str, type | tuple[type, ...]] = {
    "device": torch.device,
    "info": DeviceInfo,
    "health": Health,
    "host_operators": Mapping,
    "environment_report": Mapping,
    "other_modes": Mapping,
    "exceptions": tuple,
    "is_lazy": bool,
    "recordings_keep_memory": bool,
    "compilations": (int, type(None)),
    "kernel_implementations": Iterable,
    "shape_policy": ShapePolicy,
    "host_device": torch.device,
    "pins_memory": bool,
    "memory": Memory,
    "rng_state": dict,
    "dist_backend": str,
    "collectives_on_host": bool,
    "synchronize": type(None),
    "reset_peak": type(None),
    "empty_cache": type(None),
}
"""Methods without arguments, and the types of their results."""


def check_interface(selection: Selection, accelerator: Accelerator) -> str:
    """Check that overrides take what rlhf passes to them; return a note if the plugin is of a former interface."""
    for name, method in vars(Accelerator).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            passed = list(inspect.signature(method).parameters)[1:]
            try:
                inspect.signature(getattr(accelerator, name)).bind(*passed)
            except TypeError as error:
                raise AssertionError(
                    f"rlhf calls {name}({', '.join(passed)}), which it does not take: {error}"
                ) from error
    return compatibility.describe_changes(compatibility.used_version(selection.spec))


def check_types(accelerator: Accelerator) -> None:
    """Check the results of methods, and class attributes that the interface reads."""
    for name, kind in RETURNS.items():
        result = getattr(accelerator, name)()
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        assert isinstance(result, kind), f"{name}() returns {result!r}, expected {expected}"
    for implementation in accelerator.kernel_implementations():
        is_kernel = isinstance(implementation, KernelImpl)
        assert is_kernel, f"kernel_implementations() contains {implementation!r}, expected only KernelImpl"
    for part in accelerator.dist_backend().split(","):  # such as hccl, or cpu:gloo,cuda:nccl
        known = torch.distributed.Backend.backend_list
        name = part.rpartition(":")[2].lower()
        assert name in known, f"dist_backend() returns {name!r}, expected one of torch's: {', '.join(known)}"
    assert isinstance(accelerator.deepspeed_name, str), f"deepspeed_name is {accelerator.deepspeed_name!r}, not a str"
    size = accelerator.chunk_elements
    assert isinstance(size, int) and size > 0, f"chunk_elements is {size!r}, expected an int above 0"
    setting = accelerator.allocator_setting
    is_pair = isinstance(setting, tuple) and len(setting) == 2 and all(isinstance(part, str) for part in setting)
    assert is_pair, f"allocator_setting is {setting!r}, expected the name of a variable and a value"
    refusal = accelerator.refuse_capture("conformance")
    assert isinstance(refusal, str), f"refuse_capture() returns {refusal!r}, expected a reason or an empty text"
    info = accelerator.info()
    named = not info.uuids or len(set(info.uuids)) == info.count
    assert named, f"info() has the uuids {info.uuids!r}, expected none, or a different one for each of {info.count}"
    unknown = [operation for operation in accelerator.absent if operation not in OPERATIONS]
    assert not unknown, f"absent names {', '.join(unknown)}, expected some of {', '.join(OPERATIONS)}"


def check_operations(accelerator: Accelerator) -> None:
    """Check that the implementation that is reported as supported can be made, and is of use."""
    for operation, support in accelerator.kernels.capabilities().items():
        if support.ok:
            _check_offer(accelerator, operation, support)


def check_shapes(accelerator: Accelerator) -> None:
    """Check the policy's buckets and lengths, over small, large and odd lengths."""
    policy = accelerator.shape_policy()
    before = 0
    for n in (*range(1, 1100), *range(1100, 3 * policy.largest, 511)):
        bucket = policy.bucket(n)
        assert bucket >= n, f"bucket({n}) is {bucket}, expected at least {n}"
        again = policy.bucket(bucket)
        assert again == bucket, f"bucket({n}) is {bucket}, but bucket({bucket}) is {again}: expected the same bucket"
        assert bucket >= before, f"bucket({n}) is {bucket}, but bucket of a smaller number is {before}: not monotone"
        before = bucket
    for maximum in (1, 48, 100, 512, 2048):
        for longest in range(1, maximum + 1):
            length = policy.length(longest, maximum)
            what = f"length({longest}, maximum={maximum}) is {length}"
            assert longest <= length <= maximum, f"{what}, expected {longest} to {maximum}"
            few = policy.kind == "dynamic" or length in (policy.bucket(longest), maximum)
            assert few, f"{what}, expected the bucket, {policy.bucket(longest)}, or the maximum"


def check_precision(accelerator: Accelerator) -> None:
    """Check every wish, and a forward and a backward pass in each precision."""
    supported = []
    for wish in DTYPES:
        precision = _granted(accelerator, wish)
        if precision:
            assert precision.name == wish, f"precision({wish!r}) gives {precision.name}, expected {wish} or a refusal"
            _check_values(precision)
            supported.append(precision)
    auto = accelerator.precision("auto")
    named = next((precision for precision in supported if precision.name == auto.name), None)
    assert named, f"precision('auto') gives {auto.name}, which precision({auto.name!r}) refuses"
    same = _values(auto) == _values(named)
    assert same, f"precision('auto') gives {_values(auto)}, but precision({auto.name!r}) {_values(named)}"
    assert _granted(accelerator, UNKNOWN) is None, f"precision({UNKNOWN!r}) is granted, expected an AcceleratorError"
    for precision in supported:
        _check_training(accelerator, precision)


def check_deterministic(accelerator: Accelerator) -> str:
    """Compare gradients of equal steps, unless the backend says what may differ; return this as a note."""
    try:
        remaining = accelerator.deterministic(True)
        is_text = isinstance(remaining, tuple) and all(isinstance(part, str) and part for part in remaining)
        assert is_text, f"deterministic(True) returns {remaining!r}, expected a tuple of reasons"
        steps = [_gradients(accelerator) for _ in range(3)]
    finally:
        accelerator.deterministic(False)
    differ = next((name for name in steps[0] if any(not torch.equal(steps[0][name], step[name]) for step in steps)), "")
    assert remaining or not differ, f"deterministic(True) names nothing, but the gradient of {differ} differs"
    left = torch.are_deterministic_algorithms_enabled()
    assert not left, "after deterministic(False), torch still refuses operators that are not deterministic"
    return f"may differ: {'; '.join(remaining)}" if remaining else ""


def _gradients(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """Return the gradients of one step of the tiny model, on the host."""
    precision = accelerator.precision()
    tokens, labels = (accelerator.to_device(tensor) for tensor in batch())
    network = model().to(accelerator.device(), precision.dtype)
    with precision.autocast():
        logits = network(tokens)
        nn.functional.cross_entropy(logits.float(), labels).backward()
    accelerator.step_boundary("check/backward")
    gradients = {name: weight.grad for name, weight in network.named_parameters()}
    return {name: gradient.cpu() for name, gradient in gradients.items() if gradient is not None}


def _check_offer(accelerator: Accelerator, operation: str, support: Support) -> None:
    kernels = accelerator.kernels
    try:
        kernel = kernels.get(operation)
        if kernels.capabilities()[operation].implementation == support.implementation:
            problem = _problem(accelerator, operation, kernel)
        else:  # usually its factory failed, and the next one was taken
            supports = kernels.candidates(operation)
            refusals = {candidate.name: refusal.reason for candidate, refusal in supports if not refusal.ok}
            problem = refusals.get(support.implementation, "kernels.get() returns another")
    except Exception as error:
        problem = f"its factory or its result failed ({type(error).__name__}: {error})"
    assert not problem, f"{operation} ({support.implementation}) is reported as supported, but {problem}"


def _problem(accelerator: Accelerator, operation: str, kernel: Any) -> str:
    """Return why a kernel cannot be used as OPERATIONS promises; "" if it can."""
    if operation in ("adamw", "adamw_cpu_offload"):
        device = "cpu" if operation == "adamw_cpu_offload" else accelerator.device()
        parameter = torch.nn.Parameter(torch.zeros(2, device=device))
        optimizer = kernel([parameter], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return f"it makes {optimizer!r}, expected a torch Optimizer"
    return ""


def _granted(accelerator: Accelerator, wish: str) -> Precision | None:
    """Return the precision; None if it is refused correctly."""
    try:
        return accelerator.precision(wish)
    except PluginError as error:
        raise AssertionError(f"precision({wish!r}) is neither granted nor refused: {error}") from error
    except AcceleratorError as error:
        refusal = str(error)
    assert wish in refusal, f"precision({wish!r}) is refused without naming it: {refusal}"
    return None


def _check_values(precision: Precision) -> None:
    what = f"precision({precision.name!r})"
    assert precision.reason, f"{what} has no reason"
    config = precision.deepspeed_config()
    json.dumps(config)
    enabled = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")]
    fitting = [] if precision.name == "fp32" else [precision.name]
    assert enabled == fitting, (
        f"{what}.deepspeed_config() enables {enabled or 'nothing'}, expected {fitting or 'nothing'}"
    )


def _values(precision: Precision) -> tuple[Any, ...]:
    return precision.dtype, precision.loss_scaling, precision.deepspeed_config()


def _check_training(accelerator: Accelerator, precision: Precision) -> None:
    """Compare logits and gradients with fp32 on the CPU."""
    tokens, labels = batch()
    results = []
    for device, dtype, context in (
        (torch.device("cpu"), torch.float32, Precision(torch.float32, "fp32", "reference").autocast()),
        (accelerator.device(), precision.dtype, precision.autocast()),
    ):
        network = model().to(device, dtype)
        with context:
            logits = network(tokens.to(device))
            loss = nn.functional.cross_entropy(logits.float(), labels.to(device))
        loss.backward()
        results.append((logits.detach(), next(network.parameters()).grad))
    for what, result, expected in zip(("logits", "gradient"), results[1], results[0]):
        assert torch.isfinite(result).all(), (
            f"{precision.name}: the {what} of a forward and backward pass are not finite"
        )
        assert_close(f"{precision.name}: the {what} of a forward and backward pass", result, expected, precision)
