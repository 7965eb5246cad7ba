"""The checkpoints of a run as a person manages them: list and verify them, remove some, or resume from an older one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rlhf.config.schema import Stage
from rlhf.errors import RunError
from rlhf.runs.directory import RunDirectory
from rlhf.runs.stage_directory import StageDirectory, parse_step
from rlhf.utils.atomic_io import remove_folder
from rlhf.utils.file_lock import lock_folder
from rlhf.utils.manifest import MANIFEST, find_damage
from rlhf.utils.process_info import current_process

_NEWER = ".newer"  # suffix of checkpoints that are set aside
_SECONDS_TO_CHOOSE = 60.0  # for rank 0 to set them aside


@dataclass(frozen=True)
class SavedFolder:
    """A checkpoint or a saved model of a stage, or its records.

    Attributes:
        name: `step-00000012`, `model`, `critic`, ...; `stage.json` for the records of a complete stage.
        bytes: of all its files.
        written: seconds since the epoch.
        damage: what differs from its digests; empty if nothing does.
    """

    stage: Stage
    name: str
    path: Path
    bytes: int
    written: float
    damage: str

    @property
    def is_checkpoint(self) -> bool:
        """True for a checkpoint, False for a model."""
        return self.path.parent.name == "checkpoints"


def list_saved(run: RunDirectory, *, verify: bool = False) -> list[SavedFolder]:
    """Return the checkpoints of a run, oldest first in each stage, and with `verify` also its models and records.

    The sizes of files are compared with the manifests, and with `verify` their contents.

    Raises:
        RunError: the folder contains no run.
    """
    if not run.description.is_file():
        raise RunError(f"{run.path}: contains no run")
    saved: list[SavedFolder] = []
    for stage in run.stages:
        models = [path.parent for path in sorted(stage.path.glob(f"*/{MANIFEST}"))] if verify else []
        for path in [*stage.all_checkpoints, *models]:
            with suppress(FileNotFoundError):  # a run in progress removes its older checkpoints
                damage = find_damage(path, lambda name: verify) or ""
                item = _describe(stage, path, [file for file in path.rglob("*") if file.is_file()], damage)
                if path.is_dir():
                    saved.append(item)
        if verify and stage.done:
            saved.append(_describe(stage, stage.path / "stage.json", stage.list_records(), stage.find_damage() or ""))
    return saved


def _describe(stage: StageDirectory, path: Path, files: Sequence[Path], damage: str) -> SavedFolder:
    states = [file.stat() for file in files]
    size, written = sum(state.st_size for state in states), max((state.st_mtime for state in states), default=0.0)
    return SavedFolder(stage.name, path.name, path, size, written, damage)


def remove_checkpoints(
    run: RunDirectory, names: Sequence[str], *, stage: str | None = None, last: bool = False
) -> list[Path]:
    """Delete checkpoints by their names, and return their folders.

    Args:
        stage: the stage that they belong to; needed if several have one of the same name.
        last: also the last undamaged one of a stage.

    Raises:
        RunError: there is none of a name, several stages have one, a stage would keep no undamaged one, or a process
            writes to the run. Nothing is deleted then.
    """
    with lock_folder(run.path):
        saved = [item for item in list_saved(run) if stage in (None, item.stage)]
        chosen = [item for item in saved if item.name in names]
        _check_names(run, names, [item.name for item in saved])
        for name in names:
            if len(stages := [item.stage for item in chosen if item.name == name]) > 1:
                raise RunError(f"{run.path}: {' and '.join(stages)} have a checkpoint {name}; choose with --stage")
        for owner in {item.stage for item in chosen}:
            good = [item for item in saved if item.stage == owner and not item.damage]
            if not last and good and all(item in chosen for item in good):
                raise RunError(
                    f"{good[-1].path}: is the last undamaged checkpoint of {owner}, without which it starts again; "
                    "to remove it anyway, add --last"
                )
        for item in chosen:
            remove_folder(item.path)
    return [item.path for item in chosen]


@contextmanager
def resume_from(
    run: RunDirectory, name: str, stages: Sequence[Stage], announce: Callable[[str], None]
) -> Iterator[None]:
    """Set aside the checkpoints that are newer than the one of this name, so that its stage resumes from it.

    They are renamed, and no longer count. If the block fails before the run has started, they get their names back.
    Every rank opens the block before it looks at checkpoints; rank 0 acts.

    Args:
        announce: receives a line for each change.

    Raises:
        RunError: none of `stages` is incomplete and has such a checkpoint, or a process writes to the run.
    """
    pending = [run.stage(stage) for stage in stages if not run.stage(stage).done]
    owners = [stage for stage in pending if any(path.name == name for path in stage.all_checkpoints)]
    if not owners:
        _check_names(run, [name], [path.name for stage in pending for path in stage.all_checkpoints])
    stage = owners[-1]
    if current_process().rank:
        deadline = time.monotonic() + _SECONDS_TO_CHOOSE
        while _list_newer(stage, name) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield
        return
    with lock_folder(run.path):
        newer = {path: _find_free_name(path) for path in _list_newer(stage, name)}
        for path, aside in newer.items():
            os.rename(path, aside)
        description = run.read_description_bytes()
    names = ", ".join(path.name for path in newer)
    if newer:
        announce(f"{stage.name}: resumes from {name}; {names} set aside ({_NEWER})")
    try:
        yield
    except BaseException:
        if newer and run.read_description_bytes() == description:
            with lock_folder(run.path):
                for path, aside in newer.items():
                    os.rename(aside, path)
            announce(f"{stage.name}: nothing was started, so {names} {'counts' if len(newer) == 1 else 'count'} again")
        raise


def _list_newer(stage: StageDirectory, name: str) -> list[Path]:
    return [path for path in stage.all_checkpoints if parse_step(path) > parse_step(Path(name))]


def _find_free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{_NEWER}{number or ''}") for number in count())
    return next(name for name in names if not name.exists())


def _check_names(run: RunDirectory, names: Sequence[str], existing: Sequence[str]) -> None:
    if missing := [name for name in names if name not in existing]:
        there = f"there are {', '.join(dict.fromkeys(existing))}" if existing else "it has none"
        raise RunError(f"{run.path}: has no checkpoint {missing[0]} to use; {there}")
