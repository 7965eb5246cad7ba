"""What a new run may replace, set aside until the new run has something to show.

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
    """The place in `run` for what may come back; absent where there is nothing."""

    run: Path

    @property
    def path(self) -> Path:
        return self.run / ".rlhf.replaced"

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def create(self, files: Iterable[Path], folders: Sequence[str]) -> None:
        """Set aside copies of `files`, then the `folders` of the run themselves."""
        self.path.mkdir()
        for file in files:
            copy = self.path / (file.name + PARTIAL)
            shutil.copy2(file, copy)
            os.rename(copy, self.path / file.name)
        for folder in folders:
            os.rename(self.run / folder, self.path / folder)
        sync(self.run)

    def restore(self) -> None:
        """Put back what is here, if anything, in the place of what is there now.

        It may be killed too, and is then done by the next process.
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
        """Delete what is here, if anything."""
        if self.exists:
            discarded = self.path.with_name(self.path.name + PARTIAL)
            shutil.rmtree(discarded, ignore_errors=True)
            os.rename(self.path, discarded)  # half of it deleted, it must not come back
            shutil.rmtree(discarded, ignore_errors=True)
