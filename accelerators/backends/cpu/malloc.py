"""The C library's heap, made to suit tensors on the host.

glibc gives every large block its own mapping and takes it away when it is freed: each tensor of a step is then made of
pages that the system has to clear first, which costs more than most operators on it. Blocks that are freed here stay
with the process for the next tensor, until `trim`. Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_NEVER = -1  # as an unsigned number, the largest


def keep_freed() -> bool:
    """Have the process keep what is freed; whether it will."""
    library = _glibc()
    if library is None:
        return False
    # The heap grows in steps that are small beside a model.
    return bool(
        library.mallopt(_M_MMAP_MAX, 0)
        and library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        and library.mallopt(_M_TOP_PAD, 2**26)
    )


def trim() -> None:
    """Give back to the system what is kept and not in use."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)
