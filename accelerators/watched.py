"""One function of a plugin, as the trainers call it: what goes wrong in it is said of the plugin, and of nobody else.

Watched is the way from the trainers into a plugin. What the plugin calls of itself, in any thread, and what the
trainers' own functions raise inside of it (`capture` runs one) comes out as if nobody watched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import reprlib
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelerators.guard import lack_of_memory, origins, text
from accelerators.types import AUTHORS, AcceleratorError, PluginDefect, one_line

Expected = tuple[str, Callable[..., bool]]
"""What is expected of an answer, in words, and whether it is that: (answer, arguments of the call) -> bool."""

ANYTHING: Expected = ("anything", lambda found, *given: True)

# The plugins whose code runs in this thread now; threads that no backend was made in have none: they are a plugin's.
_thread = threading.local()


@contextlib.contextmanager
def running(plugin: str) -> Iterator[None]:
    """Code of `plugin` runs in this block: what it calls of itself is its own business, errors included."""
    before: frozenset[str] | None = getattr(_thread, "plugins", None)
    if before is not None:
        _thread.plugins = before | {_distribution(plugin)}
    try:
        yield
    finally:
        if before is not None:
            _thread.plugins = before


def ours(part: Any) -> bool:
    """Whether a class or a function is part of `accelerators`."""
    return (getattr(part, "__module__", None) or "").partition(".")[0] == __package__


def shown(value: Any) -> str:
    """A value for messages."""
    return one_line(reprlib.repr(value))


class Watched:
    """A function whose exceptions and wrong answers are `PluginDefect`s; called by its own plugin, the function itself.

    Args:
        plugin: whose it is. `who`: how messages call it.
        passes: exceptions that are the caller's to answer.
        finish: makes of an answer what is given out; what it raises is the plugin's mistake too.
        given: functions of the trainers that this one may run, beside those among its arguments.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        plugin: str,
        who: str,
        expected: Expected = ANYTHING,
        *,
        passes: tuple[type[Exception], ...] = (),
        remedy: str = AUTHORS,
        finish: Callable[[Any], Any] | None = None,
        given: Iterable[Any] = (),
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._plugin, self._who, self._remedy = function, plugin, who, remedy
        self._expected, self._passes, self._finish, self._given = expected, passes, finish, tuple(given)
        if not hasattr(_thread, "plugins"):
            _thread.plugins = frozenset()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self._called_from_outside():
            return self._function(*arguments, **options)
        words, right = self._expected
        try:
            # The interface's own methods call what the plugin gave: there the way into the plugin begins.
            with contextlib.nullcontext() if ours(self._function) else running(self._plugin):
                found = self._function(*arguments, **options)
                if self._finish:
                    found = self._finish(found)
        except AcceleratorError:
            raise
        except (Exception, SystemExit) as error:
            failure = self._judged(error, [*arguments, *options.values(), *self._given])
            if failure is error:
                raise
        else:
            if right(found, *arguments):
                return found
            failure = PluginDefect(f"{self._who} gave {shown(found)} instead of {words}; {self._remedy}")
        raise failure

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a backend hold its own functions: nobody but the trainers' one is watched."""
        return _itself, (self._function,)

    def _called_from_outside(self) -> bool:
        plugins = getattr(_thread, "plugins", None)
        return plugins is not None and _distribution(self._plugin) not in plugins

    def _judged(self, error: BaseException, given: Iterable[Any]) -> BaseException:
        """What to raise for an error: itself, that of a function that the plugin was given, or a defect."""
        if (own := _raised_by(given, error)) is not None:
            return own
        if isinstance(error, self._passes) or lack_of_memory(error):
            return error
        defect = PluginDefect(f"{self._who} failed ({text(error)}); {self._remedy}")
        defect.__cause__ = error
        return defect


class WatchedRecorder(Watched):
    """A watched `(fn, key) -> fn`; what it gives out is watched too."""

    def __call__(self, fn: Callable[..., Any], key: str) -> Any:
        recorded = super().__call__(fn, key)
        if recorded is fn or not self._called_from_outside():
            return recorded
        who = f"{self._who}: its recording of {key!r}"
        return Watched(recorded, self._plugin, who, remedy=self._remedy, given=[fn])


def _raised_by(given: Iterable[Any], error: BaseException) -> BaseException | None:
    """The first of an error and those it came from that left one of these functions; told by its traceback.

    The functions are not wrapped: a plugin may compile or trace them.
    """
    codes = {_code(function) for function in given if callable(function)} - {None}
    for origin in origins(error):
        if any(frame.f_code in codes for frame, _ in traceback.walk_tb(origin.__traceback__)):
            return origin
    return None


def _code(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def _distribution(plugin: str) -> str:
    """Of "rlhf-npu 1.0 (npu)", an entry point of it, "rlhf-npu 1.0"."""
    return plugin.partition(" (")[0]


def _itself(function: Any) -> Any:
    return function
