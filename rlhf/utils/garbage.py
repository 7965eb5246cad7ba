"""The garbage collector while a command imports libraries, which create a million objects that no one deletes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collect_nothing_imported() -> Iterator[None]:
    """Collect no garbage while this block imports torch and what needs it, and exempt its objects afterwards.

    Searching them for garbage would take a fifth of the time of the imports, and again in each later collection. If
    torch is imported already, this does nothing: the caller may have models, which must not be exempt.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
