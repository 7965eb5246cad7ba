"""Signals that ask a run to end: Ctrl-C, a scheduler's SIGTERM, and SIGHUP, which says that the terminal is gone."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TERMINAL = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


@contextmanager
def handle_signals(receive: Callable[[int], None]) -> Iterator[None]:
    """Call `receive` with each signal that asks to end while the block runs.

    What this process ignores stays ignored (a job in the background, `nohup`), and outside of the main thread, where
    no handler can be set, nothing is heard.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _let_go_of_terminal()
        receive(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _ENDING if is_main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def ends_at_once(arrived: list[int], number: int) -> bool:
    """Whether a further signal asks to end at once; a terminal that closes may send SIGHUP more than once."""
    return bool(arrived) and number != signal.SIGHUP


@contextmanager
def tolerate_closed_terminal() -> Iterator[None]:
    """In this block, what is printed to a terminal that is gone is lost, and no error in the middle of a step.

    The terminal may be written to before SIGHUP is heard.
    """
    streams = sys.stdout, sys.stderr
    if _TERMINAL:
        sys.stdout, sys.stderr = _Terminal(streams[0]), _Terminal(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _Terminal:
    """A stream that goes on to nowhere when its terminal is gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return int(self._tried(lambda: self._stream.write(text), len(text)))

    def flush(self) -> None:
        self._tried(self._stream.flush, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _tried(self, action: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return action()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _let_go_of_terminal()
            return otherwise


def _let_go_of_terminal() -> None:
    """Write to nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _TERMINAL:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
