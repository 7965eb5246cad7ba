"""The verdict on a run: the findings about its stages, and the state and the sentence that sum them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.diagnosis.findings import Finding, examine_stage, summarize_stage, worst
from rlhf.diagnosis.records import RunRecords, StageRecords, read_run
from rlhf.diagnosis.subject import State
from rlhf.errors import RLHFError, RunError
from rlhf.utils.units import format_seconds

SIGNS: dict[State, str] = {"fine": "✓", "look here": "▲", "wrong": "✕", "cannot tell": "?"}
"""Each state with its sign, so that colours are not needed."""


@dataclass(frozen=True)
class ExaminedStage:
    """A stage of a run, examined."""

    records: StageRecords
    findings: list[Finding]
    state: State
    sentence: str


@dataclass(frozen=True)
class ExaminedRun:
    """A run, examined; `number` is its place among runs that are examined together."""

    records: RunRecords
    stages: list[ExaminedStage]
    number: int = 0

    @property
    def state(self) -> State:
        """The most severe state of its stages."""
        return worst([finding for stage in self.stages for finding in stage.findings])

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The run's state, device and duration, each with a name."""
        records = self.records
        hardware = [records.accelerator.get("name", ""), records.device.get("model", ""), records.precision]
        seconds = sum((stage.records.summary or {}).get("seconds", 0.0) for stage in self.stages)
        started = [invocation.get("started", "") for invocation in records.description.get("invocations", [])]
        facts = [
            ("state", records.state),
            ("device", " ".join(filter(None, hardware))),
            ("time", format_seconds(seconds) if seconds else ""),
            ("started", started[0].replace("T", " ")[:16] + " UTC" if started and started[0] else ""),
        ]
        return [(name, value) for name, value in facts if value]


def examine_run(records: RunRecords, number: int = 0) -> ExaminedRun:
    """Examine all stages of a run."""
    stages = []
    for stage in records.stages:
        findings = examine_stage(records, stage)
        stages.append(ExaminedStage(stage, findings, worst(findings), summarize_stage(records, stage, findings)))
    return ExaminedRun(records, stages, number)


def examine_runs(paths: Sequence[Path]) -> tuple[list[ExaminedRun], list[tuple[Path, str]]]:
    """Examine the runs in these folders.

    Returns:
        The runs; and the folders of those that cannot be read, or have recorded no step yet, each with the reason.

    Raises:
        RunError: none can be read.
    """
    runs: list[ExaminedRun] = []
    unread: list[tuple[Path, str]] = []
    for number, path in enumerate(paths):
        try:
            runs.append(examine_run(read_run(path), number))
        except RLHFError as error:
            unread.append((path, str(error).removeprefix(f"{path}: ")))
    if not runs:
        raise unread_error(unread)
    return runs, unread


def unread_error(unread: Sequence[tuple[Path, str]]) -> RunError:
    """Return the error that names the first run that cannot be read."""
    path, reason = unread[0]
    return RunError(f"{path}: {reason}")


def to_document(run: ExaminedRun) -> dict[str, Any]:
    """Return the verdict on a run as JSON: each stage's state, sentence and findings."""
    return {
        "run": str(run.records.path),
        "state": run.state,
        "progress": run.records.state,
        "stages": [
            {
                "stage": stage.records.name,
                "state": stage.state,
                "sentence": stage.sentence,
                "findings": [finding._asdict() for finding in stage.findings],
            }
            for stage in run.stages
        ],
    }
