"""Ranks that hang are named with what they do, their stacks are kept, and all end soon after the bound."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import rlhf
from rlhf.launchers.stacks import keep_stacks, write_stacks
from tests.forks import RANKS, Forks

BOUND, LIMIT = 2, 30
"""Seconds of engine.timeout, and in which all ranks end after it."""

SCRIPT = """
import os, re, signal, sys, time
import accelerators, torch, torch.distributed as dist
from rlhf.engine import distributed
from rlhf.launchers import coordinator, rank_monitor
from rlhf.launchers.exit_status import ExitStatus
from rlhf.launchers.stacks import keep_stacks
from rlhf.utils.activity import activity
from rlhf.utils.process_info import current_process
coordinator._SECONDS_TO_DESCRIBE, coordinator._SECONDS_OF_SILENCE = 0.5, 2.0
coordinator._SECONDS_TO_NAME_HANGING, rank_monitor._SECONDS_TO_LEAVE = 1.0, 1.0
rank = current_process().rank

def loop():
    while True:
        pass

def hold_the_lock():
    re.match("(a+)+$", "a" * 64 + "b")

try:
    with distributed.start_process_group(accelerators.select("cpu", environ={{}}), timeout={bound}):
        with keep_stacks(__import__("pathlib").Path({folder!r}), rank):
            activity.stage, activity.step, activity.phase = "ppo", 12, "scoring"
            distributed.all_sum(torch.ones(1))
            {fault}
            distributed.all_sum(torch.ones(1))
except BaseException as error:
    sys.exit(ExitStatus.from_error(error).report())
"""


def run(forks: Forks, folder: Path, fault: str, limit: float = BOUND + LIMIT) -> str:
    """Return the error line of two ranks, which end in time."""
    script = SCRIPT.format(fault=fault, folder=str(folder), bound=BOUND)
    done = forks.python("-c", RANKS, "2", script, timeout=limit + 10, cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "function"),
    [
        pytest.param("loop() if rank else None", "loop", id="loops"),
        pytest.param("hold_the_lock() if rank else None", "hold_the_lock", id="holds the lock", marks=pytest.mark.slow),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP) if rank else None", "", id="is stopped", marks=pytest.mark.slow
        ),
    ],
)
def test_rank_that_hangs_is_named_and_its_stack_kept(forks: Forks, tmp_path: Path, fault: str, function: str) -> None:
    start = time.monotonic()
    line = run(forks, tmp_path, fault)
    print(f"all ended {time.monotonic() - start - BOUND:.1f} s after the bound")
    assert re.match(
        rf"rlhf: error: rank 1 on \S+ hangs.*: the others waited for it for {BOUND} s \(engine.timeout\); ", line
    )
    assert line.endswith("; the stacks of ranks are in the run's folder, in stacks")
    waiting = (tmp_path / "stacks" / "rank0.txt").read_text()
    assert "all_sum" in waiting and "rlhf/engine/distributed.py" in waiting
    if function:  # a stopped process runs nothing
        assert f" in {function}\n" in (tmp_path / "stacks" / "rank1.txt").read_text()
    if function == "loop":
        assert "hangs at ppo step 12, scoring" in line


@pytest.mark.slow
def test_rank_0_that_hangs_ends_the_others(forks: Forks, tmp_path: Path) -> None:
    line = run(forks, tmp_path, "None if rank else os.kill(os.getpid(), signal.SIGSTOP)")
    assert re.match(r"rlhf: error: rank 0 on \S+ does not answer", line)
    assert "all_sum" in (tmp_path / "stacks" / "rank1.txt").read_text()


@pytest.mark.slow
def test_ranks_in_different_collectives_are_both_named(forks: Forks, tmp_path: Path) -> None:
    """As if DeepSpeed's were called by two files of rlhf; torch's own timeout ends them, 20 s after the bound."""
    file = str(Path(rlhf.__file__).with_name("file"))
    fault = f"exec(compile('dist.recv(torch.ones(1), src=1 - rank)', {file!r} + f'{{rank}}.py', 'exec'))"
    line = run(forks, tmp_path, fault, BOUND + 20 + LIMIT)
    places = [rf"rank {rank} on \S+ at ppo step 12, scoring, rlhf/file{rank}\.py:1 \(<module>\)" for rank in range(2)]
    message = (
        rf"the ranks waited for each other for {BOUND} s \(engine\.timeout\): {places[0]}; {places[1]}; the stacks"
    )
    assert re.search(message, line), line


def test_nothing_stays_of_a_run_that_does_not_hang(tmp_path: Path) -> None:
    with keep_stacks(tmp_path, 0):
        assert (tmp_path / "stacks" / "rank0.txt").exists()
    assert not (tmp_path / "stacks").exists()
    with keep_stacks(tmp_path, 0):
        write_stacks()
    assert "test_nothing_stays" in (tmp_path / "stacks" / "rank0.txt").read_text()
