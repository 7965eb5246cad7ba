"""Detect that other programs use the cores on which a run is about to compute."""

from __future__ import annotations

import os

_BUSY = 0.5  # of the cores, on average over the last minute


def describe_busy_cores(threads: int) -> str | None:
    """Return a note if other programs use the cores; None if they do not, or this process computes in one thread.

    OpenMP threads wait for each other at the end of every loop: if one has no core, all wait until it gets one.

    Args:
        threads: those of one operation of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    if threads < 2 or load < _BUSY * cores:
        return None
    return (
        f"other programs keep about {min(load, cores):.1f} of {cores} cores busy, and the threads of this run wait for "
        "one another, so a step may take ten times as long; let them end, or set OMP_NUM_THREADS=1"
    )
