"""Signals that ask a run to end: Ctrl-C, a scheduler's SIGTERM, and SIGHUP, which says that the terminal is gone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TERMINAL = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


@contextmanager
def heard(receive: Callable[[int], None]) -> Iterator[None]:
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


def is_impatient(arrived: list[int], number: int) -> bool:
    """Whether a further signal asks to end at once; a terminal that closes may send SIGHUP more than once."""
    return bool(arrived) and number != signal.SIGHUP


def _let_go_of_terminal() -> None:
    """Write to nowhere from now on: writing to a terminal that is gone would be an error in the middle of a step."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _TERMINAL:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
