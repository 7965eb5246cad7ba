"""Records of a stage that stay: `metrics.jsonl` for programs, TensorBoard events for eyes.

Steps with named numbers or texts flow in; each is on disk before the call returns, so a crash loses none.
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
    """Writes one stage's records; a context manager.

    Args:
        directory: the stage's folder.
        enabled: True on the one rank that writes; the others' calls do nothing.
        resume_step: the step of the checkpoint that training continues from; records of later steps are
            dropped, for they will come again. None starts the records anew. Neither happens before there is
            something to record: a stage that cannot start leaves the records as they were.
    """

    def __init__(self, directory: StageDirectory, *, enabled: bool = True, resume_step: int | None = None) -> None:
        self._directory, self._stage = directory, directory.name
        self._enabled, self._resume_step = enabled, resume_step
        self._open: tuple[TextIO, SummaryWriter] | None = None
        if enabled:
            directory.path.mkdir(parents=True, exist_ok=True)

    def _files(self) -> tuple[TextIO, SummaryWriter]:
        """The two files, opened with the first record."""
        if self._open is not None:
            return self._open
        from torch.utils.tensorboard import SummaryWriter

        directory, resume_step = self._directory, self._resume_step
        kept = _records_until(directory, resume_step) if resume_step is not None else []
        _replace_lines(directory, kept)
        purge_step = None if resume_step is None else resume_step + 1
        if resume_step is None:
            for events in directory.tensorboard.glob("events.out.tfevents.*"):
                events.unlink()
        file = directory.metrics.open("a", encoding="utf-8")
        self._open = file, SummaryWriter(str(directory.tensorboard), purge_step=purge_step)
        return self._open

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record numbers of one step. A number that is not finite is recorded as null."""
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
        # TensorBoard renders Markdown; an indented block shows the text as it is.
        _, events = self._files()
        events.add_text(f"{self._stage}/{tag}", "".join(f"    {line}\n" for line in text.splitlines()), step)
        events.flush()

    def close(self) -> None:
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


def _records_until(directory: StageDirectory, step: int) -> list[bytes]:
    """Lines of the steps up to `step`, but for what was measured after it: that is measured again.

    A last line that a crash cut short is dropped, also in the middle of a character.
    """
    try:
        lines = directory.metrics.read_bytes().split(b"\n")  # and at nothing else that some call the end of a line
    except FileNotFoundError:
        return []
    kept = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        measured = any(key.startswith("heldout_") for key in (*record, record.get("tag", "")))
        if record["step"] < step or (record["step"] == step and not measured):
            kept.append(line + b"\n")
    return kept


def _replace_lines(directory: StageDirectory, lines: list[bytes]) -> None:
    temporary = directory.metrics.with_name(directory.metrics.name + PARTIAL)
    temporary.write_bytes(b"".join(lines))
    os.replace(temporary, directory.metrics)
