"""The errors of backends, and the wrappers that make an error in a plugin's code name the plugin.

`name_backend` wraps a plugin's backend, `name_kernel` its kernels: an exception that leaves them becomes one
`PluginError` with the plugin and the method. Only calls from outside pass through these wrappers: the plugin itself
has the plain objects, so it may raise and catch errors internally. `AcceleratorError`s, out-of-memory errors and the
errors of a function that the caller passed to `capture` stay unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import re
import reprlib
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, TypeVar, cast

from accelerators.types import (
    ALLOWLIST_ENV,
    OPERATIONS,
    Backend,
    DeepSpeedView,
    DeviceInfo,
    Health,
    KernelImpl,
    Memory,
    Precision,
    one_line,
)

SomeBackend = TypeVar("SomeBackend", bound=Backend)

AUTHORS = "report it to the plugin's authors"
"""The remedy for an error in a plugin's code."""

RETURNS: Mapping[str, type] = {
    "deterministic": tuple,
    "health": Health,
    "host_operators": Mapping,
    "info": DeviceInfo,
    "memory": Memory,
    "precision": Precision,
    "prepare_deepspeed": DeepSpeedView,
}
"""Methods of a backend whose result is checked on every call; the conformance kit checks all of them."""

NEVER_NONE = ("device", "dist_backend", "host_device", "rng_state", "shape_policy", "to_device")
"""Other methods whose result is used at once; a backend may have forgotten to return it."""

PASSED_ON: Mapping[str, tuple[type[Exception], ...]] = {
    # A checkpoint may contain the generator state of another device; trainers handle that.
    "set_rng_state": (KeyError, TypeError, ValueError, RuntimeError),
}
"""Errors of a backend's methods that trainers handle."""

_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


class AcceleratorError(Exception):
    """A backend cannot be selected, or cannot do what was asked; one line that the user can act on."""

    exit_code = 2


class HiddenError(AcceleratorError):
    """The user's environment hides all of the `count` devices of this machine."""

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


class PluginError(AcceleratorError):
    """A plugin's code failed or returned a wrong type; the message names the plugin and the method."""


class CaptureError(AcceleratorError):
    """A function cannot be captured: it reads values on the host, or its arguments do not fit the recording."""


_judge: weakref.ref[Backend] | None = None


def set_out_of_memory_judge(backend: Backend) -> None:
    """Let `find_out_of_memory` ask this backend too, as long as it exists."""
    global _judge
    _judge = weakref.ref(backend)


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error that an error is or was caused by; None if there is none.

    The selected backend is asked too, since its device may have its own words. An error that was worded for the
    user already contains a remedy.
    """
    backend = _judge() if _judge is not None else None
    for cause in causes(error):
        if hasattr(cause, "exit_code"):
            return None
        if is_out_of_memory(cause):
            return cause
        with contextlib.suppress(Exception, SystemExit):  # a judgement that fails counts as no
            if backend is not None and backend.is_out_of_memory(cause) is True:
                return cause
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error itself means that memory ran out.

    torch raises OutOfMemoryError for devices and a plain RuntimeError for the host, safetensors its own class, and
    plugins subclasses of RuntimeError.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    from_library = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    return from_library and _OUT_OF_MEMORY.search(describe_error(error)) is not None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that it came from, as a traceback would show them."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is other for other in seen):
        yield cause
        seen.append(cause)
        hidden = cause.__suppress_context__
        cause = cause.__cause__ or (None if hidden else cause.__context__)


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message in one line."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {one_line(message)}".removesuffix(": ")


def is_built_in(part: Any) -> bool:
    """Return whether a class or a function is defined in `accelerators`."""
    return (getattr(part, "__module__", None) or "").partition(".")[0] == __package__


@contextlib.contextmanager
def naming(
    where: str,
    remedy: str = AUTHORS,
    passed_on: tuple[type[Exception], ...] = (),
    callers_function: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Turn an error of a plugin's code in this block into one line.

    Args:
        where: the plugin and the method.
        remedy: what the user can do.
        passed_on: errors that the caller handles.
        callers_function: a function of the caller that the plugin may call; its errors stay unchanged.

    Raises:
        PluginError: the block failed, or tried to end the process.
    """
    try:
        yield
    except AcceleratorError:
        raise
    except passed_on:
        raise
    except (Exception, SystemExit) as error:
        callers_error = _raised_by(callers_function, error)
        if callers_error is error or find_out_of_memory(error):
            raise
        if callers_error is not None:
            raise callers_error  # noqa: B904 (its own cause stays)
        raise PluginError(f"{where} failed ({describe_error(error)}); {remedy}") from error


