"""Keep what a new run replaces until the new run has recorded a step or a checkpoint.

Folders are moved within the run's folder, so nothing is copied and nothing can be lost: a process that is killed
in between leaves them where the next one finds them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.utils.atomic_io import PARTIAL, sync


@dataclass(frozen=True)
class Backup:
    """The folder in `run` with what may be restored; it does not exist if there is nothing."""

    run: Path

    @property
    def path(self) -> Path:
        """The backup folder."""
        return self.run / ".rlhf.replaced"

    @property
    def exists(self) -> bool:
        """True if there is a backup."""
        return self.path.exists()

    def create(self, files: Iterable[Path], folders: Sequence[str]) -> None:
        """Copy `files` into the backup, then move `folders` of the run into it."""
        self.path.mkdir()
        for file in files:
            copy = self.path / (file.name + PARTIAL)
            shutil.copy2(file, copy)
            os.rename(copy, self.path / file.name)
        for folder in folders:
            os.rename(self.run / folder, self.path / folder)
        sync(self.run)

    def restore(self) -> None:
        """Restore the backup, if there is one, replacing what is in the run now.

        If this is killed too, the next process completes it.
        """
        if not self.exists:
            return
        for path in self.path.iterdir():
            place = self.run / path.name
            if path.is_dir():
                shutil.rmtree(place, ignore_errors=True)
                os.rename(path, place)
            elif path.suffix != PARTIAL:
                os.replace(path, place)
        shutil.rmtree(self.path)
        sync(self.run)

    def delete(self) -> None:
        """Delete the backup, if there is one."""
        if self.exists:
            discarded = self.path.with_name(self.path.name + PARTIAL)
            shutil.rmtree(discarded, ignore_errors=True)
            os.rename(self.path, discarded)  # a backup that is half deleted must not be restored
            shutil.rmtree(discarded, ignore_errors=True)
