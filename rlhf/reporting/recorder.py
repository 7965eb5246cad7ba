"""Permanent records of a stage: `metrics.jsonl` and `heldout.jsonl` for programs, TensorBoard events for people.

Each record is on disk before the call returns, so that a crash loses none. Then it goes to the run's sinks, if any.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rlhf.utils.atomic_io import atomic_file, open_no_link
from rlhf.utils.full_disk import retry_when_full
from rlhf.utils.jsonl import read_records

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from rlhf.reporting.hookspecs import Sink
    from rlhf.runs.stage_directory import StageDirectory


WARNING_TAGS = ("warning", "heldout_warning")
"""The tags of the health monitor's lines; other texts are completions."""


class Recorder(AbstractContextManager["Recorder"]):
    """Writer of one stage's records; a context manager.

    Args:
        directory: the stage's folder.
        enabled: True on the one rank that writes; calls on other ranks do nothing.
        resume_step: the step of the checkpoint that training continues from; records of later steps are dropped, as
            they will be written again. None drops all records. Nothing is dropped before the first new record, so a
            stage that fails to start keeps the records of its folder.
        sink: receives each record after it is on disk; closed with the recorder.

    Attributes:
        steps: the writer of what steps read and drew.
    """

    def __init__(
        self,
        directory: StageDirectory,
        *,
        enabled: bool = True,
        resume_step: int | None = None,
        sink: Sink | None = None,
    ) -> None:
        self._directory, self._enabled, self._resume_step = directory, enabled, resume_step
        from rlhf.reporting.step_records import StepRecorder  # imports numpy, which `rlhf --help` does not need

        self.steps = StepRecorder(directory, enabled=enabled, resume_step=resume_step)
        self._sink = sink
        self._file: TextIO | None = None
        self._events: SummaryWriter | None = None
        self._purge_step = None if resume_step is None else resume_step + 1
        self._thread_hook = threading.excepthook
        if enabled:
            directory.path.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of one step."""
        if self._enabled:
            self._write(step, metrics)

    def text(self, tag: str, step: int, text: str, values: dict[str, Any] | None = None) -> None:
        """Record a text of one step, for example a sample completion; `values` are about it, only for programs."""
        if self._enabled:
            self._write(step, {"tag": tag, "text": text, **(values or {})})

    def heldout(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Record the held-out rows of the evaluation after `step` steps; `read_heldout` reads them.

        Rows are in the same order at each evaluation, so prompts are written only with the first one, and step 0.
        """
        if not self._enabled or not rows:
            return
        path = self._directory.heldout
        size = path.stat().st_size if path.is_file() else 0
        if step and size:
            rows = [{key: value for key, value in row.items() if key != "prompt"} for row in rows]
        is_cut_short = False
        if size:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                is_cut_short = file.read() != b"\n"  # by a crash
        with open_no_link(path, "a") as text:
            text.write("\n" * is_cut_short + _encode({"step": step, "rows": rows}).decode())

    def close(self) -> None:
        """Close all files, and the sink."""
        try:
            self.steps.close()
            if self._file:
                self._file.close()
            if self._events:
                self._events.close()
        finally:
            if self._file:
                threading.excepthook = self._thread_hook
        if self._sink:
            self._sink.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self._file = self._file or self._open_file()
        record = {"stage": self._directory.name, "step": step, "time": round(time.time(), 3), **values}
        self._file.write(_encode(record).decode())
        self._file.flush()
        retry_when_full(lambda: self._add_events(record), self._directory.tensorboard)
        if self._sink:
            self._sink.write(_replace_not_finite(record))

    def _add_events(self, record: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not self._events:
            self._events = SummaryWriter(str(self._directory.tensorboard), purge_step=self._purge_step)
        try:
            add_events(self._events, record)
            self._events.flush()
        except OSError:
            self._events = None  # its thread has ended
            raise

    def _open_file(self) -> TextIO:
        directory, resume_step = self._directory, self._resume_step
        if resume_step is None:
            records = []
            for events in directory.tensorboard.glob("events.out.tfevents.*"):
                events.unlink()
        else:
            records = _read_records_until(directory, resume_step)
        with atomic_file(directory.metrics) as temporary:
            temporary.write_bytes(b"".join(records))
        threading.excepthook = partial(_report_thread_error, self._thread_hook)
        return open_no_link(directory.metrics, "a")


def _report_thread_error(report: Callable[[threading.ExceptHookArgs], object], error: threading.ExceptHookArgs) -> None:
    """Report the error that ended a thread, but not of TensorBoard's writer, which raises it in our thread, too."""
    if not type(error.thread).__module__.startswith("tensorboard."):
        report(error)


_SPEED = re.compile(
    r".*(seconds|_per_second|tflops)|(generation|scoring|training|other|padding|peak)_share|peak_memory|compilations"
    r"|fallbacks|host_operators|tokens|pairs"
)
_OPTIMIZER = re.compile(
    r".*(learning_rate|grad_norm|loss_scale)|skipped_steps|updates|kl_coef|(policy|value|kl|ptx)_loss|approx_kl"
    r"|(value_)?clip_fraction|(draw|handover|correction)_\w+|rollout_servers|update_gap|score_gap|direction|wrong_targets|repeated_rows"
    r"|(changed_frozen|unchanged|unequal)_weights"
)


def metric_group(name: str) -> str:
    """Return the suffix of the stage's name in a metric's TensorBoard group: heldout, speed, optim or none."""
    if name.startswith("heldout_"):
        return "_heldout"
    return "_speed" if _SPEED.fullmatch(name) else "_optim" if _OPTIMIZER.fullmatch(name) else ""


def select_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record by their keys; None if one was not finite. Records of texts have none."""
    return {} if "tag" in record else {key: record[key] for key in record if key not in ("stage", "step", "time")}


def tag_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by their TensorBoard tags, `<group>/<key>`, without those that are None."""
    return {
        f"{record['stage']}{metric_group(name)}/{name}": value
        for name, value in select_numbers(record).items()
        if value is not None
    }


def add_events(events: SummaryWriter, record: Mapping[str, Any]) -> None:
    """Add a record to TensorBoard's events, at the time at which it was recorded."""
    step, recorded_at = record["step"], record.get("time")
    for tag, value in tag_numbers(record).items():
        events.add_scalar(tag, value, step, walltime=recorded_at)
    if "tag" in record:
        # TensorBoard renders Markdown; an indented block shows the text literally.
        indented = "".join(f"    {line}\n" for line in record["text"].splitlines())
        events.add_text(f"{record['stage']}/{record['tag']}", indented, step, walltime=recorded_at)


def read_heldout(path: Path, newest: int) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of each evaluation in a `heldout.jsonl`, by step, each row with its prompt if it has one.

    A stage that resumes evaluates again after its checkpoint, so a record replaces those of its step and of later ones.

    Args:
        newest: the stage's newest step; later rows are of a killed process, from after the checkpoint.
    """
    evaluations: dict[int, list[dict[str, Any]]] = {}
    prompts: list[str] = []
    for record in read_records(path):
        if not isinstance(rows := record.get("rows"), list) or not rows or record["step"] > newest:
            continue
        evaluations = {step: earlier for step, earlier in evaluations.items() if step < record["step"]}
        evaluations[record["step"]] = rows
        if "prompt" in rows[0]:
            prompts = [row.get("prompt", "") for row in rows]
    return {
        step: [row if place >= len(prompts) else {"prompt": prompts[place], **row} for place, row in enumerate(rows)]
        for step, rows in evaluations.items()
    }


def _read_records_until(directory: StageDirectory, step: int) -> list[bytes]:
    """Return lines of the steps up to `step`, without evaluations at that step, which will be repeated."""
    lines = []
    for record in read_records(directory.metrics):
        is_evaluation = any(key.startswith("heldout_") for key in (*record, record.get("tag", "")))
        if record["step"] < step or (record["step"] == step and not is_evaluation):
            lines.append(_encode(record))
    return lines


def _encode(record: dict[str, Any]) -> bytes:
    """Return a record as a line of JSON, which has no infinity and no NaN: they become null."""
    return (json.dumps(_replace_not_finite(record), ensure_ascii=False, allow_nan=False) + "\n").encode()


def _replace_not_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_not_finite(item) for key, item in value.items()}
    return [_replace_not_finite(item) for item in value] if isinstance(value, list | tuple) else value
