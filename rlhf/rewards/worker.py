"""The process in which reward functions run: it imports them, then scores one batch after the other.

`rlhf.rewards.process` starts it as a file of its own. Messages come in on one pipe and go out on another, each a
pickle behind its length: in, Python's path and the functions, then samples; out, ("at", function, sample) before each
call, and ("done", result) or ("failed", why). It begins with the standard library alone, to be there at once.
"""

from __future__ import annotations

import difflib
import fcntl
import importlib
import importlib.util
import inspect
import math
import os
import pickle
import signal
import struct
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

LENGTH = struct.Struct("!Q")
PLUGIN = "plugin"
_LONGEST = 300  # characters of an exception's message
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Unusable(Exception):
    """What keeps a function from being used, and what to do about it."""


def packed(message: Any) -> bytes:
    """A message as it is sent."""
    content = pickle.dumps(message)
    return LENGTH.pack(len(content)) + content


def main(requests: int, replies: int, lifeline: int) -> None:
    """Answer until the other side ends; the arguments are descriptors of pipes."""
    for descriptor in (requests, replies, lifeline):
        os.set_inheritable(descriptor, False)
    _end_with(lifeline)
    _outlast_signals()
    os.dup2(2, 1)  # whatever a function prints
    sys.stdout = sys.stderr
    sys.dont_write_bytecode = True  # a check before a run writes nothing
    worker = Worker(os.fdopen(requests, "rb"), os.fdopen(replies, "wb"))
    try:
        worker.run()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # a function's threads may still run


class Worker:
    """The functions, once they are imported, and the two pipes."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests, self._replies = requests, replies
        self._functions: list[Callable[[str, str, Any], Any]] = []

    def run(self) -> None:
        """Import, then score batches.

        Raises:
            EOFError, BrokenPipeError: the other side has ended.
        """
        sys.path[:], names = self._receive()
        self._attempt(lambda: self._import(names))
        while True:
            samples = self._receive()
            self._attempt(lambda samples=samples: self._score(samples))  # type: ignore[misc]

    def _import(self, names: list[str]) -> None:
        for place, name in enumerate(names):
            self._send("at", place, None)
            self._functions.append(_imported(name))

    def _score(self, samples: list[tuple[str, str, Any]]) -> list[list[float]]:
        return [
            [self._value(place, number, *sample) for number, sample in enumerate(samples)]
            for place in range(len(self._functions))
        ]

    def _value(self, place: int, number: int, prompt: str, completion: str, row: Any) -> float:
        self._send("at", place, number)
        found = self._functions[place](prompt, completion, row)
        try:
            value = math.nan if isinstance(found, str | bytes) else float(found)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's
            value = math.nan
        if not math.isfinite(value):
            shown = repr(found)
            shown = shown if len(shown) <= 60 else shown[:60] + "..."
            raise Unusable(f"returned {shown} ({type(found).__name__}), which is no finite number")
        return value

    def _attempt(self, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except Unusable as error:
            self._send("failed", str(error))
        except BaseException as error:  # sys.exit is one
            self._send("failed", _described(error))
        else:
            self._send("done", result)

    def _send(self, *message: Any) -> None:
        self._replies.write(packed(message))
        self._replies.flush()

    def _receive(self) -> Any:
        head = self._requests.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise EOFError
        return pickle.loads(self._requests.read(LENGTH.unpack(head)[0]))


def _end_with(lifeline: int) -> None:
    """End when the other end of a pipe is closed, and all processes that a function has started, whatever they do.

    The kernel sends the signal itself: a regular expression that never ends would let no thread run.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _outlast_signals() -> None:
    """A signal to end is for the run, which first completes its step; what a function starts is as it would be."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


def _imported(name: str) -> Callable[[str, str, Any], Any]:
    """The function `where:name`, as it can be called.

    Raises:
        Unusable: it is not there, or cannot be called so.
    """
    where, _, attribute = name.rpartition(":")
    if where == PLUGIN:
        from rlhf.rewards.plugins import Unknown, named

        try:
            where, _, attribute = named(attribute).rpartition(":")
        except Unknown as error:
            raise Unusable(str(error)) from None
    found: Any = _module(where)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            raise Unusable(f"{where} has no {part}; " + (f"did you mean {near[0]}?" if near else "check the name"))
        found = getattr(found, part)
    function: Callable[[str, str, Any], Any] = found
    if not callable(found):
        raise Unusable("is no function; name one that takes (prompt, completion, row)")
    if inspect.iscoroutinefunction(found):
        raise Unusable("is `async`; name a plain function, which may call asyncio.run")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # written in C
        return function
    try:
        signature.bind("", "", {})
    except TypeError:
        raise Unusable(f"takes {signature}, and is called with (prompt, completion, row); let it take these") from None
    return function


def _module(where: str) -> ModuleType:
    if where.endswith(".py"):
        return _file(Path(where).resolve())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and f"{where}.".startswith(f"{error.name}."):
            raise Unusable(
                f"there is no module {error.name}; install it, start rlhf in its folder, or name a file: "
                "./rewards.py:function"
            ) from None
        raise


def _file(path: Path) -> ModuleType:
    """The module of a file, which finds others beside it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _described(error: BaseException) -> str:
    """An exception in one line, with the user's own line that it comes from."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame[0] != __file__ and not frame[0].startswith("<")]
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARY)] or frames
    if isinstance(error, SyntaxError) and error.filename:
        own.append((error.filename, error.lineno))
        text = f"{type(error).__name__}: {error.msg}"
    return f"{text} at {own[-1][0]}:{own[-1][1]}" if own else text


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
