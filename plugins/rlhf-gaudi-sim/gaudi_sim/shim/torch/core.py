"""Step boundaries of lazy mode."""

import sys

from gaudi_sim import accounting

from . import hpu

__all__ = ["hpu", "mark_step"]


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End the graph that was collected since the last call; nothing in eager mode.

    Where the caller has a local variable `tag`, as rlhf's `step_boundary(tag)` does, the graph goes by that name.
    """
    if accounting.is_lazy():
        tag = sys._getframe(1).f_locals.get("tag")
        accounting.accounts().boundary(tag if isinstance(tag, str) else "mark_step")
