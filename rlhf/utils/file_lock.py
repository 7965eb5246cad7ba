"""One writer to a folder: a lock that ends with the process that holds it, however that process ends.

The lock is the kernel's, on a file in the folder that names its owner for those who are refused. A dead owner
holds nothing, so its file does not have to be removed by hand.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from rlhf.errors import RunError

LOCK = ".rlhf.lock"
_SECONDS_TO_SHOW = 10.0
# File systems without locks; there, the owner that the file names is believed.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, made where it is absent, and removed again where it is left empty.

    Raises:
        RunError: another process holds the lock, or the folder cannot be written.
    """
    path, made, owner = folder / LOCK, not folder.exists(), os.getpid()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from error
    try:
        yield
    finally:
        if os.getpid() == owner:  # and not one that was forked from it
            path.unlink(missing_ok=True)  # while held; what forked processes inherited locks a file that is gone
        os.close(descriptor)
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def wait_for_owner(folder: Path, owner: str) -> bool:
    """Whether the lock of `folder` is the one of `owner`; on a network's file system it may take a while to show."""
    deadline = time.monotonic() + _SECONDS_TO_SHOW
    while read_owner(folder) != owner:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def read_owner(folder: Path) -> str:
    """The owner that the lock of `folder` names; empty where it has none."""
    with suppress(OSError):
        os.listdir(folder)  # asks the server anew
        return (folder / LOCK).read_text(errors="replace").strip()
    return ""


def _acquire(path: Path) -> int:
    """A descriptor of the locked file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _owner(descriptor) or "another process"
            os.close(descriptor)
            raise RunError(
                f"{path.parent}: {owner} is writing to this folder; let it end, or choose another --output"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            _say_unlocked(path.parent)
            if _may_live(owner := _owner(descriptor)):
                os.close(descriptor)
                raise RunError(
                    f"{path.parent}: {owner} may be writing to this folder; let it end, choose another --output, "
                    f"or delete {path} if it has ended"
                ) from error
        if _is_still(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return descriptor
        os.close(descriptor)  # its owner ended between our two calls, and the file with it


def _owner(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace").strip()


def _may_live(owner: str) -> bool:
    """Whether the process that a lock file names may be writing; on another host nobody can tell."""
    named = re.fullmatch(r"process (\d+) on (.+)", owner)
    if not named or int(named[1]) == os.getpid():
        return False
    if named[2] != socket.gethostname():
        return True
    try:
        os.kill(int(named[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


@cache
def _say_unlocked(folder: Path) -> None:
    print(f"rlhf: note: {folder} cannot be locked on this file system; start one run at a time there", file=sys.stderr)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
