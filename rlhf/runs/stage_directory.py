"""The folder of one stage in a run: its contents, and if the stage is complete."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.schema import Stage
from rlhf.errors import RunError
from rlhf.runs.description import read_summary, write_summary
from rlhf.utils.jsonl import read_records
from rlhf.utils.manifest import MANIFEST, FileDigest, digest_folder, find_damage, find_difference
from rlhf.utils.process_info import get_resume_command

CRITIC = "critic"
"""The folder of PPO's critic, next to that of its model."""

_CHECKPOINT = re.compile(r"step-\d{8,}")  # a folder of another name, such as a copy, is no checkpoint

AVERAGE = "-ema"
"""The suffix of a model's or an adapter's folder that contains its moving average."""


@dataclass(frozen=True)
class StageDirectory:
    """One stage's folder in a run."""

    path: Path
    name: Stage

    @property
    def model(self) -> Path:
        """The trained model, in Hugging Face format."""
        return self.path / "model"

    @property
    def critic(self) -> Path:
        """The critic that PPO trained with it, in the same format with a scalar head."""
        return self.path / CRITIC

    @property
    def average(self) -> Path:
        """The moving average of the trained model, in the same format, if the settings requested one."""
        return self.path / f"model{AVERAGE}"

    @property
    def averages(self) -> list[str]:
        """Names of the folders of moving averages that exist: of the model, of its adapter."""
        return sorted(path.name for path in self.path.glob(f"*{AVERAGE}"))

    @property
    def best(self) -> Path:
        """Candidates for the best model while the stage trains; each in a folder named by its step."""
        return self.path / "best"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def metrics(self) -> Path:
        """The records of all steps, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def steps(self) -> Path:
        """What each step read and drew, from which any step can be computed again."""
        return self.path / "steps.bin"

    @property
    def heldout(self) -> Path:
        """The numbers and texts of each held-out row at each evaluation, one evaluation a line."""
        return self.path / "heldout.jsonl"

    @property
    def evaluations(self) -> Path:
        """The results that decide which model the stage keeps."""
        return self.path / "evaluations.json"

    @property
    def not_finite(self) -> Path:
        """The folder of rows of steps that were not taken, because numbers were not finite."""
        return self.path / "not-finite"

    @property
    def console(self) -> Path:
        """The log of what the terminal showed, as text."""
        return self.path / "console.log"

    @property
    def started(self) -> bool:
        """True if the folder has results, a checkpoint, or a record of training."""
        return self.done or self.latest_checkpoint is not None or self._has_trained

    @property
    def done(self) -> bool:
        """True if the stage is complete: `finish` was called."""
        return self._summary.is_file()

    @property
    def all_checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(path.name))

    @property
    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return max(self.all_checkpoints, default=None)

    def describe_last_checkpoint(self) -> str:
        """Return what an error says about the steps that are not lost."""
        if latest := self.latest_checkpoint:
            return f"the last checkpoint is {latest}"
        return f"no checkpoint yet ({self.name}.checkpoint_every)"

    def check_checkpoint(self) -> None:
        """Raise `RunError` if the newest checkpoint lacks a file or a part of one."""
        if path := self.latest_checkpoint:
            self.check_files(path, lambda name: False)

    def check_files(self, checkpoint: Path, select: Callable[[str], bool]) -> None:
        """Raise `RunError` if a checkpoint differs from its manifest: in sizes, or in the content of selected files."""
        if damage := find_damage(checkpoint, select):
            raise self.unreadable(damage)

    def unreadable(self, reason: str) -> RunError:
        """Return the error for an unreadable newest checkpoint, with the alternatives."""
        path = self.latest_checkpoint
        earlier = [other.name for other in self.all_checkpoints if other != path]
        if not earlier:
            remedy = f"there is no other; train the {self.name} stage again with --overwrite"
        else:
            remedy = f"take the one before: {get_resume_command(earlier[-1], self.name, self.path.parent)}"
        return RunError(f"{path}: cannot be read ({reason}); {remedy}")

    def check_steps(self, steps: int) -> None:
        """Raise `RunError` if the newest checkpoint is of a later step than the last of `steps`."""
        path = self.latest_checkpoint
        if path and (step := parse_step(path)) > steps:
            raise RunError(
                f"{path}: {step} steps of {self.name} are done, but {steps} are requested; "
                f"request {step} or more, or train again with --overwrite"
            )

    def finish(self, summary: dict[str, Any]) -> None:
        """Write `stage.json`, which marks the stage as complete, with the digests of its other files.

        Rank 0 calls it last. Checkpoints and candidates for the best model are deleted: the result is in `model`, and a
        complete stage is not trained further, even by `--resume` with more steps.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        average = {"average": self.averages} if self.averages else {}
        names = {path.relative_to(self.path).as_posix() for path in self.list_records()}
        files = {name: digest._asdict() for name, digest in digest_folder(self.path, names.__contains__).items()}
        write_summary(self._summary, summary | average | {"files": files})
        self.remove_candidates()

    def list_records(self) -> list[Path]:
        """Return the files that `stage.json` has digests of; those of a model are in its manifest.

        The model's card and the log of the terminal are for people.
        """
        files = [self.metrics, self.steps, self.heldout, self.evaluations, *sorted(self.path.glob(f"*/{MANIFEST}"))]
        return [path for path in files if path.is_file()]

    def find_damage(self) -> str | None:
        """Return how a complete stage's files differ from their digests in `stage.json`; None if they do not."""
        try:
            files = self.summary().get("files", {})
        except RunError as error:
            return str(error).removeprefix(f"{self._summary}: ")
        return find_difference(self.path, {name: FileDigest(**file) for name, file in files.items()}, "stage.json")

    def remove_candidates(self) -> None:
        """Remove what a complete stage does not need: its checkpoints, and the models that may have become the best."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        shutil.rmtree(self.best, ignore_errors=True)

    def summary(self) -> dict[str, Any]:
        """Return the summary that `finish` wrote.

        Raises:
            RunError: the stage is not complete, or the summary was changed.
        """
        if not self.done:
            raise RunError(f"{self.path}: the {self.name} stage is not complete; run `rlhf {self.name}` first")
        return read_summary(self._summary)

    @property
    def _summary(self) -> Path:
        return self.path / "stage.json"

    @property
    def _has_trained(self) -> bool:
        """True if a step is recorded; evaluation before the first one is step 0."""
        return any(record["step"] > 0 for record in read_records(self.metrics))


def parse_step(checkpoint: Path) -> int:
    """Return the last step that a checkpoint holds."""
    return int(checkpoint.name.removeprefix("step-"))
