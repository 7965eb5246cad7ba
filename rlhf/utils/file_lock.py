"""One writer per folder: a lock that ends with the process that holds it, however that process ends.

`filelock` locks a file in the folder, and a second file names the owner for processes that are refused. The lock of a
dead owner is free, so neither file has to be removed by hand. On file systems without locks the lock file itself is the
lock: `filelock` then reads its owner from it, and removes that of a process that has ended on the same host.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Literal

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from rlhf.errors import RunError
from rlhf.utils.atomic_io import open_no_link, refuse_link

LOCK = ".rlhf.lock"
OWNER = ".rlhf.lock.owner"
LOCK_FILES = (LOCK, OWNER)
_SECONDS_TO_APPEAR = 10.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is created if it does not exist, and removed again if it is left empty.

    Raises:
        RunError: another process holds the lock, its file is a link, or the folder cannot be written.
    """
    is_new, pid = not folder.exists(), os.getpid()
    for name in LOCK_FILES:
        refuse_link(folder / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire(folder)
        with suppress(OSError), open_no_link(folder / OWNER, "w") as file:  # the name is only for messages
            file.write(f"process {pid} on {socket.gethostname()}\n{read_start(pid)}\n")
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from error
    try:
        yield
    finally:
        if os.getpid() == pid:  # not in a process that was forked from it
            (folder / OWNER).unlink(missing_ok=True)
            if not isinstance(lock, SoftFileLock):
                (folder / LOCK).unlink(missing_ok=True)  # while locked; `filelock` refuses a file that is gone
            lock.release()
            if is_new:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


def wait_for_owner(folder: Path, owner: str) -> bool:
    """Return whether the lock of `folder` belongs to `owner`; network file systems may show that only after a while."""
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while read_owner(folder) != owner:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def read_owner(folder: Path) -> str:
    """Return the owner of the lock of `folder`; empty if there is none."""
    return _read_lines(folder)[0]


def find_owner(folder: Path) -> Literal["alive", "elsewhere", "none"]:
    """Return where the process is that writes to `folder`, without taking its lock.

    A process on another host may be alive or dead.
    """
    owner, start = _read_lines(folder)
    if not (match := re.fullmatch(r"process (\d+) on (.+)", owner)):
        return "none"
    pid, host = int(match[1]), match[2]
    if host != socket.gethostname():
        return "elsewhere"
    if start and read_start(pid) not in ("", start):  # a later process has its number
        return "none"
    try:
        os.kill(pid, 0)
    except PermissionError:
        return "alive"
    except (ProcessLookupError, OverflowError):
        return "none"
    return "alive"


def read_start(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot of this host; empty if that cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _read_lines(folder: Path) -> tuple[str, str]:
    """Return the owner of the lock and when it started; empty texts if there is none."""
    with suppress(OSError):
        os.listdir(folder)  # makes a network file system ask the server again
        owner, _, start = (folder / OWNER).read_text(errors="replace").strip().partition("\n")
        return owner, start
    return "", ""


def _acquire(folder: Path) -> BaseFileLock:
    path, remedy = folder / LOCK, "let it end, or choose another --output"
    is_new = not path.exists()
    lock: BaseFileLock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        try:
            lock.acquire()
        except OSError as error:
            if isinstance(error, Timeout) or error.errno not in _NO_LOCKS:
                raise
            _note_missing_locks(folder)
            remedy = f"let it end, choose another --output, or delete {path} if it has ended"
            if is_new:
                path.unlink(missing_ok=True)  # the failed attempt's; empty, it would count as a lock without an owner
            lock = SoftFileLock(path, timeout=0, thread_local=False)
            lock.acquire()
    except Timeout as error:
        owner = read_owner(folder) or "another process"
        raise RunError(f"{folder}: {owner} is writing to this folder; {remedy}") from error
    return lock


@cache
def _note_missing_locks(folder: Path) -> None:
    print(f"rlhf: note: {folder} cannot be locked on this file system; start one run at a time there", file=sys.stderr)
