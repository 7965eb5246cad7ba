"""Read a run's folder: its settings, and each stage's numbers, texts, held-out rows and summary.

Nothing is written, and neither torch nor a device is needed. The run may be in progress, or of an earlier version.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf.config.schema import Config, Stage, build_config
from rlhf.errors import RunError
from rlhf.reporting.recorder import WARNING_TAGS, read_heldout
from rlhf.runs.description import read_description
from rlhf.runs.directory import RunDirectory
from rlhf.runs.stage_directory import StageDirectory
from rlhf.utils.file_lock import find_owner
from rlhf.utils.jsonl import read_records

Progress = Literal["complete", "running", "not complete"]
_LOST_AFTER = 3600.0  # seconds
_BOOKKEEPING = {"stage", "step", "time", "tag", "text", "rule", "state", "remedy", "sample"}


class Curve(NamedTuple):
    """The values of one number by step; steps at which it was not finite are missing."""

    steps: list[int]
    values: list[float]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    def at(self, step: int) -> float | None:
        """Return the value at `step`; None if there is none."""
        return next((value for other, value in zip(*self) if other == step), None)


class Text(NamedTuple):
    """A text of one step: a sample, or a warning, with what `HealthWarning` says of its parts."""

    step: int
    tag: str
    text: str
    rule: str = ""
    state: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class StageRecords:
    """The records of one stage.

    Attributes:
        planned: its steps, if the settings say so.
        step: the newest recorded step.
        age, elapsed: seconds since the newest record, and between the oldest and the newest one.
        summary: the contents of `stage.json`; None until the stage is complete.
        curves: each recorded number, in the order of the first records; numbers of evaluations begin with `heldout_`.
        samples: sequences of rollouts, as the key `sample` of docs/metrics.md, each with its `step`.
        heldout: the rows of each evaluation, by step; see `rlhf.reporting.recorder.read_heldout`.
    """

    name: Stage
    title: str
    directory: StageDirectory
    planned: int | None
    step: int
    age: float
    elapsed: float
    summary: dict[str, Any] | None
    curves: Mapping[str, Curve]
    texts: Sequence[Text] = ()
    samples: Sequence[dict[str, Any]] = ()
    heldout: Mapping[int, list[dict[str, Any]]] = field(default_factory=dict)

    def curve(self, name: str) -> Curve:
        """Return the curve of a number; empty if it was not recorded."""
        return self.curves.get(name, Curve([], []))

    @property
    def final_step(self) -> int:
        """The step of the model that the stage saves: the kept one if it is complete, else the newest."""
        return int(((self.summary or {}).get("kept") or {}).get("step", self.step))

    def final(self, name: str) -> float | None:
        """Return a held-out number of the model of `final_step`, or else its newest value; None if there is none."""
        curve = self.curve(f"heldout_{name}")
        value = curve.at(self.final_step)
        return curve.last if value is None and curve else value

    @property
    def final_rows(self) -> list[dict[str, Any]]:
        """The held-out rows of the last evaluation up to `final_step`; none before a second evaluation."""
        steps = [step for step in self.heldout if 0 < step <= self.final_step]
        return self.heldout[max(steps)] if steps else []

    @property
    def first_rows(self) -> list[dict[str, Any]]:
        """The held-out rows of the evaluation before training; none if they were not recorded."""
        return self.heldout.get(0, [])

    @property
    def warnings(self) -> list[Text]:
        """The lines of the health monitor."""
        return [text for text in self.texts if text.tag in WARNING_TAGS]

    @property
    def completions(self) -> list[Text]:
        """The other texts: held-out prompts with completions, and samples of rollouts."""
        return [text for text in self.texts if text.tag not in WARNING_TAGS]


@dataclass(frozen=True)
class RunRecords:
    """The records of one run.

    Attributes:
        description: the contents of `run.json`.
        stages: those that have recorded a step, in their order.
    """

    directory: RunDirectory
    description: dict[str, Any]
    config: Config
    stages: list[StageRecords]

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.directory.path

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.resolve().name

    @property
    def accelerator(self) -> dict[str, Any]:
        """The entry of `run.json` about the hardware; empty if there is none."""
        return self.description.get("accelerator") or {}

    @property
    def device(self) -> dict[str, Any]:
        """The device: its `model`, `count` and `software`; empty if it is not recorded."""
        return self.accelerator.get("device") or {}

    @property
    def precision(self) -> str:
        """The precision of computations; empty if it is not recorded."""
        return str((self.accelerator.get("precision") or {}).get("name", ""))

    def stage(self, name: Stage) -> StageRecords | None:
        """Return the records of a stage; None if it has recorded no step."""
        return next((stage for stage in self.stages if stage.name == name), None)

    @cached_property
    def state(self) -> Progress:
        """Return whether the run is complete, a process writes to it, or neither.

        The owner of a lock on another machine cannot be asked: a run without a record for an hour has lost it.
        """
        owner = find_owner(self.path)
        if owner == "alive" or (owner == "elsewhere" and min(stage.age for stage in self.stages) < _LOST_AFTER):
            return "running"
        requested = {name for invocation in self.description.get("invocations", []) for name in invocation["stages"]}
        done = {stage.name for stage in self.stages if stage.summary}
        return "complete" if done and requested <= done else "not complete"


def read_run(path: Path) -> RunRecords:
    """Read the records of the run in the folder `path`.

    Raises:
        RunError: the folder holds no run, or the run has recorded no step yet.
        ConfigError: its settings are those of another version.
    """
    directory = RunDirectory(path)
    if not directory.description.is_file():
        raise RunError(f"{path}: contains no run.json; name the folder of a run")
    description = read_description(directory.description)
    config = build_config(description.get("config", {}), source=str(directory.description))
    stages = [records for stage in directory.stages if (records := _read_stage(stage, config))]
    if not stages:
        raise RunError(f"{path}: no step has been recorded yet; wait for the first one, or look at its console.log")
    return RunRecords(directory, description, config, stages)


def _read_stage(stage: StageDirectory, config: Config) -> StageRecords | None:
    records = list(read_records(stage.metrics))
    if not records:
        return None
    points: dict[str, Curve] = {}
    texts, samples = [], []
    for record in records:
        if "tag" in record:
            parts = (record.get(key, "") for key in ("rule", "state", "remedy"))
            texts.append(Text(record["step"], str(record["tag"]), str(record.get("text")), *parts))
            if isinstance(record.get("sample"), dict):
                samples.append({"step": record["step"], **record["sample"]})
        for name, value in record.items():
            if name not in _BOOKKEEPING and isinstance(value, int | float) and math.isfinite(value):
                steps, values = points.setdefault(name, Curve([], []))
                steps.append(record["step"])
                values.append(float(value))
    newest = max(record["step"] for record in records)
    times = [record["time"] for record in records if isinstance(record.get("time"), int | float)] or [time.time()]
    return StageRecords(
        name=stage.name,
        title=config.title(stage.name),
        directory=stage,
        planned=_count_planned_steps(config, stage.name),
        step=newest,
        age=time.time() - times[-1],
        elapsed=max(times) - min(times),
        summary=stage.summary() if stage.done else None,
        curves=points,
        texts=texts,
        samples=samples,
        heldout=read_heldout(stage.heldout, newest),
    )


def _count_planned_steps(config: Config, stage: Stage) -> int | None:
    """Return the steps of a stage, in PPO its rollouts; None if they depend on the number of rows."""
    if stage == "ppo":
        return None if config.ppo.epochs else config.ppo.steps
    return config.supervised(stage).max_steps


def find_runs(path: Path) -> list[Path]:
    """Return the run in `path`, or the runs in the folders directly below it, by name.

    Folders below it that this user may not look into are left out.

    Raises:
        RunError: there are none.
    """
    if RunDirectory(path).description.is_file():
        return [path]
    if not path.is_dir():
        raise RunError(f"{path}: no such folder; name the folder of a run")
    # Unlike Path.is_file, os.path.isfile is False in a folder without permission.
    runs = sorted(folder for folder in path.iterdir() if os.path.isfile(RunDirectory(folder).description))
    if not runs:
        raise RunError(f"{path}: contains no run.json, and no folder that does; name the folder of a run")
    return runs
