"""Stacks of a rank that does not end: the lines that all of its threads run, in the run's folder.

A thread of the rank writes them before it ends the process; if that thread cannot run, because the main thread holds
the interpreter's lock, the launcher's SIGUSR2 does.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.utils.atomic_io import STACKS, open_no_link, refuse_link

SIGNAL = signal.SIGUSR2
_files: list[int] = []  # descriptors, of nested runs the last one


@contextmanager
def keep_stacks(folder: Path, rank: int) -> Iterator[None]:
    """While the block runs, let `write_stacks` and SIGUSR2 write to `folder/stacks/rankN.txt`.

    The file is removed if nothing was written.
    """
    refuse_link(folder / STACKS)
    (folder / STACKS).mkdir(parents=True, exist_ok=True)
    path = folder / STACKS / f"rank{rank}.txt"
    with open_no_link(path, "w") as file:
        _files.append(file.fileno())
        faulthandler.register(SIGNAL, file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(SIGNAL)
            _files.pop()
            if not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # other ranks have files there
                path.parent.rmdir()


def write_stacks() -> None:
    """Write the stacks of all threads, if a block of `keep_stacks` runs."""
    if _files:
        faulthandler.dump_traceback(_files[-1], all_threads=True)
