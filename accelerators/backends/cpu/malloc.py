"""Settings of the C library's heap for tensors on the host.

By default glibc maps every large block separately and unmaps it when it is freed. Each tensor of a step then consists
of pages that the system clears first, which takes longer than most operators on it. With `keep_freed`, freed blocks
stay with the process for the next tensor, until `trim`. Other C libraries stay unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_NEVER = -1  # as an unsigned number, the largest


def keep_freed() -> bool:
    """Let the process keep freed memory; return whether it will."""
    library = _glibc()
    if library is None:
        return False
    # The heap grows in steps that are small compared with a model.
    return bool(
        library.mallopt(_M_MMAP_MAX, 0)
        and library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        and library.mallopt(_M_TOP_PAD, 2**26)
    )


def trim() -> None:
    """Return unused memory to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)
