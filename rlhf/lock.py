"""One writer to a folder: a lock that ends with the process that holds it, however that process ends.

The lock is the kernel's, on a file in the folder that names its owner for those who are refused. A dead owner
holds nothing, so its file does not have to be removed by hand.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.errors import RunError

LOCK = ".rlhf.lock"
# File systems without locks; there, nobody is refused.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, made where it is absent, and removed again where it is left empty.

    Raises:
        RunError: another process holds the lock, or the folder cannot be written.
    """
    path, made = folder / LOCK, not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while held; what forked processes inherited locks a file that is gone
        os.close(descriptor)
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _acquire(path: Path) -> int:
    """A descriptor of the locked file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 1000).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise RunError(
                f"{path.parent}: {owner} is writing to this folder; let it end, or choose another --output"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
        if _is_still(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return descriptor
        os.close(descriptor)  # its owner ended between our two calls, and the file with it


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
