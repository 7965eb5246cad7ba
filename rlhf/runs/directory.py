"""A run's folder on disk: what it holds, and who may write to it.

A `Config` and the wish to resume or overwrite flow in; out comes a `RunDirectory` with a folder for each stage.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rlhf.config.dump import write_recipe
from rlhf.config.schema import EVERY_STAGE, STAGES, Config, Stage
from rlhf.errors import ConfigError, RunError
from rlhf.runs.backup import Backup
from rlhf.runs.resume import (
    Fingerprints,
    collect_versions,
    find_changed_data,
    find_differences,
    find_differences_in_complete,
    find_started_from,
    stage_settings,
)
from rlhf.runs.stage_directory import StageDirectory
from rlhf.utils.atomic_io import CONSOLE, PARTIAL, atomic_write_json, check_writable, read_json
from rlhf.utils.command_line import get_command_line
from rlhf.utils.file_lock import LOCK, LOCK_FILES, lock_folder
from rlhf.utils.process_info import current_process

_SECONDS_TO_RECOVER = 30.0


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one run: `run.json` and a folder for each stage."""

    path: Path

    @property
    def description(self) -> Path:
        """The file that describes the run."""
        return self.path / "run.json"

    @property
    def recipe(self) -> Path:
        """The run's settings, as `--config` reads them."""
        return self.path / "recipe.yaml"

    def stage(self, name: Stage) -> StageDirectory:
        """Return the folder of a stage."""
        return StageDirectory(self.path / name, name)

    @property
    def stages(self) -> list[StageDirectory]:
        """The folders of all stages."""
        return [self.stage(name) for name in EVERY_STAGE]

    @classmethod
    def check(
        cls,
        config: Config,
        *,
        stages: Sequence[Stage] = STAGES,
        resume: bool = False,
        overwrite: bool = False,
        accelerator: dict[str, Any] | None = None,
        data: Fingerprints | None = None,
    ) -> RunDirectory:
        """Return the run directory of `config.output`, if `stages` may be written to it.

        Writes nothing, but brings back what a killed process had set aside (see `open_for`). A stage that the run
        does not hold yet is a continuation: it needs neither `resume` nor `overwrite`.

        Args:
            accelerator, data: as in `open_for`; None is not compared.

        Raises:
            RunError: the folder is not a run's, another process writes to it, it holds one of `stages` already or
                one that started from what would be replaced, there is nothing to resume, or it was made with other
                settings or rows.
        """
        run = cls(config.output)
        run.recover()
        run._check(config, stages, resume=resume, overwrite=overwrite, accelerator=accelerator, data=data)
        return run

    def is_continued(self, stages: Sequence[Stage], *, overwrite: bool = False) -> bool:
        """Return whether part of the run stays when `stages` are run."""
        return any(stage.started and not (overwrite and stage.name in stages) for stage in self.stages)

    def ensure_recipe(self) -> Path | None:
        """Return `recipe.yaml`, written from `run.json` if it is missing; None if there is no run."""
        if self.description.is_file() and not self.recipe.is_file():
            with suppress(OSError, ConfigError):  # a disk that is read-only; keys of another version
                write_recipe(self.recipe, read_json(self.description).get("config", {}))
        return self.recipe if self.description.is_file() and self.recipe.is_file() else None

    @contextmanager
    def open_for(
        self,
        config: Config,
        *,
        stages: Sequence[Stage] = STAGES,
        resume: bool = False,
        overwrite: bool = False,
        accelerator: dict[str, Any] | None = None,
        data: Fingerprints | None = None,
    ) -> Iterator[None]:
        """Lock and describe the folder while `stages` are written to it; rank 0 calls it.

        With `overwrite` the folders of `stages` are set aside and not deleted: until `commit` finds that the new
        stage has something to show, every way out of the block brings them and `run.json` back, and after a kill
        the next start does. Where the block fails, stages that are not `started` vanish.

        Args:
            accelerator: what `run.json` says of the hardware; `precision.name` is compared with that of a stage
                to be resumed.
            data: the fingerprint of each source; compared with those of the run, and recorded.

        Raises:
            RunError: as `check`, or the folder cannot be written. Nothing is changed then.
        """
        with lock_folder(self.path):
            self._backup.restore()
            self._check(config, stages, resume=resume, overwrite=overwrite, accelerator=accelerator, data=data)
            had_recipe = self.recipe.is_file()
            try:
                self._begin(config, stages, overwrite, accelerator, data or {})
                yield
            except BaseException:
                if self._backup.exists and not had_recipe:  # a run of an earlier version has none to bring back
                    self.recipe.unlink(missing_ok=True)
                self._backup.restore()
                self._abandon(stages)
                raise
            self._backup.delete()

    def recover(self) -> None:
        """Bring back what a killed process had set aside; ranks but the first wait until that is done.

        Raises:
            RunError: a living process writes to the folder.
        """
        if current_process().rank:
            deadline = time.monotonic() + _SECONDS_TO_RECOVER
            while self._backup.exists and time.monotonic() < deadline:
                time.sleep(0.05)
        elif (self.path / LOCK).exists() or self._backup.exists:
            with lock_folder(self.path):
                self._backup.restore()

    def commit(self, stage: StageDirectory) -> None:
        """Delete the backup of `open_for`, if `stage` has written a record or a checkpoint."""
        if self._backup.exists and stage.started:
            self._backup.delete()

    def finished_model(self, stage: Stage, key: str) -> str:
        """Return the model of a finished stage; `key` is the setting that would name another.

        Raises:
            RunError: the stage is not complete.
        """
        if not self.stage(stage).done:
            raise RunError(
                f"{self.path}: holds no finished {stage} stage to start from; run `rlhf {stage}` first, or set {key}"
            )
        return str(self.stage(stage).model)

    def check_rows(self, config: Config, data: Fingerprints) -> None:
        """Raise `RunError` where the rows of a source are not those that the run was made with, as far as it says."""
        recorded = read_json(self.description) if self.description.is_file() else {}
        if changed := find_changed_data(recorded, config, data):
            raise RunError(
                f"{self.path}: this run was made with other rows: {', '.join(changed)}; "
                "bring back the data of then or choose another --output"
            )

    def describe_saved(self) -> str | None:
        """One line on what is on disk, for a run that was stopped; None where nothing is saved."""
        kept = [f"{stage.name} is complete" for stage in self.stages if stage.done]
        for stage in self.stages:
            if not stage.done and stage.latest_checkpoint:
                kept.append(f"{stage.name} is saved up to {stage.latest_checkpoint.name}")
        return f"in {self.path}, {', '.join(kept)}" if kept else None

    @property
    def _backup(self) -> Backup:
        return Backup(self.path)

    @property
    def _described_by(self) -> tuple[Path, Path]:
        return self.recipe, self.description

    def _check(
        self,
        config: Config,
        stages: Sequence[Stage],
        *,
        resume: bool,
        overwrite: bool,
        accelerator: dict[str, Any] | None,
        data: Fingerprints | None,
    ) -> None:
        if resume and overwrite:
            raise RunError("--resume and --overwrite: one continues a run, the other replaces it; give one of them")
        holds_a_run = self._holds_a_run()
        if overwrite or not all(self.stage(stage).done for stage in stages):
            check_writable(self.path)
        if not holds_a_run:
            if resume:
                raise RunError(
                    f"{self.path}: holds no run to resume; check --output, or leave --resume out to start one there"
                )
            return
        present = [stage for stage in self.stages if stage.started and not (overwrite and stage.name in stages)]
        for stage in present if overwrite else ():
            if gone := [name for name in find_started_from(read_json(self.description), stage.name) if name in stages]:
                raise RunError(
                    f"{self.path}: {stage.name} comes from the {gone[0]} stage, which --overwrite replaces; "
                    f"{'replace all with `rlhf --overwrite`, ' * (stage.name in STAGES)}delete {stage.path}, "
                    "or choose another --output"
                )
        taken = [stage for stage in present if stage.name in stages]
        if taken and not resume:
            held = ", ".join(f"{stage.name} ({'complete' if stage.done else 'not complete'})" for stage in taken)
            raise RunError(
                f"{self.path}: holds a run already: {held}; "
                "continue it with --resume, replace it with --overwrite, or choose another --output"
            )
        if present:
            self._check_same(config, stages, present, _precision(accelerator), data or {})

    def _check_same(
        self,
        config: Config,
        stages: Sequence[Stage],
        present: Sequence[StageDirectory],
        precision: str | None,
        data: Fingerprints,
    ) -> None:
        """Raise `RunError` where the run was made with other settings or other rows than there are now."""
        recorded = read_json(self.description)
        kept = [stage.name for stage in present if stage.done or stage.name not in stages]
        complete = [name for name in kept if name in stages]
        resumed = [stage.name for stage in present if stage.name not in kept]
        if differing := find_differences(recorded, config, resumed, precision, kept=kept):
            raise RunError(
                f"{self.path}: this run was made with other settings: {', '.join(differing)}; "
                "give the same settings or choose another --output"
            )
        self.check_rows(config, data)
        if differing := find_differences_in_complete(
            recorded, config, complete, all_of_it=len(complete) == len(stages)
        ):
            raise RunError(
                f"{self.path}: what is complete was trained with other settings: {', '.join(differing)}; "
                "ask for these, train again with --overwrite, or choose another --output"
            )

    def _begin(
        self,
        config: Config,
        stages: Sequence[Stage],
        overwrite: bool,
        accelerator: dict[str, Any] | None,
        data: Fingerprints,
    ) -> None:
        """Set aside what may come back, remove what is worth nothing, and write `run.json` and `recipe.yaml`.

        Stages that are not run now keep what the run recorded for them.
        """
        recorded: dict[str, Any] = {}
        try:
            if self._holds_a_run():
                recorded = read_json(self.description)
                replaced = [stage.path.name for stage in self.stages if stage.name in stages and stage.started]
                self._backup.create(filter(Path.is_file, self._described_by), replaced if overwrite else [])
            self._remove_partial(stages)
            described = config.model_dump(mode="json")
            kept = [stage.name for stage in self.stages if stage.started and (stage.done or stage.name not in stages)]
            described |= {name: value for name, value in recorded.get("config", {}).items() if name in kept}
            settings = {name: value for name, value in recorded.get("stages", {}).items() if name in kept}
            settings |= {
                name: stage_settings(config, name, _precision(accelerator)) for name in stages if name not in kept
            }
            invocation = {
                "command": get_command_line(),
                "stages": list(stages),
                "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
            goes_on = any(stage.started for stage in self.stages)
            description = {
                "config": described,
                "seed": config.seed,
                "accelerator": accelerator,
                "stages": settings,
                "data": {**(recorded.get("data", {}) if goes_on else {}), **data},
                "versions": collect_versions(),
                "invocations": [*(recorded.get("invocations", []) if goes_on else []), invocation],
            }
            atomic_write_json(self.description, description)
            write_recipe(self.recipe, described)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); choose another --output") from error

    def _remove_partial(self, stages: Sequence[Stage]) -> None:
        """Remove worthless files: stages to be run that have not started, and what a crash left half-written."""
        for stage in self.stages:
            if stage.name in stages and not stage.started:
                shutil.rmtree(stage.path, ignore_errors=True)
            if stage.done:
                shutil.rmtree(stage.checkpoints, ignore_errors=True)
            for path in (*stage.path.glob(f"*{PARTIAL}"), *stage.checkpoints.glob(f"*{PARTIAL}")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _abandon(self, stages: Sequence[Stage]) -> None:
        """Remove `stages` that have not started, and `run.json` if none has."""
        for stage in self.stages:
            if stage.name in stages and not stage.started:
                shutil.rmtree(stage.path, ignore_errors=True)
        if not any(stage.started for stage in self.stages):
            for file in self._described_by:
                file.unlink(missing_ok=True)
                file.with_name(file.name + PARTIAL).unlink(missing_ok=True)

    def _holds_a_run(self) -> bool:
        """Return whether the folder is a run's; False if it does not exist or is empty.

        Raises:
            RunError: it holds something else.
        """
        if self.description.is_file():
            return True
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: is a file; choose a folder with --output")
        partial = [file.name + PARTIAL for file in self._described_by]
        ours = ("traceback*.txt", CONSOLE, *LOCK_FILES, *partial)  # what a run that could not begin may leave
        others = self.path.iterdir() if self.path.is_dir() else ()
        if not all(any(path.match(name) for name in ours) for path in others):
            raise RunError(
                f"{self.path}: is not empty and holds no run (no run.json), so nothing is written there; "
                "choose another --output"
            )
        return False


def _precision(accelerator: dict[str, Any] | None) -> str | None:
    """Return what `precision: auto` resolved to."""
    return accelerator["precision"]["name"] if accelerator else None
