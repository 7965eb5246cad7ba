"""A run's folder on disk: its contents, and its single writer.

A run that overwrites another moves the old folders into a backup inside the run's folder, and deletes the backup after
its first step or checkpoint. If it is killed in between, the next process restores the backup.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlhf.config.dump import write_recipe
from rlhf.config.schema import EVERY_STAGE, STAGES, Config, Stage
from rlhf.errors import ConfigError, RunError
from rlhf.roles.model_identity import StartModel
from rlhf.runs.description import read_description
from rlhf.runs.resume import (
    Fingerprints,
    StartModels,
    find_changed_data,
    find_changed_models,
    find_differences,
    find_differences_in_complete,
    find_started_from,
    stage_settings,
)
from rlhf.runs.stage_directory import StageDirectory
from rlhf.utils.atomic_io import (
    CONSOLE,
    PARTIAL,
    STACKS,
    atomic_write_json,
    check_writable,
    refuse_link,
    remove_folder,
    sync,
)
from rlhf.utils.file_lock import LOCK, LOCK_FILES, lock_folder
from rlhf.utils.process_info import SECRET_FILE, current_process, get_command_line

_SECONDS_TO_RECOVER = 30.0
_PACKAGES = ("rlhf", "torch", "deepspeed", "transformers", "peft")  # a run's numbers depend on their versions


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
        """The run's settings, as a recipe."""
        return self.path / "recipe.yaml"

    @property
    def report(self) -> Path:
        """The page that explains the run."""
        return self.path / "report.html"

    @property
    def stop_file(self) -> Path:
        """The file that asks the run to save and end after its step."""
        return self.path / "STOP"

    @property
    def backup(self) -> Path:
        """The folder of the backup; it does not exist if there is nothing to restore."""
        return self.path / ".rlhf.replaced"

    def stage(self, name: Stage) -> StageDirectory:
        """Return the folder of a stage."""
        return StageDirectory(self.path / name, name)

    @property
    def stages(self) -> list[StageDirectory]:
        """The folders of all stages."""
        return [self.stage(name) for name in EVERY_STAGE]

    def read_description_bytes(self) -> bytes | None:
        """Return the bytes of `run.json`, which every run that starts changes; None if there is none."""
        return self.description.read_bytes() if self.description.is_file() else None

    def is_continued(self, stages: Sequence[Stage], *, overwrite: bool = False) -> bool:
        """Return True if part of the existing run remains when `stages` are run."""
        return bool(self._remaining(stages, overwrite))

    def ensure_recipe(self) -> Path | None:
        """Return `recipe.yaml`, written from `run.json` if it is missing; None if there is no run."""
        if self.description.is_file() and not self.recipe.is_file():
            with suppress(OSError, ConfigError):  # a read-only disk, or keys of another version
                write_recipe(self.recipe, read_description(self.description).get("config", {}))
        return self.recipe if self.description.is_file() and self.recipe.is_file() else None

    def check(
        self,
        config: Config,
        *,
        stages: Sequence[Stage] = STAGES,
        resume: bool = False,
        overwrite: bool = False,
        accelerator: dict[str, Any] | None = None,
        data: Fingerprints | None = None,
        models: StartModels | None = None,
    ) -> None:
        """Check that `stages` may be written to the folder, after `recover`; write nothing.

        A stage that the run does not contain yet needs neither `resume` nor `overwrite`.

        Args:
            config: the settings of the stages.
            stages: the stages to run.
            resume: resume stages that the run contains.
            overwrite: replace them.
            accelerator: the entry of `run.json` about the hardware; its `precision.name` is compared with that of a
                stage to be resumed, unless it is None.
            data: the fingerprint of each source, which is compared with the run's, unless it is None.
            models: the models that each stage starts from, which are compared with the run's, unless it is None.

        Raises:
            RunError: the folder is not a run's, or cannot be written; it contains one of `stages` already, or a stage
                that started from one to be replaced; there is nothing to resume; or the run has other settings, rows
                or models.
        """
        if resume and overwrite:
            raise RunError("--resume and --overwrite: exclude each other; give one of them")
        holds_run = self._holds_run()
        self._refuse_links()
        if overwrite or not all(self.stage(stage).done for stage in stages):
            check_writable(self.path)
        if not holds_run:
            if resume:
                raise RunError(
                    f"{self.path}: holds no run to resume; check --output, or leave --resume out to start one there"
                )
            return
        remaining = self._remaining(stages, overwrite)
        for stage in filter(attrgetter("done"), remaining):
            stage.summary()  # else a damaged one would be met when all stages are done
        for stage in remaining if overwrite else ():
            sources = find_started_from(read_description(self.description), stage.name)
            if replaced := [name for name in sources if name in stages]:
                raise RunError(
                    f"{self.path}: {stage.name} comes from the {replaced[0]} stage, which --overwrite replaces; "
                    f"{'replace all with `rlhf --overwrite`, ' * (stage.name in STAGES)}delete {stage.path}, "
                    "or choose another --output"
                )
        if not resume and (present := [stage for stage in remaining if stage.name in stages]):
            names = ", ".join(f"{stage.name} ({'complete' if stage.done else 'not complete'})" for stage in present)
            raise RunError(
                f"{self.path}: holds a run already: {names}; "
                "continue it with --resume, replace it with --overwrite, or choose another --output"
            )
        if remaining:
            self._check_same_settings(config, stages, remaining, _precision(accelerator), data or {})
            self.check_models(config, models or {}, [stage.name for stage in remaining])

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
        models: StartModels | None = None,
    ) -> Iterator[None]:
        """Lock and describe the folder while `stages` are written to it; rank 0 calls it.

        With `overwrite` the folders of `stages` are moved to a backup. Until `commit` is called, after the first step
        or checkpoint, they and `run.json` are restored however the block ends; after a kill, the next start restores
        them. If the block fails, stages that are not `started` are removed.

        Args:
            config, stages, resume, overwrite: as for `check`.
            accelerator, data, models: as for `check`; they are recorded.

        Raises:
            RunError: as `check`, or another process writes to the folder. Nothing is changed then.
        """
        with lock_folder(self.path):
            self._refuse_links()
            self._restore_backup()
            options: dict[str, Any] = {
                "overwrite": overwrite,
                "accelerator": accelerator,
                "data": data,
                "models": models,
            }
            self.check(config, stages=stages, resume=resume, **options)
            try:
                self._begin(config, stages, **options)
                yield
            except BaseException:
                self._restore_backup()
                self._remove_unstarted(stages)
                if not any(stage.started for stage in self.stages):
                    for file in (self.recipe, self.description):
                        file.unlink(missing_ok=True)
                        file.with_name(file.name + PARTIAL).unlink(missing_ok=True)
                raise
            self._delete_backup()

    def recover(self) -> None:
        """Restore the backup of a killed process, and remove what it left half-written.

        All ranks but the first wait until the backup is restored.

        Raises:
            RunError: a living process writes to the folder.
        """
        if current_process().rank:
            deadline = time.monotonic() + _SECONDS_TO_RECOVER
            while self.backup.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        elif (self.path / LOCK).exists() or self.backup.exists():
            with lock_folder(self.path):
                self._restore_backup()
                self._remove_partial()

    def remove_stop_file(self) -> bool:
        """Remove the file that asks the run to end, and return whether there was one."""
        exists = self.stop_file.is_file()
        if exists:
            self.stop_file.unlink()
        return exists

    def commit(self, stage: StageDirectory) -> None:
        """Delete the backup of `open_for`, if `stage` has written a record or a checkpoint."""
        if self.backup.exists() and stage.started:
            self._delete_backup()

    def finished_model(self, stage: Stage, alternatives: str) -> str:
        """Return the model of a finished stage; `alternatives` are the settings that would replace it.

        Raises:
            RunError: the stage is not complete.
        """
        if not self.stage(stage).done:
            raise RunError(
                f"{self.path}: holds no finished {stage} stage to start from; "
                f"run `rlhf {stage}` first, or set {alternatives}"
            )
        return str(self.stage(stage).model)

    def check_rows(self, config: Config, data: Fingerprints) -> None:
        """Raise `RunError` if the rows of a source differ from those that `run.json` records for it."""
        recorded = self._read_description()
        if changed := find_changed_data(recorded, config, data):
            raise RunError(
                f"{self.path}: this run was made with other rows: {', '.join(changed)}; "
                "restore the original data, or choose another --output"
            )

    def check_models(self, config: Config, models: StartModels, stages: Collection[Stage] = EVERY_STAGE) -> None:
        """Raise `RunError` if a model differs from the one that `run.json` records for one of `stages`."""
        recorded = self._read_description()
        if changed := find_changed_models(recorded, config, models, stages):
            raise RunError(
                f"{self.path}: this run was made with other models: {', '.join(changed)}; "
                "restore the original models, or choose another --output"
            )

    def record_models(self, stage: Stage, models: Mapping[str, StartModel]) -> None:
        """Record in `run.json` the models that `stage` starts from."""
        recorded = self._read_description()
        of_stage = recorded.setdefault("stages", {}).setdefault(stage, {})
        if of_stage.get("models", {}) != _describe_models(models)["models"]:
            of_stage |= _describe_models(models)
            atomic_write_json(self.description, recorded)

    def _read_description(self) -> dict[str, Any]:
        """Return what `run.json` holds; empty if there is none, as in a script that trains a stage by itself."""
        return read_description(self.description) if self.description.is_file() else {}

    def describe_saved(self) -> str | None:
        """Return what is on disk, in one line, for a run that was stopped; None if nothing is saved."""
        saved = [f"{stage.name} is complete" for stage in self.stages if stage.done]
        for stage in self.stages:
            if not stage.done and stage.latest_checkpoint:
                saved.append(f"{stage.name} is saved up to {stage.latest_checkpoint.name}")
        return f"in {self.path}, {', '.join(saved)}" if saved else None

    def create_backup(self, stages: Sequence[Stage]) -> None:
        """Copy the run's description into the backup, then move the folders of `stages` into it."""
        self.backup.mkdir()
        for file in filter(Path.is_file, (self.recipe, self.description)):
            copy = self.backup / (file.name + PARTIAL)
            shutil.copy2(file, copy)
            os.rename(copy, self.backup / file.name)
        for stage in stages:
            os.rename(self.path / stage, self.backup / stage)
        sync(self.path)

    def _restore_backup(self) -> None:
        """Replace the run's contents by the backup, if there is one; if killed, the next process completes this."""
        refuse_link(self.backup)
        if not self.backup.exists():
            return
        paths = list(self.backup.iterdir())
        if {path.name for path in paths} & {self.recipe.name, self.description.name} == {self.description.name}:
            self.recipe.unlink(missing_ok=True)  # it is the new run's; `ensure_recipe` could not write the old one
        for path in paths:
            target = self.path / path.name
            if path.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                os.rename(path, target)
            elif path.suffix != PARTIAL:
                os.replace(path, target)
        shutil.rmtree(self.backup)
        sync(self.path)

    def _delete_backup(self) -> None:
        if self.backup.exists():
            remove_folder(self.backup)  # a backup that is half deleted must not be restored

    def _remaining(self, stages: Sequence[Stage], overwrite: bool) -> list[StageDirectory]:
        """Return the stages on disk that remain when `stages` are run."""
        return [stage for stage in self.stages if stage.started and not (overwrite and stage.name in stages)]

    def _check_same_settings(
        self,
        config: Config,
        stages: Sequence[Stage],
        remaining: Sequence[StageDirectory],
        precision: str | None,
        data: Fingerprints,
    ) -> None:
        """Raise `RunError` if the run was made with other settings or other rows."""
        recorded = read_description(self.description)
        kept_stages = [stage.name for stage in remaining if stage.done or stage.name not in stages]
        complete = [name for name in kept_stages if name in stages]
        resumed = [stage.name for stage in remaining if stage.name not in kept_stages]
        if differences := find_differences(recorded, config, resumed, precision, kept=kept_stages):
            raise RunError(
                f"{self.path}: this run was made with other settings: {', '.join(differences)}; "
                "give the same settings or choose another --output"
            )
        self.check_rows(config, data)
        only_complete = len(complete) == len(stages)
        if differences := find_differences_in_complete(recorded, config, complete, only_complete=only_complete):
            raise RunError(
                f"{self.path}: complete stages were trained with other settings: {', '.join(differences)}; "
                "use these, train again with --overwrite, or choose another --output"
            )

    def _begin(
        self,
        config: Config,
        stages: Sequence[Stage],
        overwrite: bool,
        accelerator: dict[str, Any] | None,
        data: Fingerprints | None,
        models: StartModels | None,
    ) -> None:
        """Create the backup, remove incomplete files, and write `run.json` and `recipe.yaml`.

        Records of stages that are not run now do not change.
        """
        recorded: dict[str, Any] = {}
        try:
            if self._holds_run():
                recorded = read_description(self.description)
                self.ensure_recipe()
                self.create_backup([name for name in stages if overwrite and self.stage(name).started])
            self._remove_unstarted(stages)
            self._remove_partial()
            started = [stage for stage in self.stages if stage.started]
            kept_stages = [stage.name for stage in started if stage.done or stage.name not in stages]
            settings = config.model_dump(mode="json")
            settings |= {name: value for name, value in recorded.get("config", {}).items() if name in kept_stages}
            of_stages = {name: value for name, value in recorded.get("stages", {}).items() if name in kept_stages}
            of_stages |= {
                name: stage_settings(config, name, _precision(accelerator))
                | _describe_models((models or {}).get(name, {}))
                for name in stages
                if name not in kept_stages
            }
            invocation = {
                "command": get_command_line(),
                "stages": list(stages),
                "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
            description = {
                "config": settings,
                "seed": config.seed,
                "accelerator": accelerator,
                "stages": of_stages,
                "data": {**(recorded.get("data", {}) if started else {}), **(data or {})},
                "versions": collect_versions(),
                "invocations": [*(recorded.get("invocations", []) if started else []), invocation],
            }
            atomic_write_json(self.description, description)
            write_recipe(self.recipe, settings)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); choose another --output") from error

    def _refuse_links(self) -> None:
        """Raise `RunError` if a file or folder that a run writes, moves or deletes is a link."""
        files = (self.recipe.name, self.description.name, self.report.name)
        names = (*files, self.backup.name, CONSOLE, *LOCK_FILES, *EVERY_STAGE)
        paths = [
            *(self.path / name for name in names),
            *self.path.glob(f"*{PARTIAL}"),
            *self.path.glob("traceback*.txt"),
        ]
        for stage in self.stages:
            refuse_link(stage.path)
            paths += [*stage.path.glob("*"), *stage.checkpoints.glob("*"), *stage.best.glob("*")]
        for path in paths:
            refuse_link(path)

    def _remove_unstarted(self, stages: Sequence[Stage]) -> None:
        """Remove the folders of `stages` that contain no step yet."""
        for stage in map(self.stage, stages):
            if not stage.started:
                shutil.rmtree(stage.path, ignore_errors=True)

    def _remove_partial(self) -> None:
        """Remove what a crash left half-written."""
        for stage in self.stages:
            if stage.done:
                stage.remove_candidates()
            # Also checkpoints, and the cards of models, which are written after a stage is complete.
            for path in (*stage.path.glob(f"*{PARTIAL}"), *stage.path.glob(f"*/*{PARTIAL}")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.report.with_name(self.report.name + PARTIAL).unlink(missing_ok=True)

    def _holds_run(self) -> bool:
        """Return True if the folder is a run's, False if it does not exist or is empty.

        Raises:
            RunError: it holds something else.
        """
        if self.description.is_file():
            return True
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: is a file; choose a folder with --output")
        # Files that may remain from a run that could not start.
        partial = (self.recipe.name + PARTIAL, self.description.name + PARTIAL)
        known = ("traceback*.txt", STACKS, CONSOLE, self.stop_file.name, SECRET_FILE, *LOCK_FILES, *partial)
        files = self.path.iterdir() if self.path.is_dir() else ()
        if not all(any(path.match(name) for name in known) for path in files):
            raise RunError(
                f"{self.path}: is not empty and holds no run (no run.json), so nothing is written there; "
                "choose another --output"
            )
        return False


def find_run(path: Path | str) -> RunDirectory | None:
    """Return the run that contains `path` (a run, a stage or a model), or None."""
    folders = (Path(path), *Path(path).resolve().parents[:2])
    return next((run for run in map(RunDirectory, folders) if run.description.is_file()), None)


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a run's numbers."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed as a distribution"
    return versions


def _describe_models(models: Mapping[str, StartModel]) -> dict[str, Any]:
    """Return the entry of `run.json` about the models that a stage starts from."""
    return {"models": {key: model._asdict() for key, model in models.items()}}


def _precision(accelerator: dict[str, Any] | None) -> str | None:
    """Return what `precision: auto` resolved to."""
    return accelerator["precision"]["name"] if accelerator else None
