"""Signals that ask a run to end: Ctrl-C, a scheduler's SIGTERM or SIGUSR1, and SIGHUP when the terminal is closed.

A command calls `remember_signals` first. Signals then act where the command allows it: in a block of
`interrupt_on_signals` they raise `KeyboardInterrupt`, in one of `collect_signals` a step is finished first. This module
imports only the standard library, so that the command can import it before all else.
"""

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
"""The signals that have arrived since `remember_signals`, or in the outermost block of `interrupt_on_signals`."""
_collected: list[list[int]] = []  # those of the running blocks of `collect_signals`
_blocks = 0  # of `interrupt_on_signals` that have not ended; `remember_signals` begins one that never ends
_TERMINAL_FDS = [fd for fd in (1, 2) if os.isatty(fd)]


def remember_signals() -> None:
    """Remember signals that arrive from now on, for `interrupt_on_signals`."""
    global _blocks
    _blocks += 1
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: remembered_signals.append(number))


def ignore_signals() -> None:
    """Ignore signals from now on: the exit code is decided, and the end of the interpreter may take a second."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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
    """Handle any of the signals in this block like Ctrl-C: raise `KeyboardInterrupt`, also for remembered ones.

    A first signal during an import is raised when the import is done: libraries swallow the exception, or are left
    half-imported. Other code may swallow it too, as pyarrow does when it imports pandas by itself. The block must
    therefore call `raise_if_interrupted` before it begins something that takes long.
    """
    global _blocks
    imports = len(_find_imports())  # a program may do all its work in an import

    def receive(number: int) -> None:
        remembered_signals.append(number)
        running = _find_imports()
        if len(running) == imports or end_at_once(remembered_signals):
            raise KeyboardInterrupt
        _raise_after(running[imports])

    _blocks += 1
    try:
        with handle_signals(receive):
            raise_if_interrupted()
            yield
    finally:
        _blocks -= 1
        if not _blocks:
            remembered_signals.clear()


def _find_imports() -> list[FrameType]:
    """Return the frames of this thread that import a module, the outermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame:
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            frames.insert(0, frame)
        frame = frame.f_back
    return frames


def _raise_after(frame: FrameType) -> None:
    """Raise `KeyboardInterrupt` when `frame` of this thread returns."""

    def profile(current: FrameType, event: str, argument: Any) -> None:
        if current is frame and event == "return":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)


def raise_if_interrupted() -> None:
    """Raise `KeyboardInterrupt` if a signal is remembered; in the main thread only."""
    if remembered_signals and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def continue_after_ctrl_c() -> None:
    """Forget the Ctrl-C whose `KeyboardInterrupt` the caller has caught; raise it again if it was another signal."""
    if remembered_signals and remembered_signals.pop() != signal.SIGINT:
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

    _collected.append(received)
    try:
        with handle_signals(receive):
            yield received
    finally:
        _collected.remove(received)


def is_end_requested() -> bool:
    """Return whether a signal has arrived that the program has not acted on yet."""
    return bool(remembered_signals) or any(_collected)


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