def naming_method(backend: Any, method: str) -> contextlib.AbstractContextManager[None]:
    """Return `naming` for a block in which the interface's own code calls a backend's method."""
    if is_built_in(getattr(backend, method)):
        return contextlib.nullcontext()
    return naming(f"accelerator {backend.name} of {backend.provider}: {method}()")


def name_backend(backend: SomeBackend, where: str) -> SomeBackend:
    """Return a plugin's backend for callers outside the plugin; the methods that the plugin wrote name it."""
    return cast(SomeBackend, _Named(backend, where))


def name_kernel(implementation: KernelImpl, made: Any, plugin: str) -> Any:
    """Return what a factory made for callers outside `plugin`, which is named if a call fails."""
    operation = OPERATIONS[implementation.operation]
    if operation.text or is_built_in(implementation.factory):
        return made
    where = f"{operation.name} kernel {implementation.name!r} of {plugin}"
    # A kernel that a backend brings itself cannot be left out without the backend.
    remedy = f"{AUTHORS}, or leave it out with {ALLOWLIST_ENV}" if implementation.plugin else AUTHORS
    if operation.methods:
        return _Named(made, where, remedy)
    if operation.name == "graph_capture":
        return _name_recorder(made, where, remedy)

    @functools.wraps(made, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with naming(where, remedy):
            result = made(*args, **kwargs)
        if callable(step := getattr(result, "step", None)):  # an optimizer
            named = _name_function(step, f"{where}: step()", remedy)
            result.step = MethodType(
                functools.wraps(step)(lambda self, *args, **kwargs: named(*args, **kwargs)), result
            )
        return result

    return call


class _Named:
    """Stands for an object of a plugin: its attributes are the object's, and its public methods name the plugin."""

    def __init__(self, target: Any, where: str, remedy: str = AUTHORS) -> None:
        vars(self).update(_target=target, _where=where, _remedy=remedy)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance asks it
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._target, name)
        method = inspect.isroutine(value) or isinstance(value, functools.partial)
        if name.startswith("_") or not method or is_built_in(value):
            return value
        where = f"{self._where}: {name}()"
        if name == "capture":
            return _name_recorder(value, where, self._remedy)
        kind = object if name in NEVER_NONE else RETURNS.get(name)
        return _name_function(value, where, self._remedy, kind, PASSED_ON.get(name, ()))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._target, name)


def _name_function(
    function: Callable[..., Any],
    where: str,
    remedy: str,
    kind: type | None = None,
    passed_on: tuple[type[Exception], ...] = (),
    callers_function: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with naming(where, remedy, passed_on, callers_function):
            result = function(*args, **kwargs)
            if kind and (result is None or not isinstance(result, kind)):
                expected = "a result" if kind is object else f"a {kind.__name__}"
                raise TypeError(f"it returned {reprlib.repr(result)}, expected {expected}")
        if isinstance(result, Precision) and not is_built_in(type(result)):
            return _Named(result, where, remedy)
        return result

    return call


def _name_recorder(recorder: Callable[..., Any], where: str, remedy: str) -> Callable[..., Any]:
    """Return `recorder`, a `(fn, key) -> fn`, such that it and the functions it returns name the plugin."""

    @functools.wraps(recorder, updated=())
    def call(fn: Callable[..., Any], key: str) -> Any:
        with naming(where, remedy, callers_function=fn):
            recording = recorder(fn, key)
            if not callable(recording):
                raise TypeError(f"it returned {reprlib.repr(recording)}, expected a function")
        if recording is fn:
            return fn
        return _name_function(recording, f"{where}: its recording of {key!r}", remedy, callers_function=fn)

    return call


def _raised_by(function: Callable[..., Any] | None, error: BaseException) -> BaseException | None:
    """Return the first of an error and its causes that left a function; the traceback tells.

    The function is not wrapped to find out, because a plugin may compile or trace it.
    """
    code = _code(function)
    for cause in causes(error):
        if code and any(frame.f_code is code for frame, _ in traceback.walk_tb(cause.__traceback__)):
            return cause
    return None


def _code(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if function else function
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
