"""The process that runs reward functions: it imports them, then scores one batch after the other.

`rlhf.rewards.process` starts this file as a script. It receives Python's path, the functions' names and the entry point
group of plugins, then samples. It sends ["at", function, sample] before each call, and ["done", result] or ["failed",
reason], as JSON: the run does not unpickle what code of functions may have written. It imports only the standard
library, to start at once.
"""

from __future__ import annotations

import difflib
import fcntl
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

PLUGIN = "plugin"
_MAX_SHOWN = 300  # characters of an exception's message
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class UnusableFunction(Exception):
    """A function cannot be used; the message says why, and what to do."""


def main(connection: int, lifeline: int) -> None:
    """Answer requests until the run ends; the arguments are the file descriptors of a socket and a pipe."""
    for descriptor in (connection, lifeline):
        os.set_inheritable(descriptor, False)
    _exit_with_run(lifeline)
    _ignore_signals()
    os.dup2(2, 1)  # output of functions
    sys.stdout = sys.stderr
    sys.dont_write_bytecode = True  # preflight writes nothing
    try:
        RewardWorker(Connection(connection)).run()
    except (EOFError, ConnectionError):
        os._exit(0)  # a function's threads may still run


class RewardWorker:
    """The imported functions, and the connection to the run."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._functions: list[Callable[[str, str, Any], Any]] = []

    def run(self) -> None:
        """Import the functions, then score batches.

        Raises:
            EOFError, ConnectionError: the run has ended.
        """
        sys.path[:], names, group = self._connection.recv()
        self._reply(self._import, (names, group))
        while True:
            self._reply(self._score, self._connection.recv())

    def _reply(self, work: Callable[[Any], Any], argument: Any) -> None:
        try:
            message = ("done", work(argument))
        except UnusableFunction as error:
            message = ("failed", str(error))
        except BaseException as error:  # sys.exit is one
            message = ("failed", _describe_error(error))
        self._send(*message)

    def _send(self, *message: object) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def _import(self, functions: tuple[list[str], str]) -> None:
        names, group = functions
        for place, name in enumerate(names):
            self._send("at", place, None)
            self._functions.append(_import_function(name, group))

    def _score(self, samples: list[tuple[str, str, Any]]) -> list[list[float]]:
        return [
            [self._value(place, number, *sample) for number, sample in enumerate(samples)]
            for place in range(len(self._functions))
        ]

    def _value(self, place: int, number: int, prompt: str, completion: str, row: Any) -> float:
        self._send("at", place, number)
        returned = self._functions[place](prompt, completion, row)
        try:
            value = math.nan if isinstance(returned, str | bytes) else float(returned)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's
            value = math.nan
        if not math.isfinite(value):
            text = _shorten(repr(returned), 60)
            raise UnusableFunction(f"must return a finite number, got {text} ({type(returned).__name__})")
        return value


def _exit_with_run(lifeline: int) -> None:
    """Kill this process group when the other end of a pipe is closed, with all processes that functions started.

    On Linux the kernel sends the signal, because a regular expression that never ends lets no thread run.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _ignore_signals() -> None:
    """Ignore signals to end, which the run handles after its step; restore them in processes that functions start."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


def _import_function(name: str, group: str) -> Callable[[str, str, Any], Any]:
    """Import the function `where:name`, that of a plugin of an entry point group, and check that it can be called.

    Raises:
        UnusableFunction: it does not exist, or cannot be called with these arguments.
    """
    where, _, attribute = name.rpartition(":")
    if where == PLUGIN:
        from rlhf.rewards.hookspecs import UnknownPluginFunction, find_plugin_function

        try:
            where, _, attribute = find_plugin_function(attribute, group).rpartition(":")
        except UnknownPluginFunction as error:
            raise UnusableFunction(str(error)) from None
    function: Any = _import_module(where)
    for part in attribute.split("."):
        if not hasattr(function, part):
            close = difflib.get_close_matches(part, dir(function), n=1)
            hint = f"did you mean {close[0]}?" if close else "check the name"
            raise UnusableFunction(f"{where} has no {part}; {hint}")
        function = getattr(function, part)
    if not callable(function):
        raise UnusableFunction("not a function; name a function that takes (prompt, completion, row)")
    if inspect.iscoroutinefunction(function):
        raise UnusableFunction("must not be `async`; name a plain function, which may call asyncio.run")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return function  # type: ignore[no-any-return]
    try:
        signature.bind("", "", {})
    except TypeError:
        raise UnusableFunction(
            f"takes {signature}, but is called with (prompt, completion, row); change its parameters"
        ) from None
    return function  # type: ignore[no-any-return]


def _import_module(where: str) -> ModuleType:
    """Import a module by its name, or a file, whose folder is then on Python's path."""
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name and f"{where}.".startswith(f"{error.name}."):
                raise UnusableFunction(
                    f"no module {error.name}; install it, start rlhf in its folder, or name a file: "
                    "./rewards.py:function"
                ) from None
            raise
    path = Path(where).resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _describe_error(error: BaseException) -> str:
    """Return an exception on one line, with the line of the user's code that raised it."""
    text = _shorten(" ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":"), _MAX_SHOWN)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame[0] != __file__ and not frame[0].startswith("<")]
    user_frames = [frame for frame in frames if not frame[0].startswith(_LIBRARY)] or frames
    if isinstance(error, SyntaxError) and error.filename:
        user_frames.append((error.filename, error.lineno))
        text = f"{type(error).__name__}: {error.msg}"
    return f"{text} at {user_frames[-1][0]}:{user_frames[-1][1]}" if user_frames else text


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
