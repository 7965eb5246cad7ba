"""Checks of a backend's description of itself: types, operations and shape policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accelerators.shapes import ShapePolicy
from accelerators.types import OPERATIONS, DeviceInfo, KernelImpl, Memory, Support

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

RETURNS: Mapping[str, type | tuple[type, ...]] = {
    "device": torch.device,
    "info": DeviceInfo,
    "is_lazy": bool,
    "compilations": (int, type(None)),
    "kernel_implementations": Iterable,
    "shape_policy": ShapePolicy,
    "host_device": torch.device,
    "pins_memory": bool,
    "memory": Memory,
    "rng_state": dict,
    "dist_backend": str,
    "synchronize": type(None),
    "reset_peak": type(None),
    "empty_cache": type(None),
}
"""Methods without arguments, and the types of their results."""


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


def _check_offer(accelerator: Accelerator, operation: str, support: Support) -> None:
    try:
        kernel = accelerator.kernels.get(operation)
        now = accelerator.kernels.capabilities()[operation]
        replaced = now.implementation != support.implementation  # its factory failed, and the next one was taken
        problem = _refusal(accelerator, operation, support) if replaced else _problem(accelerator, operation, kernel)
    except Exception as error:
        problem = f"its factory or its result failed ({type(error).__name__}: {error})"
    assert not problem, f"{operation} ({support.implementation}) is reported as supported, but {problem}"


def _refusal(accelerator: Accelerator, operation: str, support: Support) -> str:
    """Return why the implementation that was reported as supported is refused now."""
    candidates = accelerator.kernels.candidates(operation)
    refusals = {candidate.name: refusal.reason for candidate, refusal in candidates if not refusal.ok}
    return refusals.get(support.implementation, "kernels.get() returns another")


def _problem(accelerator: Accelerator, operation: str, kernel: Any) -> str:
    """Return why a kernel cannot be used as OPERATIONS promises; "" if it can."""
    if operation in ("adamw", "adamw_cpu_offload"):
        device = "cpu" if operation == "adamw_cpu_offload" else accelerator.device()
        parameter = torch.nn.Parameter(torch.zeros(2, device=device))
        optimizer = kernel([parameter], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return f"it makes {optimizer!r}, expected a torch Optimizer"
    return ""
