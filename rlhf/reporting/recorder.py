"""Permanent records of a stage: `metrics.jsonl` for programs, TensorBoard events for people.

Metrics and texts of steps flow in; each is on disk before the call returns, so that a crash loses none.
"""

from __future__ import annotations

import json
import math
import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from rlhf.utils.atomic_io import PARTIAL

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from rlhf.runs.stage_directory import StageDirectory


class Recorder:
    """Writer of one stage's records; a context manager.

    Args:
        directory: the stage's folder.
        enabled: True on the one rank that writes; calls on other ranks do nothing.
        resume_step: the step of the checkpoint that training continues from; records of later steps are dropped, as
            they will be written again. None drops all records. Nothing is dropped before the first new record, so a
            stage that fails to start keeps the records of its folder.
    """

    def __init__(self, directory: StageDirectory, *, enabled: bool = True, resume_step: int | None = None) -> None:
        self._directory, self._stage = directory, directory.name
        self._enabled, self._resume_step = enabled, resume_step
        self._open: tuple[TextIO, SummaryWriter] | None = None
        if enabled:
            directory.path.mkdir(parents=True, exist_ok=True)

    def _files(self) -> tuple[TextIO, SummaryWriter]:
        """Return the two files, which are opened at the first record."""
        if self._open is not None:
            return self._open
        from torch.utils.tensorboard import SummaryWriter

        directory, resume_step = self._directory, self._resume_step
        records = _read_records_until(directory, resume_step) if resume_step is not None else []
        _replace_lines(directory, records)
        purge_step = None if resume_step is None else resume_step + 1
        if resume_step is None:
            for events in directory.tensorboard.glob("events.out.tfevents.*"):
                events.unlink()
        file = directory.metrics.open("a", encoding="utf-8")
        self._open = file, SummaryWriter(str(directory.tensorboard), purge_step=purge_step)
        return self._open

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of one step; a number that is not finite is recorded as null."""
        if not self._enabled:
            return
        self._write(step, {name: value if math.isfinite(value) else None for name, value in metrics.items()})
        _, events = self._files()
        for name, value in metrics.items():
            events.add_scalar(f"{self._stage}/{name}", value, step)
        events.flush()

    def text(self, tag: str, step: int, text: str) -> None:
        """Record a text of one step, for example a sample completion."""
        if not self._enabled:
            return
        self._write(step, {"tag": tag, "text": text})
        # TensorBoard renders Markdown; an indented block shows the text literally.
        _, events = self._files()
        events.add_text(f"{self._stage}/{tag}", "".join(f"    {line}\n" for line in text.splitlines()), step)
        events.flush()

    def close(self) -> None:
        """Close both files."""
        for file in self._open or ():
            file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        record = {"stage": self._stage, "step": step, "time": round(time.time(), 3), **values}
        file, _ = self._files()
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()


def _read_records_until(directory: StageDirectory, step: int) -> list[bytes]:
    """Return lines of the steps up to `step`, without evaluations at that step, which will be repeated.

    A last line that a crash cut short is dropped, also if it ends within a character.
    """
    try:
        lines = directory.metrics.read_bytes().split(b"\n")  # str.splitlines would split at other characters too
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        is_evaluation = any(key.startswith("heldout_") for key in (*record, record.get("tag", "")))
        if record["step"] < step or (record["step"] == step and not is_evaluation):
            records.append(line + b"\n")
    return records


def _replace_lines(directory: StageDirectory, lines: list[bytes]) -> None:
    temporary = directory.metrics.with_name(directory.metrics.name + PARTIAL)
    temporary.write_bytes(b"".join(lines))
    os.replace(temporary, directory.metrics)
