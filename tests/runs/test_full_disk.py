"""A run whose disk is full waits for room and continues by itself; without room it ends, and can be resumed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf.reporting.recorder import Recorder
from rlhf.runs.stage_directory import StageDirectory
from rlhf.utils.atomic_io import open_no_link
from rlhf.utils.full_disk import wait_for_room
from rlhf.utils.jsonl import read_records
from tests.forks import ForkedProcess, Forks
from tests.helpers import assert_same_weights, sets, small_disk

SETTINGS = sets(
    "sft.max_steps=4",
    "sft.checkpoint_every=2",
    "sft.batch_size=8",
    "data.heldout_fraction=0.002",
)
CHECKPOINT = 22 * 2**20  # bytes of the embedded model's


def fill(disk: Path, *, leave: int) -> Path:
    """Fill a disk up to some bytes, and return the file that takes the room."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - leave)
    return filler


def wait_for_line(process: ForkedProcess, words: str, seconds: float = 240) -> str:
    """Return the first line of the output with these words, as soon as it is there."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        for line in (process._folder / "stdout").read_text().splitlines():
            if words in line:
                return line
        time.sleep(0.1)
    raise AssertionError(f"{words!r} is not in the output: {process.communicate()}")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_waits_for_room_and_continues_by_itself(forks: Forks, tmp_path: Path, ranks: int) -> None:
    command = ["sft", *SETTINGS, "--ranks", str(ranks)]
    with small_disk(tmp_path / "disk", mebibytes=60) as disk:
        filler = fill(disk, leave=CHECKPOINT // 2)
        process = forks.start("-m", "rlhf", *command, "--output", str(disk / "run"))
        line = wait_for_line(process, "make room")
        assert re.fullmatch(
            rf"{disk}/run/sft/checkpoints/step-00000002.partial/model/rank0.safetensors: the disk is full: \d+ MiB "
            r"more are needed, and [\d.]+ [KM]iB are free; make room within 600 s \(engine.disk_wait\), and the run "
            "continues by itself",
            line,
        )
        filler.unlink()
        assert process.wait(240) == 0, process.communicate()
        assert "there is room again after" in process.communicate()[0]
        done = forks.run(*command, "--output", str(tmp_path / "other"), timeout=240)
        assert done.returncode == 0, done.stderr
        assert_same_weights(disk / "run" / "sft" / "model", tmp_path / "other" / "sft" / "model")


@pytest.mark.parametrize("seconds", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_run_without_room_ends_and_can_be_resumed(forks: Forks, tmp_path: Path, seconds: int) -> None:
    with small_disk(tmp_path / "disk", mebibytes=60) as disk:
        filler, run = fill(disk, leave=CHECKPOINT // 2), disk / "run"
        command = ["sft", *SETTINGS, "--output", str(run), "--set", f"engine.disk_wait={seconds}"]
        ended = forks.run(*command, timeout=240)
        assert ended.returncode == 2
        assert ("make room within 1 s" in ended.stdout) == (seconds > 0)
        remedy = f"make room, then run: rlhf sft --output {run} --resume"
        assert ended.stderr.endswith(f"No space left on device; {remedy}\n")
        filler.unlink()
        assert forks.run("sft", "--output", str(run), "--resume", timeout=240).returncode == 0


def test_signal_ends_the_wait(forks: Forks, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", mebibytes=60) as disk:
        fill(disk, leave=CHECKPOINT // 2)
        process = forks.start("-m", "rlhf", "sft", *SETTINGS, "--output", str(disk / "run"))
        wait_for_line(process, "make room")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 2
        assert "No space left on device; make room, then run: rlhf" in process.communicate()[1]


@contextmanager
def full_disk(folder: Path, *, leave: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield a disk that has room once a write has waited, and the lines that were told."""
    lines: list[str] = []
    with small_disk(folder, mebibytes=4) as disk:
        filler = fill(disk, leave=leave)

        def make_room(line: str) -> None:
            lines.append(line)
            filler.unlink(missing_ok=True)

        with wait_for_room(60, make_room):
            yield disk, lines


def test_text_continues_at_the_byte_at_which_the_disk_was_full(tmp_path: Path) -> None:
    text = "".join(f"line {number} é\n" for number in range(100_000))
    with full_disk(tmp_path / "disk", leave=200_000) as (disk, lines):
        with open_no_link(disk / "text", "w") as file:
            file.write(text)
        assert (disk / "text").read_text() == text
    assert "make room" in lines[0] and "there is room again" in lines[1] and len(lines) == 2


def test_records_wait_for_room_and_none_is_lost(tmp_path: Path) -> None:
    """TensorBoard's writer cannot be used after an error; another one continues."""
    with full_disk(tmp_path / "disk", leave=40_000) as (disk, lines):
        directory = StageDirectory(disk / "sft", "sft")
        with Recorder(directory) as recorder:
            for step in range(1, 201):
                recorder.log(step, {"loss": step / 7, "reward": 0.5} | {f"key_{number}": 1.0 for number in range(20)})
        records = list(read_records(directory.metrics))
        events = EventAccumulator(str(directory.tensorboard)).Reload()
    assert lines and "make room" in lines[0] and "there is room again" in lines[1]
    assert [record["loss"] for record in records] == [step / 7 for step in range(1, 201)]
    steps = {event.step for event in events.Scalars("sft/loss")}
    assert steps == set(range(1, 201))
