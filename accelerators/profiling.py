"""What torch's profiler recorded of a device, told apart from what it recorded of the processor that feeds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def on_host_and_device(events: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The profiler's events that the processor took part in, and the kernels of a device beside it."""
    known = list(events)
    host = [event for event in known if event.device_type.name == "CPU"]
    return host, [event for event in known if event.device_type.name != "CPU"]
