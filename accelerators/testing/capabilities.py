"""Checks of what a backend says of itself: its operations and its shape policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accelerators.shapes import ShapePolicy
from accelerators.types import OPERATIONS, AcceleratorError, Support

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator


def check_operations(accelerator: Accelerator) -> None:
    """Every operation is reported, and `kernel` gives what the report says."""
    capabilities = accelerator.capabilities()
    missing = [operation for operation in OPERATIONS if operation not in capabilities]
    assert not missing, f"capabilities() lacks {', '.join(missing)}; expected every operation of OPERATIONS"
    for operation, support in capabilities.items():
        if support.ok:
            _check_offer(accelerator, operation, support)
        else:
            _check_refusal(accelerator, operation, support)


def check_shapes(accelerator: Accelerator) -> None:
    """The policy's buckets and lengths, over small, large and odd lengths."""
    policy = accelerator.shape_policy()
    assert isinstance(policy, ShapePolicy), f"shape_policy() gives {policy!r}, expected a ShapePolicy"
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
    assert support.implementation, f"{operation} is supported, but its Support names no implementation"
    what = f"{operation} ({support.implementation})"
    try:
        kernel = accelerator.kernel(operation)
        now = accelerator.capabilities()[operation]
        replaced = now.implementation != support.implementation  # its factory failed, and the next one was taken
        problem = _refusal(accelerator, operation, support) if replaced else _problem(accelerator, operation, kernel)
    except Exception as error:
        problem = f"its factory or what it made failed ({type(error).__name__}: {error})"
    assert not problem, f"{what} is reported as supported, but {problem}"


def _refusal(accelerator: Accelerator, operation: str, support: Support) -> str:
    """What is now said against the implementation that was reported as supported."""
    found = {impl.name: refused.reason for impl, refused in accelerator.candidates(operation) if not refused.ok}
    return found.get(support.implementation, "kernel() gives another")


def _problem(accelerator: Accelerator, operation: str, kernel: Any) -> str:
    """Why a kernel cannot be used as `Accelerator.kernel` promises; empty where it can."""
    if kernel is None:
        return "kernel() gives None"
    if operation in ("adamw", "adamw_cpu_offload"):
        device = "cpu" if operation == "adamw_cpu_offload" else accelerator.device()
        made = kernel(
            [torch.nn.Parameter(torch.zeros(2, device=device))], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        return "" if isinstance(made, torch.optim.Optimizer) else f"it makes {made!r}, expected a torch Optimizer"
    return ""


def _check_refusal(accelerator: Accelerator, operation: str, support: Support) -> None:
    assert support.reason, f"{operation} is refused without a reason; expected one"
    kernel = accelerator.kernel(operation)
    assert kernel is None, f"{operation} is refused ({support.reason}), but kernel() gives {kernel!r}, expected None"
    what = f"kernel({operation!r}, required=True)"
    try:
        accelerator.kernel(operation, required=True)
    except AcceleratorError as error:
        refusal = str(error)
    else:
        raise AssertionError(f"{what} gives something, while capabilities() refuses it ({support.reason})")
    assert support.reason in refusal, f"{what} says {refusal!r}, expected the reason: {support.reason}"
