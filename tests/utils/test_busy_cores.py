"""A note if other programs use the cores."""

from __future__ import annotations

import os

import pytest

from rlhf.utils.busy_cores import describe_busy_cores


@pytest.mark.parametrize(
    ("load", "threads", "noted"), [(3.0, 4, True), (1.9, 4, False), (3.0, 1, False), (90.0, 4, True), (0.0, 4, False)]
)
def test_note_needs_load_and_several_threads(
    monkeypatch: pytest.MonkeyPatch, load: float, threads: int, noted: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    line = describe_busy_cores(threads)
    assert (line is not None) == noted
    if line:
        assert f"about {min(load, 4):.1f} of 4 cores" in line and "OMP_NUM_THREADS=1" in line
