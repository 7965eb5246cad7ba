"""The template of interface 1, as it was: the entry point."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from accelerators import AcceleratorSpec, Probe, hookimpl


def probe() -> Probe:
    """Look for the device without opening it: at its driver's files, or with its vendor's command-line tool."""
    return Probe(ok=True, reason="this device needs no hardware", count=1, model="Example One")


def environment(run: Mapping[str, Any]) -> dict[str, str]:
    """What must be set before torch is imported; the user's own values win."""
    return {
        "DS_ACCELERATOR": "cpu",  # so that DeepSpeed does not search for a device before it is given ours
        "RLHF_EXAMPLE_THREADS": str(os.cpu_count() or 1),
    }


@hookimpl
def rlhf_accelerators() -> Iterable[AcceleratorSpec]:
    return [
        AcceleratorSpec(
            name="interface-1",
            api_version=1,
            factory="rlhf_interface1_backend:Example",
            probe=probe,
            env=environment,
            priority=-10,  # below the CPU: `auto` never takes it. A real device has at least 50.
        )
    ]
