"""Every implementation of an operation, not only the best one, through the checks of the conformance kit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from accelerators.errors import describe_error
from accelerators.testing.checks import CHECKS
from accelerators.types import AUTO, OPERATIONS

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

CHECK_OF = {
    "adamw": "adamw",
    "adamw_cpu_offload": "offload",
    "clip_grad_norm": "clip-grad-norm",
    "attention": "attention",
    "graph_capture": "capture",
    "quantized_weights": "quantized-weights",
    "inference_weights": "inference-weights",
    "fused_layers": "fused-layers",
}
"""The kit's check of each operation; they compare it with plain PyTorch on the CPU."""


def compare_operations(accelerator: Accelerator) -> dict[str, Any]:
    """Choose each implementation that a device can use, one after the other, and check it.

    Returns:
        `implementations`, each with its result, and `failures`, as those of operators.
    """
    subject: Any = SimpleNamespace(accelerator=accelerator)
    results, failures = [], []
    for operation in OPERATIONS:
        (check,) = (check for check in CHECKS if check.name == CHECK_OF[operation])
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
