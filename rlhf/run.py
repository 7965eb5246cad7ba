"""A run's folder on disk: what it holds, who may write to it, and how files appear in it.

A `Config` and the wish to resume or overwrite flow in; out comes a `RunDirectory` whose stages each have
their own folder. Nothing here is ever half-written: files and folders are completed beside their final
name, then renamed.
"""

from __future__ import annotations

import json
import os
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

from rlhf.config import STAGES, Config, Stage
from rlhf.errors import RunError

_PARTIAL = ".partial"
_PACKAGES = ("rlhf", "torch", "deepspeed", "transformers", "peft")
# Keys that may differ when a stage is resumed: they change where, how long and how often, not what is learned.
_HARMLESS = {"output", "accelerator", "log_every", "checkpoint_every", "steps", "epochs", "max_steps"}
# Sections that all stages of one run share: they decide which rows each stage sees and which model it starts from.
_SHARED = ("seed", "model", "data")


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
        """Whether there is anything here to lose: results, a checkpoint, or a first record."""
        recorded = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return self.done or recorded or self.latest_checkpoint is not None

    @property
    def done(self) -> bool:
        """Whether the stage ran to its end: `finish` was called."""
        return self._summary.is_file()

    @property
    def all_checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*") if path.suffix != _PARTIAL)

    @property
    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return max(self.all_checkpoints, default=None)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write `stage.json`, which marks the stage as complete. Rank 0 calls it, last of all."""
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write_json(self._summary, summary)

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

        Reads only; `begin` writes. A stage that the run does not hold yet is a continuation: it needs
        neither `resume` nor `overwrite`.

        Raises:
            RunError: the folder is not a run's, holds one of `stages` already, or was made with other settings.
        """
        run = cls(config.output)
        if resume and overwrite:
            raise RunError("--resume and --overwrite: one continues a run, the other replaces it; give one of them")
        if not run._holds_a_run():
            return run
        present = [stage for stage in run.stages if stage.begun]
        if overwrite:
            present = [stage for stage in present if stage.name not in stages]
        taken = [stage for stage in present if stage.name in stages]
        if taken and not resume:
            held = ", ".join(f"{stage.name} ({'complete' if stage.done else 'not complete'})" for stage in taken)
            raise RunError(
                f"{run.path}: holds a run already: {held}; "
                "continue it with --resume, replace it with --overwrite, or choose another --output"
            )
        if present:
            run._check_same_settings(config, [stage.name for stage in taken if not stage.done])
        return run

    def begin(
        self,
        config: Config,
        *,
        stages: Sequence[Stage] = STAGES,
        overwrite: bool = False,
        accelerator: dict[str, Any] | None = None,
    ) -> None:
        """Write `run.json`; with `overwrite`, remove the folders of `stages` first. Rank 0 calls it, after `check`.

        Sections of stages that are not run now keep what the run recorded for them.

        Raises:
            RunError: the folder cannot be written.
        """
        held = self._holds_a_run()
        recorded: dict[str, Any] = read_json(self.description) if held else {}
        for stage in self.stages if held else []:
            if stage.name in stages and (overwrite or not stage.begun):
                shutil.rmtree(stage.path, ignore_errors=True)
        resolved = config.model_dump(mode="json")
        for stage in self.stages:
            if stage.begun and stage.name not in stages:
                resolved[stage.name] = recorded.get("config", {}).get(stage.name, resolved[stage.name])
        invocation = {
            "command": shlex.join(["rlhf", *sys.argv[1:]]),
            "stages": list(stages),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        earlier = recorded.get("invocations", []) if any(stage.begun for stage in self.stages) else []
        description = {
            "config": resolved,
            "seed": config.seed,
            "accelerator": accelerator,
            "versions": versions(),
            "invocations": [*earlier, invocation],
        }
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            atomic_write_json(self.description, description)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); choose another --output") from error

    def abandon(self, stages: Sequence[Stage] = STAGES) -> None:
        """Remove what `begin` and `stages` left where no stage got as far as its first record."""
        for stage in self.stages:
            if stage.name in stages and not stage.begun:
                shutil.rmtree(stage.path, ignore_errors=True)
        if self.description.is_file() and not any(stage.begun for stage in self.stages):
            self.description.unlink()
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def saved_state(self) -> str:
        """One line on what is on disk, for a run that was stopped."""
        kept = [f"{stage.name} is complete" for stage in self.stages if stage.done]
        for stage in self.stages:
            if not stage.done and stage.latest_checkpoint:
                kept.append(f"{stage.name} is saved up to {stage.latest_checkpoint.name}")
        if not kept:
            return f"nothing is saved yet in {self.path}; <stage>.checkpoint_every sets the steps between checkpoints"
        return f"in {self.path}, {', '.join(kept)}; continue with --resume"

    def _holds_a_run(self) -> bool:
        """Whether the folder is a run's; False where it is absent or empty.

        Raises:
            RunError: it holds something else.
        """
        if self.description.is_file():
            return True
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: is a file; choose a folder with --output")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise RunError(
                f"{self.path}: is not empty and holds no run (no run.json), so nothing is written there; "
                "choose another --output"
            )
        return False

    def _check_same_settings(self, config: Config, resumed: Sequence[Stage]) -> None:
        recorded = read_json(self.description).get("config", {})
        now = config.model_dump(mode="json")
        keys = [*_SHARED, *(("engine", "precision", "lora", *resumed) if resumed else ())]
        differing = [text for key in keys for text in _differences(recorded.get(key), now[key], key)]
        if differing:
            raise RunError(
                f"{self.path}: this run was made with other settings: {', '.join(differing)}; "
                "give the same settings or choose another --output"
            )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a distribution"
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that this package wrote.

    Raises:
        RunError: the file cannot be read, or was changed into something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); check the folder") from error
    except ValueError as error:
        raise RunError(f"{path}: is not readable as JSON ({error}); restore it or choose another --output") from error
    if not isinstance(value, dict):
        raise RunError(f"{path}: expected an object, found a {type(value).__name__}; choose another --output")
    return value


def atomic_write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` so that `path` holds all of it or what it held before."""
    temporary = path.with_name(path.name + _PARTIAL)
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends, and vanishes when it fails."""
    temporary = path.with_name(path.name + _PARTIAL)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished folder its final name, after its contents have reached the disk.

    An older folder of that name is replaced.
    """
    for folder, _, files in os.walk(temporary):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))
    old = path.with_name(path.name + ".old" + _PARTIAL)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)  # a folder cannot be replaced in one step
    os.rename(temporary, path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _differences(there: Any, now: Any, key: str = "") -> list[str]:
    """Leaves that differ between two dumped configurations, as `key (recorded there, given now)`."""
    if key.rpartition(".")[2] in _HARMLESS:
        return []
    if isinstance(there, dict) and isinstance(now, dict):
        names = sorted(there.keys() | now.keys())
        return [
            text
            for name in names
            for text in _differences(there.get(name), now.get(name), f"{key}.{name}" if key else name)
        ]
    if isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        return [
            text for i, pair in enumerate(zip(there, now, strict=True)) for text in _differences(*pair, f"{key}.{i}")
        ]
    return [] if there == now else [f"{key} ({there!r} there, {now!r} now)"]
