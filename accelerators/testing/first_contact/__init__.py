"""Comparisons of a device with the CPU, for its first hour (`rlhf accelerators certify`).

They overlap with the conformance kit, and use sizes, lengths and operators of real training: a vendor's operator may be
right for a small matrix and wrong for a large one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

COMPARISONS = ("product", "attention", "indexing")


def compare_with_cpu(comparison: str, accelerator: Accelerator, *, full: bool) -> dict[str, Any]:
    """Compare the bound device with the CPU.

    Args:
        comparison: one of `COMPARISONS`.
        accelerator: the backend, with its device bound.
        full: with the sizes of real models; otherwise in a second on a CPU.

    Returns:
        Facts for a report, as JSON has them.

    Raises:
        AssertionError: the device's numbers differ; the message is one line.
    """
    facts: dict[str, Any] = importlib.import_module(f"{__name__}.{comparison}").compare(accelerator, full=full)
    return facts
