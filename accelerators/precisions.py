"""The choice among the precisions that a device supports."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accelerators.errors import AcceleratorError
from accelerators.types import AUTO, Precision, Support

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_precision(backend: str, wish: str, supports: Mapping[str, Support]) -> Precision:
    """Return the wished precision, or the first one that the device supports; fp16 with loss scaling.

    Args:
        backend: name of the backend, for messages.
        wish: auto, or a precision.
        supports: what the device supports of bf16, fp16 and fp32, the best first, each with a reason either way.

    Raises:
        AcceleratorError: it does not support `wish`; the message has the reason and the precisions that it supports.
    """
    granted = [name for name, support in supports.items() if support]
    if wish == AUTO:
        name = granted[0]
        refused = [f"{other}: {support.reason}" for other, support in supports.items() if not support]
        reason = "; ".join([supports[name].reason, *refused])
    elif wish not in supports:
        *others, last = ["auto", *supports]
        raise AcceleratorError(f"precision {wish!r}: not known; use {', '.join(others)} or {last}")
    elif supports[wish]:
        name, reason = wish, f"asked for; {supports[wish].reason}"
    else:
        *others, last = ["auto", *granted]
        refusal = f"precision {wish} on {backend}: {supports[wish].reason}"
        raise AcceleratorError(f"{refusal}; use {', '.join(others)} or {last}")
    return Precision(_DTYPES[name], name, reason, loss_scaling=name == "fp16")


def holds_float64(device: torch.device) -> bool:
    """Return whether a device can hold numbers in float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True
