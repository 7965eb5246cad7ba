"""Every implementation of an operation, not only the best one, through the checks of the conformance kit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from accelerators.errors import describe_error
from accelerators.testing.checks import CHECKS, Check
from accelerators.types import AUTO, OPERATIONS

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

NAMES = {"adamw_cpu_offload": "offload", "graph_capture": "capture"}
"""Checks of the kit whose names are not those of their operations."""


def find_check(operation: str) -> Check:
    """Return the kit's check of an operation, which compares it with plain PyTorch on the CPU."""
    name = NAMES.get(operation, operation.replace("_", "-"))
    return next(check for check in CHECKS if check.name == name)


def compare_operations(accelerator: Accelerator) -> dict[str, Any]:
    """Choose each implementation that a device can use, one after the other, and check it.

    Returns:
        `implementations`, each with its result, and `failures`, as those of operators.
    """
    subject: Any = SimpleNamespace(accelerator=accelerator)
    results, failures = [], []
    for operation in OPERATIONS:
        check = find_check(operation)
        for name in [implementation.name for implementation, _ in accelerator.kernels.usable(operation)]:
            accelerator.kernels.choose(operation, name)
            try:
                result, note = "passed", check.run(subject)
            except SkipTest as skipped:
                result, note = "skipped", str(skipped)
            except Exception as error:
                result = "failed"
                note = str(error) if isinstance(error, AssertionError) else describe_error(error)
                failures.append({"operator": f"{operation}: {name}", "failure": f"{operation} by {name}: {note}"})
            finally:
                accelerator.kernels.choose(operation, AUTO)
            results.append({"operation": operation, "implementation": name, "result": result, "note": note})
    return {"implementations": results, "failures": failures}
