"""Signals that ask a run to end: Ctrl-C, a scheduler's SIGTERM or SIGUSR1, and SIGHUP when the terminal is closed."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
remembered_signals: list[int] = []
"""The signals that have arrived in the block of `interrupt_on_signals`."""
_TERMINAL_FDS = [fd for fd in (1, 2) if os.isatty(fd)]


@contextmanager
def handle_signals(receive: Callable[[int], None]) -> Iterator[None]:
    """Call `receive` with each signal that asks the process to end while the block runs.

    Signals that the process ignores stay ignored (a job in the background, `nohup`). Outside of the main thread, where
    no handler can be set, nothing is handled.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _discard_terminal_output()
        receive(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Handle any of the signals in this block like Ctrl-C: raise `KeyboardInterrupt`.

    Libraries may swallow the exception, as pyarrow does in its import of pandas. The block must therefore call
    `raise_if_interrupted` before it begins something that takes long.
    """

    def receive(number: int) -> None:
        remembered_signals.append(number)
        raise KeyboardInterrupt

    remembered_signals.clear()
    try:
        with handle_signals(receive):
            yield
    finally:
        remembered_signals.clear()


def raise_if_interrupted() -> None:
    """Raise `KeyboardInterrupt` if a signal arrived in a block of `interrupt_on_signals`; in the main thread only."""
    if remembered_signals and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextmanager
def collect_signals(earlier: Sequence[int] = ()) -> Iterator[list[int]]:
    """Yield the list of received signals; a second request to end raises `KeyboardInterrupt` at once.

    Args:
        earlier: signals that arrived before; the list begins with them.
    """
    received = list(earlier)

    def receive(number: int) -> None:
        received.append(number)
        if end_at_once(received):
            raise KeyboardInterrupt

    with handle_signals(receive):
        yield received


def end_at_once(signals_seen: Sequence[int]) -> bool:
    """Return whether these signals, in their order, end the process at once, because one of them is a second request.

    A closing terminal may send SIGHUP more than once. SIGUSR1 is a scheduler's warning, which a request may follow.
    """
    requests = [number for number in signals_seen if number != signal.SIGUSR1]
    return any(number != signal.SIGHUP for number in requests[1:])


@contextmanager
def tolerate_closed_terminal() -> Iterator[None]:
    """Drop what this block prints to a closed terminal, instead of failing in the middle of a step.

    A write may come before SIGHUP arrives.
    """
    streams = sys.stdout, sys.stderr
    if _TERMINAL_FDS:
        sys.stdout, sys.stderr = _Terminal(streams[0]), _Terminal(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _Terminal:
    """A stream that drops its output once its terminal is closed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError as error:
            _check_closed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            _check_closed(error)

    @property
    def rich_proxied_file(self) -> _Terminal:
        """The stream that consoles of rich use instead; see `rlhf.utils.printable`."""
        return _Terminal(self._stream.rich_proxied_file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _check_closed(error: OSError) -> None:
    """Discard further output if the terminal is closed, else raise `error`."""
    if error.errno != errno.EIO:
        raise error
    _discard_terminal_output()


def _discard_terminal_output() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in _TERMINAL_FDS:
        os.dup2(null, fd)
    os.close(null)
