"""A run's folder on disk: what it holds, and who may write to it.

A `Config` and the wish to resume or overwrite flow in; out comes a `RunDirectory` whose stages each have
their own folder.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlhf.aside import Aside
from rlhf.config import STAGES, Config, Stage
from rlhf.errors import RunError
from rlhf.files import PARTIAL, atomic_write_json, read_json
from rlhf.lock import LOCK, locked
from rlhf.settings import differences, stage_settings, started_from

_PACKAGES = ("rlhf", "torch", "deepspeed", "transformers", "peft")


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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def begun(self) -> bool:
        """Whether there is anything here to lose: results, a checkpoint, or a record of training."""
        return self.done or self.latest_checkpoint is not None or self._has_trained

    @property
    def done(self) -> bool:
        """Whether the stage ran to its end: `finish` was called."""
        return self._summary.is_file()

    @property
    def all_checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*") if path.suffix != PARTIAL)

    @property
    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return max(self.all_checkpoints, default=None)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write `stage.json`, which marks the stage as complete. Rank 0 calls it, last of all.

        The checkpoints go: a complete stage is not trained further, not by `--resume` with more steps either,
        and its model is in `model`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write_json(self._summary, summary)
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def summary(self) -> dict[str, Any]:
        """What `finish` was given.

        Raises:
            RunError: the stage is not complete.
        """
        if not self.done:
            raise RunError(f"{self.path}: the {self.name} stage is not complete; run `rlhf {self.name}` first")
        return read_json(self._summary)

    @property
    def _summary(self) -> Path:
        return self.path / "stage.json"

    @property
    def _has_trained(self) -> bool:
        """Whether a step is recorded; evaluation before the first one is step 0."""
        try:
            with self.metrics.open("rb") as lines:
                return any(_step(line) > 0 for line in lines)
        except FileNotFoundError:
            return False


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one run: `run.json` and a folder for each stage."""

    path: Path

    @property
    def description(self) -> Path:
        return self.path / "run.json"

    def stage(self, name: Stage) -> StageDirectory:
        return StageDirectory(self.path / name, name)

    @property
    def stages(self) -> list[StageDirectory]:
        return [self.stage(name) for name in STAGES]

    @classmethod
    def check(
        cls, config: Config, *, stages: Sequence[Stage] = STAGES, resume: bool = False, overwrite: bool = False
    ) -> RunDirectory:
        """The run directory that `config.output` names, once it is clear that `stages` may be written to it.

        Writes nothing, but brings back what a killed process had set aside (see `opened`). A stage that the run
        does not hold yet is a continuation: it needs neither `resume` nor `overwrite`.

        Raises:
            RunError: the folder is not a run's, another process writes to it, it holds one of `stages` already or
                one that started from what would be replaced, or it was made with other settings.
        """
        run = cls(config.output)
        run.recover()
        run._check(config, stages, resume=resume, overwrite=overwrite)
        return run

    @contextmanager
    def opened(
        self,
        config: Config,
        *,
        stages: Sequence[Stage] = STAGES,
        resume: bool = False,
        overwrite: bool = False,
        accelerator: dict[str, Any] | None = None,
    ) -> Iterator[None]:
        """The folder, locked and described by `run.json`, while `stages` are written to it. Rank 0 calls it.

        With `overwrite` the folders of `stages` are set aside and not deleted: until `settle` finds that the new
        stage has something to show, every way out of the block brings them and `run.json` back, and after a kill
        the next start does. Where the block fails, stages that are not `begun` vanish.

        Args:
            accelerator: what `run.json` says of the hardware; `precision.name` is compared with that of a stage
                to be resumed.

        Raises:
            RunError: as `check`, or the folder cannot be written. Nothing is changed then.
        """
        with locked(self.path):
            self._aside.restore()
            resolved = accelerator["precision"]["name"] if accelerator else None
            self._check(config, stages, resume=resume, overwrite=overwrite, precision=resolved)
            try:
                self._begin(config, stages, overwrite, accelerator, resolved)
                yield
            except BaseException:
                self._aside.restore()
                self._abandon(stages)
                raise
            self._aside.discard()

    def recover(self) -> None:
        """Bring back what a killed process had set aside.

        Raises:
            RunError: a living process writes to the folder.
        """
        if (self.path / LOCK).exists() or self._aside.exists:
            with locked(self.path):
                self._aside.restore()

    def settle(self, stage: StageDirectory) -> None:
        """Delete what `opened` set aside, if `stage` has got as far as a record or a checkpoint of its own."""
        if self._aside.exists and stage.begun:
            self._aside.discard()

    def model_of(self, stage: Stage, key: str) -> str:
        """The model that a finished stage left; `key` is the setting that would name another.

        Raises:
            RunError: the stage is not complete.
        """
        if not self.stage(stage).done:
            raise RunError(
                f"{self.path}: holds no finished {stage} stage to start from; run `rlhf {stage}` first, or set {key}"
            )
        return str(self.stage(stage).model)

    def saved_state(self) -> str:
        """One line on what is on disk, for a run that was stopped."""
        kept = [f"{stage.name} is complete" for stage in self.stages if stage.done]
        for stage in self.stages:
            if not stage.done and stage.latest_checkpoint:
                kept.append(f"{stage.name} is saved up to {stage.latest_checkpoint.name}")
        if not kept:
            return f"nothing is saved yet in {self.path}; <stage>.checkpoint_every sets the steps between checkpoints"
        remedy = "" if all(stage.done for stage in self.stages) else "; continue with --resume"
        return f"in {self.path}, {', '.join(kept)}{remedy}"

    @property
    def _aside(self) -> Aside:
        return Aside(self.path)

    def _check(
        self, config: Config, stages: Sequence[Stage], *, resume: bool, overwrite: bool, precision: str | None = None
    ) -> None:
        if resume and overwrite:
            raise RunError("--resume and --overwrite: one continues a run, the other replaces it; give one of them")
        if not self._holds_a_run():
            return
        present = [stage for stage in self.stages if stage.begun]
        if overwrite:
            present = [stage for stage in present if stage.name not in stages]
            for stage in present:
                if gone := [name for name in started_from(read_json(self.description), stage.name) if name in stages]:
                    raise RunError(
                        f"{self.path}: {stage.name} comes from the {gone[0]} stage, which --overwrite replaces; "
                        f"replace all with `rlhf --overwrite`, delete {stage.path}, or choose another --output"
                    )
        taken = [stage for stage in present if stage.name in stages]
        if taken and not resume:
            held = ", ".join(f"{stage.name} ({'complete' if stage.done else 'not complete'})" for stage in taken)
            raise RunError(
                f"{self.path}: holds a run already: {held}; "
                "continue it with --resume, replace it with --overwrite, or choose another --output"
            )
        if present:
            resumed = [stage.name for stage in taken if not stage.done]
            if differing := differences(read_json(self.description), config, resumed, precision):
                raise RunError(
                    f"{self.path}: this run was made with other settings: {', '.join(differing)}; "
                    "give the same settings or choose another --output"
                )

    def _begin(
        self,
        config: Config,
        stages: Sequence[Stage],
        overwrite: bool,
        accelerator: dict[str, Any] | None,
        precision: str | None,
    ) -> None:
        """Set aside what may come back, remove what is worth nothing, and write `run.json`.

        Stages that are not run now keep what the run recorded for them.
        """
        recorded: dict[str, Any] = {}
        try:
            if self._holds_a_run():
                recorded = read_json(self.description)
                replaced = [stage.path.name for stage in self.stages if stage.name in stages and stage.begun]
                self._aside.fill(self.description, replaced if overwrite else [])
            self._tidy(stages)
            described = config.model_dump(mode="json")
            kept = [stage.name for stage in self.stages if stage.begun and (stage.done or stage.name not in stages)]
            described |= {name: value for name, value in recorded.get("config", {}).items() if name in kept}
            settings = {name: value for name, value in recorded.get("stages", {}).items() if name in kept}
            settings |= {name: stage_settings(config, precision) for name in stages if name not in kept}
            invocation = {
                "command": shlex.join(["rlhf", *sys.argv[1:]]),
                "stages": list(stages),
                "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
            earlier = recorded.get("invocations", []) if any(stage.begun for stage in self.stages) else []
            description = {
                "config": described,
                "seed": config.seed,
                "accelerator": accelerator,
                "stages": settings,
                "versions": versions(),
                "invocations": [*earlier, invocation],
            }
            atomic_write_json(self.description, description)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); choose another --output") from error

    def _tidy(self, stages: Sequence[Stage]) -> None:
        """Remove what is worth nothing: stages to be run that are not begun, and what a crash left half-written."""
        for stage in self.stages:
            if stage.name in stages and not stage.begun:
                shutil.rmtree(stage.path, ignore_errors=True)
            if stage.done:
                shutil.rmtree(stage.checkpoints, ignore_errors=True)
            for path in (*stage.path.glob(f"*{PARTIAL}"), *stage.checkpoints.glob(f"*{PARTIAL}")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _abandon(self, stages: Sequence[Stage]) -> None:
        """Remove `stages` where they are not begun, and `run.json` where no stage is."""
        for stage in self.stages:
            if stage.name in stages and not stage.begun:
                shutil.rmtree(stage.path, ignore_errors=True)
        if not any(stage.begun for stage in self.stages):
            self.description.unlink(missing_ok=True)

    def _holds_a_run(self) -> bool:
        """Whether the folder is a run's; False where it is absent or empty.

        Raises:
            RunError: it holds something else.
        """
        if self.description.is_file():
            return True
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: is a file; choose a folder with --output")
        ours = ("traceback*.txt", self.description.name + PARTIAL, LOCK)  # what a run that could not begin may leave
        others = self.path.iterdir() if self.path.is_dir() else ()
        if not all(any(path.match(name) for name in ours) for path in others):
            raise RunError(
                f"{self.path}: is not empty and holds no run (no run.json), so nothing is written there; "
                "choose another --output"
            )
        return False


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a distribution"
    return found


def _step(line: bytes) -> int:
    """The step of a record; 0 where a crash cut it short."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return 0
