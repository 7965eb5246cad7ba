"""Runs the code of plugins while backends are discovered, so that one of them can neither stop nor garble the others.

In: a function of a plugin. Out: what it returns, or one `PluginError` with the reason as one line. Here is also what
can be told of any exception: its text, where it came from, and whether memory was lacking.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from accelerators.types import one_line

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

TIME_LIMIT_ENV = "RLHF_PROBE_TIMEOUT"

_NO_MEMORY = re.compile(r"OutOfMemory|out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


class Judge(Protocol):
    """What can tell of an error whether memory was lacking: a backend."""

    def is_out_of_memory(self, error: BaseException) -> bool: ...


_backend: weakref.ref[Judge] | None = None
_judging = threading.local()


class PluginError(Exception):
    """Code of a plugin failed, or did not come to an end; the message is one line."""


def within(limit: float | None, what: str, task: Callable[[], Result]) -> Result:
    """What `task` returns in at most `limit` seconds; `what` names it in messages.

    It runs in a thread. One that hangs (a driver that does not answer) is left behind and does not keep the process
    from ending; code that hangs without giving up Python's global lock cannot be left behind, and is waited for.

    Raises:
        PluginError: it failed in any way, also by exiting, or took longer.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(task())
        except BaseException as error:  # nobody presses Ctrl-C in this thread: whatever comes is the plugin's
            failures.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(limit)
    if results:
        return results[0]
    if failures:
        raise PluginError(f"{what} failed ({text(failures[0])})") from failures[0]
    raise PluginError(
        f"{what} did not answer within {limit:g} s; the driver may hang ({TIME_LIMIT_ENV} sets the limit)"
    )


@contextlib.contextmanager
def noticed(what: str, limit: float) -> Iterator[None]:
    """Warn where this block has not ended after `limit` seconds; for code that must run in the thread of the run."""
    timer = threading.Timer(limit, logger.warning, ["%s (for %g s now)", what, limit])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to standard error what is printed in this block, by Python, by libraries and by child processes.

    Standard output belongs to a command's result, which other programs may read.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a process without standard output or standard error
            saved = os.dup(1)
            stack.callback(os.close, saved)
            _flush()
            os.dup2(2, 1)
            stack.callback(os.dup2, saved, 1)
            stack.callback(_flush)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def text(error: BaseException) -> str:
    """An exception in one line."""
    try:
        said = str(error)
    except Exception:
        said = ""
    return f"{type(error).__name__}: {one_line(said)}".removesuffix(": ")


def origins(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it came from, as far as a traceback would show them."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and not any(following is other for other in seen):
        yield following
        seen.append(following)
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)


def lack_of_memory(error: BaseException) -> BaseException | None:
    """The lack of memory that an error is or came from; None where it is of another kind.

    The backend that runs here is asked too, for its device may have words of its own. An error that was worded for
    the user says itself what to do.
    """
    for origin in origins(error):
        if hasattr(origin, "exit_code"):
            return None
        if is_lack_of_memory(origin) or _judged_by_backend(origin):
            return origin
    return None


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error says so itself.

    torch raises OutOfMemoryError for devices and a plain RuntimeError for the host, safetensors an error of its own,
    and plugins their own kinds of RuntimeError.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    of_a_library = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    return of_a_library and _NO_MEMORY.search(text(error)) is not None


def let_judge(backend: Judge) -> None:
    """From now on `lack_of_memory` asks this backend, as long as it is in use."""
    global _backend
    _backend = weakref.ref(backend)


def _judged_by_backend(error: BaseException) -> bool:
    """A judgement that fails is none; what fails within it is not judged."""
    backend = _backend() if _backend is not None else None
    if backend is None or getattr(_judging, "now", False):
        return False
    _judging.now = True
    try:
        return backend.is_out_of_memory(error) is True
    except (Exception, SystemExit):
        return False
    finally:
        _judging.now = False


def _flush() -> None:
    """Let what Python and C libraries still hold go where it was printed to."""
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            stream.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)
