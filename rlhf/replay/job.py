"""One step of a recorded stage to compute again: what the processes that do it are given, and what they return."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf.config.schema import Stage
from rlhf.replay.recording import Entry
from rlhf.runs.stage_directory import StageDirectory
from rlhf.utils.atomic_io import read_json


@dataclass(frozen=True)
class Job:
    """A step to compute; JSON in `folder`.

    Attributes:
        run: the run's folder, which is only read.
        folder: the folder of this computation: records, and a checkpoint if `saves`.
        session: that of the step; `config` in it may have changed settings.
        step: from 1.
        checkpoint: the checkpoint to start from; empty: the stage's beginning.
        changed: the settings are not those of the run, so rows and models may differ from its own.
        saves: a checkpoint of the step before is left in `folder`.
    """

    run: str
    folder: str
    stage: Stage
    step: int
    session: dict[str, Any]
    checkpoint: str = ""
    changed: bool = False
    saves: bool = False

    @property
    def file(self) -> Path:
        """The file of the job."""
        return Path(self.folder, "job.json")

    @property
    def stage_folder(self) -> Path:
        """The folder that stands for the stage's in the run."""
        return Path(self.folder, self.stage)

    def write(self) -> None:
        """Write the job for its processes."""
        self.stage_folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Job:
        """Read what `write` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def list_kept(stage: StageDirectory, step: int) -> dict[int, Path]:
    """Return the files that a step left that was not taken, because numbers were not finite, by rank."""
    paths = stage.not_finite.glob(f"step-{step:08d}-rank*.json")
    return {int(path.stem.rpartition("rank")[2]): path for path in paths}


def read_origin(path: Path) -> dict[str, Any]:
    """Return what such a file says without the rows' tokens and texts: model, layer, quantity, count, rows."""
    content = read_json(path)
    return {name: content.get(name) for name in ("model", "layer", "quantity", "count", "size")} | {
        "rows": [row["row"] for row in content.get("rows", ())]
    }


@dataclass(frozen=True)
class RankOutcome:
    """What one rank computed.

    Attributes:
        metrics: the step's numbers without those of speed; empty if the step was not taken.
        entries: its tensors.
        differences: what differs from the record on this rank before any metric, by phase.
        machine: the machine's entries of a session.
        taken: False if the gradients were not finite.
        origin: the first numbers that are not finite, as a run keeps them in `not-finite`, with the rows' numbers.
    """

    rank: int
    metrics: dict[str, float]
    entries: list[Entry]
    differences: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    taken: bool = True
    origin: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the outcome next to the job."""
        values = asdict(self) | {"entries": [list(entry) for entry in self.entries]}
        (folder / f"rank{self.rank}.json").write_text(json.dumps(values), encoding="utf-8")

    @classmethod
    def read_all(cls, folder: Path) -> list[RankOutcome]:
        """Return the outcomes of all ranks, in their order."""
        outcomes = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
        made = [cls(**values | {"entries": [Entry(*entry) for entry in values["entries"]]}) for values in outcomes]
        return sorted(made, key=lambda outcome: outcome.rank)
