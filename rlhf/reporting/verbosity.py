"""Keep messages of libraries off the terminal, because users cannot act on them; errors are still shown.

`configure_logging` is for the process of a command, before anything slow is imported; `quiet_libraries` for a host
program that asks for it; `quiet_imported_libraries` for libraries imported since; `suppress_stdout` for code that
prints unconditionally. With --debug everything is shown. If the host program calls neither of the first two, its
logging and standard output are left alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

from accelerators import redirect_fd

_VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Variables that libraries read when they are imported; values that the user has set are kept."""
# Loggers that do not inherit their level from the root logger.
_LIBRARY_LOGGERS = ("transformers", "huggingface_hub", "datasets", "torch", "torch.distributed")
_PROGRESS_BARS = (
    ("transformers.utils.logging", "disable_progress_bar"),
    ("huggingface_hub.utils", "disable_progress_bars"),
    ("datasets.utils", "disable_progress_bars"),
)
OWN_LOGGERS = ("rlhf", "accelerators")

_is_quiet = False


def configure_logging(*, debug: bool) -> None:
    """Configure the process of a command: our warnings are notes on standard error, libraries log errors only.

    Args:
        debug: show everything, our own debug messages too.
    """
    global _is_quiet
    _is_quiet = not debug
    notes = _NoteHandler(logging.DEBUG if debug else logging.WARNING)
    notes.setFormatter(logging.Formatter("rlhf: note: %(message)s"))
    for name in OWN_LOGGERS:
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
    """Let libraries log errors only in this block of a host program; its own logging stays as it is."""
    global _is_quiet
    before, _is_quiet = _is_quiet, True
    added = _VARIABLES.keys() - os.environ.keys()
    os.environ.update({name: _VARIABLES[name] for name in added})
    quiet_imported_libraries()
    try:
        yield
    finally:
        _is_quiet = before
        for name in added:
            os.environ.pop(name, None)


def quiet_imported_libraries() -> None:
    """Let the libraries that are already imported log errors only, without progress bars, which would hide ours."""
    if not _is_quiet:
        return
    for name in _LIBRARY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed logs to standard output while it is imported.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    for name, function in _PROGRESS_BARS:
        if module := sys.modules.get(name):
            getattr(module, function)()


def suppress_stdout() -> AbstractContextManager[None]:
    """Return a context that drops what any code, compilers included, prints to standard output in its block.

    Standard error stays, for the last messages of a process that crashes.
    """
    return _silence if _is_quiet else nullcontext()


class _Silence:
    """Drops standard output while at least one of overlapping blocks runs, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._redirection = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                null = self._redirection.enter_context(open(os.devnull, "wb"))
                self._redirection.enter_context(redirect_fd(1, null.fileno()))
            self._blocks += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._redirection.close()


_silence = _Silence()


class _NoteHandler(logging.Handler):
    """Writes to the current standard error, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            print(self.format(record), file=sys.stderr)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
