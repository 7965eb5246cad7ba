"""Runs the checks in this process, without pytest.

A backend's name and perhaps some checks flow in; a `Result` for each check flows out, as soon as it is known.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal
from unittest import SkipTest

import accelerators
from accelerators.registry import ENV
from accelerators.testing.suite import STAGES, Subject, Suite
from accelerators.types import AcceleratorError, PluginDefect, nearest, one_line

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """What one check found; `reason` is one line, empty where a check that passed has nothing to add."""

    check: str
    title: str
    result: Verdict
    reason: str
    seconds: float


def checks() -> dict[str, str]:
    """Names of all checks, in the order in which they run, and their titles."""
    return {_check_name(method.__name__): inspect.getdoc(method) or "" for method in _methods()}


def run(
    name: str,
    only: Iterable[str] = (),
    *,
    started: Callable[[str], None] = lambda check: None,
    finished: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Check a backend.

    Args:
        name: the backend; auto: the one that a run would take.
        only: names of checks; all of them where there is none.
        started, finished: called around each check, for progress.

    Raises:
        AcceleratorError: there is no such check, or the backend cannot be selected.
    """
    only = tuple(only)
    for wanted in only:
        _known(wanted)
    environ = {key: value for key, value in os.environ.items() if name == "auto" or key != ENV}
    results: list[Result] = []
    with Subject(accelerators.select(name, environ=environ).name) as subject:
        for method in _methods():
            check = _check_name(method.__name__)
            for stage in STAGES if "stage" in inspect.signature(method).parameters else (None,):
                if only and check not in only:
                    continue
                full = check if stage is None else f"{check}[zero-{stage}]"
                started(full)
                results.append(_checked(full, method, subject, stage))
                finished(results[-1])
    return results


def _checked(check: str, method: Callable[..., None], subject: Subject, stage: int | None) -> Result:
    suite, notes = Suite(), list[str]()
    suite.name = subject.selection.name
    verdict: Verdict = "passed"
    begun = time.monotonic()
    try:
        with _quiet():
            extra = {"stage": stage, "note": notes.append}
            names = list(inspect.signature(method).parameters)[1:]
            method(suite, **{name: extra[name] if name in extra else getattr(subject, name) for name in names})
    except SkipTest as error:
        verdict, notes = "skipped", [_one_line(error)]
    except (Exception, SystemExit) as error:
        verdict, notes = "failed", [_one_line(error)]
    title = inspect.getdoc(method) or ""
    return Result(check, title, verdict, "; ".join(notes), round(time.monotonic() - begun, 2))


def _methods() -> list[Callable[..., None]]:
    return [method for name, method in vars(Suite).items() if name.startswith("test_")]


def _known(check: str) -> None:
    known = list(checks())
    if check not in known:
        near = nearest(check, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise AcceleratorError(f"no check is named {check!r}; {hint}known: {', '.join(known)}")


def _check_name(method: str) -> str:
    return method.removeprefix("test_").replace("_", "-")


def _one_line(error: BaseException) -> str:
    """A failed check's own line; of any other exception also its type, and the place that raised it."""
    said = one_line(str(error))
    if isinstance(error, (AssertionError, SkipTest)) and said:
        return said
    source = error.__cause__ if isinstance(error, PluginDefect) else error
    frames = traceback.extract_tb(source.__traceback__ if source else None)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {said}{place}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what a check and its libraries print away from the lines of progress."""
    with tempfile.TemporaryFile() as sink, ExitStack() as stack:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            saved = os.dup(number)
            stack.callback(os.close, saved)
            os.dup2(sink.fileno(), number)
            stack.callback(os.dup2, saved, number)
            stack.callback(stream.flush)
        yield
