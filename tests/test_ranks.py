"""Several processes on this machine: they end together, and the cause is reported, not its consequences."""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rlhf import ranks
from rlhf.errors import ConfigError
from rlhf.outcome import DEFECT, INTERRUPTED, USER, Outcome

HEAD = """
import os, sys, time
from rlhf.outcome import Outcome
from rlhf.errors import DataError
rank = os.environ["RANK"]
"""


@pytest.fixture(autouse=True)
def _logs_of_failed_ranks_go(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))


def start(script: str, count: int = 2) -> Outcome | None:
    return ranks.start(count, [sys.executable, "-c", HEAD + script])


def test_every_rank_finds_its_place(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    script = f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))"
    assert start(script) is None
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]


def test_an_error_of_all_ranks_is_reported_once() -> None:
    outcome = start("sys.exit(Outcome.of(DataError('no rows')).report())")
    assert outcome is not None
    assert (outcome.code, outcome.line) == (USER, "rlhf: error: no rows")


def test_the_cause_is_reported_and_not_what_it_brought_down() -> None:
    script = """
if rank == '0':
    sys.exit(Outcome.of(RuntimeError('connection closed by peer')).report())
time.sleep(0.5)
sys.exit(Outcome.of(DataError('no rows')).report())
"""
    outcome = start(script)
    assert outcome is not None
    assert outcome.line == "rlhf: error: no rows"


def test_a_rank_that_is_killed_ends_the_others() -> None:
    outcome = start("rank == '1' and os.kill(os.getpid(), 9)\ntime.sleep(60 if rank == '0' else 0)")
    assert outcome is not None
    assert outcome.code == DEFECT
    assert "rank 1 ended without a word (SIGKILL, often for lack of memory)" in outcome.line


def test_a_signal_is_passed_on_and_the_run_counts_as_interrupted(tmp_path: Path) -> None:
    script = f"""
try:
    open(f'{tmp_path}/{{rank}}', 'w'); time.sleep(60)
except KeyboardInterrupt as error:
    sys.exit(Outcome.of(error).report())
"""

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    outcome = start(script)
    assert outcome is not None
    assert outcome.code == INTERRUPTED


def test_ranks_are_started_unless_a_launcher_has_done_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert ranks.must_start(2)
    assert not ranks.must_start(1)
    assert not ranks.must_start(None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not ranks.must_start(2)
    with pytest.raises(ConfigError, match="a launcher has started 2 already"):
        ranks.must_start(4)
