"""Progress: a live line on a terminal, few plain lines elsewhere, silence on other ranks."""

import hashlib
import io
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf.reporting import progress as module
from rlhf.reporting.console import Terminal
from rlhf.reporting.progress import progress, show_hashing
from rlhf.utils import manifest, signals
from tests.forks import Forks


class Clock:
    """Time that only a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    output = io.StringIO()
    monkeypatch.setattr(module, "console", Terminal(file=output, force_terminal=False))
    return output


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    output = io.StringIO()
    monkeypatch.setattr(module, "console", Terminal(file=output, force_terminal=True, width=100, color_system=None))
    yield output
    assert module.console.display is None, "a display was left open"


def lines_of(terminal: io.StringIO) -> list[str]:
    """The text that was written, without the codes that move the cursor."""
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n")
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_plain_output_has_a_line_every_ten_seconds(plain: io.StringIO, clock: Clock) -> None:
    with progress(60, "ppo", unit="steps") as bar:
        for _ in range(60):
            clock.now += 1
            bar.advance(1, kl=0.25)
    first, second, *_, last = lines = plain.getvalue().splitlines()
    assert len(lines) == 1 + 5 + 1
    assert first == "ppo: 60 steps"
    assert second == "ppo: 10/60 steps  17%  1 steps/s  50 s left  kl 0.25"
    assert last == "ppo: 60/60 steps  100%  1 steps/s  1:00 in total  kl 0.25"


def test_single_unit_is_singular(plain: io.StringIO, clock: Clock) -> None:
    with progress(1, "ppo", unit="steps") as bar:
        bar.advance(1)
    assert plain.getvalue().splitlines()[0] == "ppo: 1 step"


def test_line_shows_the_time_of_later_stages(plain: io.StringIO, clock: Clock) -> None:
    with progress(60, "sft", unit="steps", later=120) as bar:
        for _ in range(15):
            clock.now += 2
            bar.advance(1)
    lines = plain.getvalue().splitlines()
    assert lines[1].endswith("1:50 left, ~5:50 for all stages")  # 55 and 175 steps of 2 s
    assert lines[-1].endswith("in total")


@pytest.mark.parametrize("width", [60, 100])
def test_narrow_terminal_shows_no_time_of_later_stages(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, width: int
) -> None:
    output = io.StringIO()
    terminal = Terminal(file=output, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(module, "console", terminal)
    with progress(60, "sft", unit="steps", later=120) as bar:
        bar.advance(15)
        terminal.display.refresh()  # type: ignore[union-attr]
    assert any(" left" in line for line in lines_of(output))
    assert any("for all stages" in line for line in lines_of(output)) == (width > 75)


RUN = """
import sys
from rlhf.config.schema import load_config
from rlhf.reporting import progress
from rlhf.trainers.run import run

progress._SECONDS_BETWEEN_LINES = 0
settings = [f"output={sys.argv[2]}", "sft.max_steps=3", "reward.max_steps=3"]
run(load_config(sys.argv[1], settings), stages=("sft", "reward"), accelerator="cpu")
"""


@pytest.mark.slow
def test_run_shows_the_time_of_the_stages_to_come(rlhf: Any, forks: Forks, tmp_path: Path) -> None:
    done = forks.python("-c", RUN, str(rlhf.recipe), str(tmp_path / "run"), timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "training: " in line and " left" in line]
    assert {line.partition(":")[0]: "for all stages" in line for line in lines} == {"sft": True, "reward": False}


def test_slow_work_shows_seconds_per_unit(plain: io.StringIO, clock: Clock) -> None:
    with progress(2, "ppo", unit="steps") as bar:
        clock.now += 24
        bar.advance(2)
    assert "12.0 s/step" in plain.getvalue()


def test_failed_work_prints_no_last_line(plain: io.StringIO) -> None:
    with pytest.raises(KeyError), progress(2, "ppo"):
        raise KeyError
    assert plain.getvalue().splitlines() == ["ppo: 2 rows"]


def test_other_ranks_are_silent(plain: io.StringIO) -> None:
    with progress(10, "sft", enabled=False) as bar:
        bar.advance(10, loss=1.0)
    assert plain.getvalue() == ""


def test_terminal_shows_count_rate_and_metrics(terminal: io.StringIO) -> None:
    with progress(10, "sft", unit="rows") as bar:
        bar.advance(10, loss=1.25)
    last = lines_of(terminal)[-1]
    assert all(text in last for text in ("10/10", "rows/s", "in total", "loss 1.25"))


def test_bars_nest_and_keep_printed_lines(terminal: io.StringIO) -> None:
    with progress(2, "outer") as outer:
        with progress(3, "inner") as inner:
            inner.advance(3)
            module.console.print("another line")
        outer.advance(2)
    lines = lines_of(terminal)
    assert "another line" in lines
    assert "outer" in lines[-1]
    assert "inner" not in lines[-1]


def test_hashing_is_shown_if_it_takes_long(plain: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_SECONDS_TO_SETTLE", 0.0)
    contents = {"large": b"a" * (5 * 2**19), "small": b"b" * 2**20}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in contents]
    with show_hashing():
        manifest.hash_files(paths[1:])
        assert not plain.getvalue()
        monkeypatch.setattr(manifest, "_LONG", 3)
        digests = [manifest.hash_files(paths) for _ in range(2)]  # the second time, nothing is read
    first, last = plain.getvalue().splitlines()
    assert first == f"hashing {tmp_path}: 3 MiB" and last.startswith(f"hashing {tmp_path}: 3/3 MiB  100%")
    assert digests[0] == digests[1] == [hashlib.sha256(content).hexdigest() for content in contents.values()]


def test_bar_ends_work_if_a_signal_was_swallowed(plain: io.StringIO) -> None:
    with signals.interrupt_on_signals():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), progress(3, "reading") as bar:
            bar.advance()
