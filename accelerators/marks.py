"""Marks in time, between which a device's work is measured: on the host's clock, or by events in the device's queue."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in the work of a device."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark of the same backend to this one; it may wait for the device."""


class HostMark:
    """The present time of the host, after a wait for the device."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_since(self, earlier: HostMark) -> float:
        """Return the difference on the host's clock."""
        return self._time - earlier._time


class EventMark:
    """An event in the current queue of a device that torch knows; nothing waits until it is read."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device, enable_timing=True)
        self._event.record()

    def seconds_since(self, earlier: EventMark) -> float:
        """Return the time that the device took between the two events."""
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000
