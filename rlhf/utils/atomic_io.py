"""Write files and folders atomically: each is completed next to its final name, then renamed."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from rlhf.errors import RunError
from rlhf.utils.full_disk import WaitingFile
from rlhf.utils.manifest import write_manifest

PARTIAL = ".partial"
"""The suffix of unfinished files and folders; after a crash they can be deleted."""

PICKLE_PROTOCOL = 2
"""For torch.save: the only one that torch.load reads without code. A device's software may change the default."""

CONSOLE = "console.log"
"""The file with a run's output in its folder, if its caller (`rlhf sweep`) stores it."""

STACKS = "stacks"
"""The folder, in that of a run, with the stacks of ranks that were ended because they hung."""


def refuse_link(path: Path) -> None:
    """Raise `RunError` if `path` is a link, which may lead to a file that is not the run's."""
    if path.is_symlink():
        raise RunError(f"{path}: is a link to {os.readlink(path)}, and runs do not write through links; remove it")


def open_no_link(path: Path, mode: Literal["a", "w"]) -> TextIO:
    """Open a text file of a run for writing; its writes wait for room on a full disk.

    Raises:
        RunError: it is a link.
        OSError: it cannot be written.
    """
    try:
        raw = WaitingFile(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
    except OSError:
        refuse_link(path)
        raise
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file that this package wrote.

    Raises:
        RunError: the file cannot be read, or was changed into something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); check the folder") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: is not readable as JSON ({error}); restore it or choose another --output") from error
    if not isinstance(value, dict):
        raise RunError(f"{path}: expected an object, got a {type(value).__name__}; choose another --output")
    return value


def check_writable(folder: Path, option: str = "--output") -> None:
    """Raise `RunError` if `folder` cannot be written to or created; `option` names another."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        reason = "is a file"
    elif os.access(place, os.W_OK | os.X_OK):
        return
    else:
        reason = "is read-only" if os.statvfs(place).f_flag & os.ST_RDONLY else "is not yours"
    raise RunError(f"{folder}: cannot be written ({place} {reason}); choose another {option}")


def atomic_write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as JSON; `path` has either all of it or its previous contents."""
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def atomic_write(path: Path, text: str) -> None:
    """Write `text`; `path` has either all of it or its previous contents."""
    with atomic_file(path) as temporary, open_no_link(temporary, "w") as file:
        file.write(text)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that becomes `path` when the block ends, and is deleted if it fails."""
    temporary = path.with_name(path.name + PARTIAL)
    refuse_link(temporary)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk it would take needed space
        raise
    sync(path.parent)


@contextmanager
def atomic_directory(path: Path, *, manifest: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends, and is deleted if it fails.

    With `manifest`, the last file written to it is its manifest (`rlhf.utils.manifest`).
    """
    temporary = path.with_name(path.name + PARTIAL)
    refuse_link(temporary)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if manifest:
            write_manifest(temporary)
        atomic_rename_dir(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def atomic_rename_dir(temporary: Path, path: Path) -> None:
    """Give a finished folder its final name, after its contents have reached the disk.

    An older folder of that name is replaced.
    """
    for folder, _, files in os.walk(temporary):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    old = path.with_name(path.name + ".old" + PARTIAL)
    refuse_link(path)
    refuse_link(old)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)  # a folder cannot be replaced in one step
    os.rename(temporary, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder; what is left after an interruption has another name, and the next start deletes it."""
    removed = path.with_name(path.name + PARTIAL)
    refuse_link(path)
    refuse_link(removed)
    shutil.rmtree(removed, ignore_errors=True)
    os.rename(path, removed)
    shutil.rmtree(removed, ignore_errors=True)


def drop_from_memory(path: Path) -> None:
    """Flush a file to the disk and let the system forget it, so that the next reader reads the disk.

    Some file systems, and other systems than Linux, may still answer from memory.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_back_error(path: Path) -> RunError:
    """Return the error for a file that reads as other bytes than were written."""
    return RunError(f"{path}: the disk returns other bytes than were written to it; check the disk, and resume")


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
