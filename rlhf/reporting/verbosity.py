"""What libraries say while they work stays out of a terminal: a user can do nothing about it. Errors still show.

`command` is for a process of the command line, before anything slow is imported, `session` for a program of somebody
else's that wants it; `libraries` for what is imported by then; `unheard` for code that prints whatever it is told.
With --debug, all of it shows. In a program of somebody else's, which has called neither, logging and standard output
are its own, and nothing here touches them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

_VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What libraries read when they are imported; a user's own values count."""
# Those that do not leave their level to the root of all loggers.
_LOGGERS = ("transformers", "huggingface_hub", "datasets", "torch", "torch.distributed")
_BARS = (
    ("transformers.utils.logging", "disable_progress_bar"),
    ("huggingface_hub.utils", "disable_progress_bars"),
    ("datasets.utils", "disable_progress_bars"),
)
_OURS = ("rlhf", "accelerators")

_quiet = False  # whether libraries are to be unheard


def configure_logging(*, debug: bool) -> None:
    """Set up the process of a command: our warnings are notes on standard error, libraries speak of errors only.

    Args:
        debug: show everything, our own details too.
    """
    global _quiet
    _quiet = not debug
    notes = _Notes(logging.DEBUG if debug else logging.WARNING)
    notes.setFormatter(logging.Formatter("rlhf: note: %(message)s"))
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.setLevel(notes.level)
        logger.handlers = [notes]
    if debug:
        return
    for variable, value in _VARIABLES.items():
        os.environ.setdefault(variable, value)
    logging.getLogger().setLevel(logging.ERROR)
    if not sys.warnoptions:  # neither -W nor PYTHONWARNINGS
        warnings.simplefilter("ignore")
    quiet_imported_libraries()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """In this block of somebody else's program libraries speak of errors only; its own logging stays as it is."""
    global _quiet
    before, _quiet = _quiet, True
    added = _VARIABLES.keys() - os.environ.keys()
    os.environ.update({name: _VARIABLES[name] for name in added})
    quiet_imported_libraries()
    try:
        yield
    finally:
        _quiet = before
        for name in added:
            os.environ.pop(name, None)


def quiet_imported_libraries() -> None:
    """Let the libraries that are imported speak of errors only, and show no bars, which would bury ours."""
    if not _quiet:
        return
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it speaks, on standard output, while it is imported
    for name, function in _BARS:
        if module := sys.modules.get(name):
            getattr(module, function)()


def suppress_stdout() -> AbstractContextManager[None]:
    """Drop what is printed to standard output in this block, by any code: compilers that a library starts too.

    Standard error stays, for the last words of a process that is brought down.
    """
    return _silence if _quiet else nullcontext()


class _Silence:
    """Standard output leads nowhere from the first of overlapping blocks, in any thread, until the last is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._undo = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._undo = _nowhere()
            self._blocks += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._undo.close()


_silence = _Silence()


def _nowhere() -> ExitStack:
    """Redirect the standard output of this process, until what comes back is closed."""
    with ExitStack() as stack:
        with suppress(OSError):  # a process without standard output
            saved = os.dup(1)
            stack.callback(os.close, saved)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, nowhere)
            _flush()
            os.dup2(nowhere, 1)
            stack.callback(os.dup2, saved, 1)
            stack.callback(_flush)
        return stack.pop_all()


class _Notes(logging.Handler):
    """Writes to standard error as it is at the time: a progress bar takes its place while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            print(self.format(record), file=sys.stderr)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _flush() -> None:
    """Let what Python and C libraries still hold go where it was printed to."""
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            stream.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)
