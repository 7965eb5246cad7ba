"""Every operator that the stages use, as recorded from runs of all families, repeated on a device.

`operators.json` has the calls and `tolerances.json` the table of tolerances; `ci/operators.py` writes both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

PUBLISHED_EVERY = 100
"""Calls after which the operator that is reached is published, so that a crash of the device can be blamed on it."""


def compare_operations(accelerator: Accelerator) -> dict[str, Any]:
    """Check every implementation of every operation of a backend; see `operations.compare_operations`."""
    from accelerators.testing.numerics import operations

    return operations.compare_operations(accelerator)


def compare_operators(
    accelerator: Accelerator,
    publish: Callable[[dict[str, Any]], None] = lambda facts: None,
) -> dict[str, Any]:
    """Compare every recorded call on a device, forward and backward, with float64 on the CPU.

    Args:
        accelerator: the backend, its device bound.
        publish: called with facts about the operator that comes next.

    Returns:
        Facts for a report: counts, the first failure of each operator, and the worst cases. An operator that the device
        lacks is a failure.
    """
    from accelerators.testing.numerics import entries, errors, replay

    table = errors.read_table()
    granted = replay.grant_dtypes(accelerator)
    calls = [one for call in entries.iterate_calls() for one in replay.in_dtypes(call, granted)]
    comparisons: list[replay.Comparison] = []
    for number, call in enumerate(calls):
        if number % PUBLISHED_EVERY == 0:
            publish({"reached": f"call {number} of {len(calls)}, {call.operator}"})
        factor = table[call.operator][call.dtype()]
        comparisons += replay.compare_call(call, accelerator.device(), factor)
    return {
        "calls": len(calls),
        "dtypes": ["float32", *(str(dtype).removeprefix("torch.") for dtype in granted)],
        "seed": replay.SEED,
        "unit": errors.UNIT,
        **replay.summarize(comparisons),
        "tolerances": {operator: table[operator] for operator in sorted({one.operator for one in comparisons})},
    }
