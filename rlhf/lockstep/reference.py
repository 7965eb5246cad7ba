"""What backend A did: its states, its tensors and their bands, step by step, live or from a golden file.

Both kinds have the same folder: `STAGE/step-K/state`, `STAGE/step-K/observed.pt` and `STAGE/final`. A golden file is
a tar archive of this folder.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerators import describe_error
from rlhf.config.schema import EVERY_STAGE, Stage
from rlhf.errors import RunError
from rlhf.lockstep.observations import Bands, Observed, measure_bands
from rlhf.lockstep.operators import Wanted
from rlhf.lockstep.peers import LiveSide
from rlhf.utils.atomic_io import atomic_file

FORMAT = 1
PERTURBATIONS = 2
"""Repetitions of each step of A whose operators are perturbed by one rounding each."""


class ReferenceStep(NamedTuple):
    """A step of A: the folder of the state that it starts from, its tensors, and how much each may differ."""

    state: str
    observed: list[Observed]
    bands: Bands

    @property
    def completions(self) -> Tensor | None:
        """The ids that PPO drew, [B, A]."""
        return next((item.tensor for item in self.observed if item.name == "completion_ids"), None)


class Recording:
    """A recorded reference, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        document = json.loads((folder / "golden.json").read_text("utf-8"))
        self.facts: dict[str, Any] = document["facts"]
        self.steps: dict[str, int] = document["steps"]
        self.opened: dict[str, dict[str, Any]] = document["opened"]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The recorded stages, in their order."""
        return tuple(stage for stage in EVERY_STAGE if stage in self.steps)

    def open(self, stage: Stage) -> dict[str, Any]:
        """Return what the driver needs to know about a stage."""
        return self.opened[stage] | {"steps": self.steps[stage]}

    def step(self, stage: Stage, number: int) -> ReferenceStep:
        """Return the record of step `number`, from 0."""
        return _read_step(self.folder / stage / f"step-{number}")

    def close(self, stage: Stage, *, keep: bool) -> str | None:
        """Return the folder of the complete stage, if a later one needs it."""
        return str(self.folder / stage / "final") if keep else None

    def read(self, step: int, record: ReferenceStep, wanted: Sequence[Wanted]) -> dict[Wanted, float | None]:
        """Return nothing: a recording has no values of single operators."""
        return dict.fromkeys(wanted)


class LiveReference:
    """A reference that runs now, and keeps what it does in a folder."""

    def __init__(self, side: LiveSide | Any, folder: Path) -> None:
        self.side, self.folder = side, folder
        self.facts: dict[str, Any] = side.facts
        self.steps: dict[str, int] = {}
        self.opened: dict[str, dict[str, Any]] = {}

    def open(self, stage: Stage) -> dict[str, Any]:
        """Open the stage."""
        self.opened[stage] = self.side.call("open", stage)
        return self.opened[stage]

    def state(self, stage: Stage, number: int) -> str:
        """Return the folder of the state after `number` steps."""
        return str(self.folder / stage / f"step-{number}" / "state")

    def step(self, stage: Stage, number: int) -> ReferenceStep:
        """Take step `number`, from 0, after the one before; perturbed repetitions give the bands."""
        state = self.state(stage, number)
        self.side.call("save_state", number, state)
        drawn = self.side.call("take", number, state) if stage == "ppo" else []
        completions = ReferenceStep(state, drawn, {}).completions
        perturbed = [
            self.side.call("take", number, state, completions=completions, perturbed=seed)
            for seed in range(PERTURBATIONS)
        ]
        variant = self.side.call("take", number, state, completions=completions, eps_before_correction=True)
        observed = self.side.call("take", number, state, completions=completions)  # last: the next step follows it
        bands = measure_bands(observed, perturbed, variant, getattr(torch, self.facts["unit"]))
        record = ReferenceStep(state, observed, bands)
        content = {"items": [tuple(item) for item in observed], "bands": list(record.bands.values())}
        torch.save(content, Path(state).with_name("observed.pt"))
        self.steps[stage] = number + 1
        return record

    def record(self, stage: Stage, number: int) -> ReferenceStep:
        """Return the record of a step that was taken."""
        return _read_step(self.folder / stage / f"step-{number}")

    def close(self, stage: Stage, *, keep: bool) -> str | None:
        """Close the stage, and complete it if a later one starts from it."""
        folder = self.side.call("close", keep=keep)
        if not keep:
            return None
        final = self.folder / stage / "final"
        shutil.copytree(folder, final, ignore=shutil.ignore_patterns("checkpoints"))
        return str(final)

    def read(self, step: int, record: ReferenceStep, wanted: Sequence[Wanted]) -> dict[Wanted, float | None]:
        """Take a step again, and return elements of the results of its operators."""
        options = {"completions": record.completions}
        values: dict[Wanted, float | None] = self.side.call("read", step, record.state, wanted, **options)
        return values

    def describe(self) -> None:
        """Write `golden.json`, with which the folder is a complete recording."""
        document = {"format": FORMAT, "facts": self.facts, "steps": self.steps, "opened": self.opened}
        (self.folder / "golden.json").write_text(json.dumps(document, indent=1), "utf-8")

    def write(self, path: Path) -> None:
        """Write the golden file: complete, or not at all."""
        self.describe()
        with atomic_file(path) as temporary, tarfile.open(temporary, "w") as archive:
            archive.add(self.folder, arcname=".")


def open_golden(path: Path, folder: Path) -> Recording:
    """Unpack a golden file into `folder`.

    Raises:
        RunError: it cannot be read, or is of another format.
    """
    try:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        written = json.loads((folder / "golden.json").read_text("utf-8"))["format"]
        if written != FORMAT:
            raise RunError(f"{path}: has format {written}, this version reads {FORMAT}; record it again with --record")
        return Recording(folder)
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: is no golden file ({describe_error(error)}); write one with --record FILE") from error


def _read_step(folder: Path) -> ReferenceStep:
    content = torch.load(folder / "observed.pt", weights_only=True)
    observed = [Observed(*item) for item in content["items"]]
    bands = {item.key: band for item, band in zip(observed, content["bands"])}
    return ReferenceStep(str(folder / "state"), observed, bands)
