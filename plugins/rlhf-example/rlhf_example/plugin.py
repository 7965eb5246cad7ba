"""The entry point. It must not import torch: rlhf loads it before it chooses a backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from accelerators import AcceleratorSpec, Probe, hookimpl


def probe() -> Probe:
    """Look for the device in its driver's files or with its vendor's command-line tool, without opening it."""
    return Probe(ok=True, reason="this device needs no hardware", count=1, model="Example One")


def environment(run: Mapping[str, Any]) -> dict[str, str]:
    """Return variables that must be set before torch is imported; values that the user has set take precedence."""
    return {
        "DS_ACCELERATOR": "cpu",  # so that DeepSpeed does not search for a device before it is given ours
        "RLHF_EXAMPLE_THREADS": str(os.cpu_count() or 1),
    }


@hookimpl
def rlhf_accelerators() -> Iterable[AcceleratorSpec]:
    """Offer the backend."""
    return [
        AcceleratorSpec(
            name="example",
            api_version=3,
            factory="rlhf_example.backend:Example",
            probe=probe,
            env=environment,
            priority=-10,  # below the CPU: `auto` never takes it. A real device has at least 50.
        )
    ]
