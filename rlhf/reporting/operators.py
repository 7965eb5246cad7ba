"""Where the time of a step went, operator by operator, from what torch's profiler recorded of it.

Events flow in; rows of (operator, phase) with their own time flow out. Where a device works beside the processor, its
kernels are the rows, as the processor's time is then only that of handing them over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rlhf.reporting.timers import OTHER

PREFIX, STEP = "rlhf/", "rlhf/step"


class Operator(NamedTuple):
    """An operator, or a kernel of the device, in one phase: its own seconds, without those of what it calls."""

    name: str
    phase: str
    seconds: float
    calls: int


class Found(NamedTuple):
    """`seconds` of the step that was recorded, its operators, longest first, and what no operator ran in."""

    seconds: float
    operators: list[Operator]
    idle: float
    on_device: bool


def found_in(events: Iterable[Any]) -> Found:
    """The operators of one step.

    Args:
        events: of `torch.profiler.profile.events()`, times in microseconds, with the ranges of `Phases`.
    """
    known = list(events)
    host = [event for event in known if event.device_type.name == "CPU"]  # others are kernels of the device
    device = [event for event in known if event.device_type.name != "CPU"]
    ranges = [event for event in host if event.name.startswith(PREFIX)]
    (step,) = (event.time_range for event in ranges if event.name == STEP)
    phases = [(event.name.removeprefix(PREFIX), event.time_range) for event in ranges if event.name != STEP]
    seconds, calls = dict[tuple[str, str], float](), dict[tuple[str, str], int]()
    for event in device or host:
        begun = event.time_range.start
        if event.name.startswith(PREFIX) or event.is_user_annotation or not step.start <= begun <= step.end:
            continue
        # A phase ends when the device is done, so what begins within it belongs to it, on whatever thread or stream.
        key = event.name, next((name for name, span in phases if span.start <= begun <= span.end), OTHER)
        own = event.self_device_time_total if device else event.self_cpu_time_total
        seconds[key] = seconds.get(key, 0.0) + own / 1e6
        calls[key] = calls.get(key, 0) + 1
    operators = [Operator(*key, seconds[key], calls[key]) for key in sorted(seconds, key=seconds.__getitem__)[::-1]]
    whole = (step.end - step.start) / 1e6
    return Found(whole, operators, max(whole - sum(seconds.values()), 0.0), bool(device))
