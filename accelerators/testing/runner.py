"""Runs the checks in this process, without pytest."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from unittest import SkipTest

from accelerators.errors import AcceleratorError, PluginError
from accelerators.host import redirect_fd
from accelerators.testing.checks import CHECKS, Check, Subject
from accelerators.types import did_you_mean, one_line

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """The result of one check; `reason` is one line, empty if a check that passed has no note."""

    check: str
    title: str
    result: Verdict
    reason: str
    seconds: float


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
        only: names of checks; empty: all of them.
        started: called with the name of each check before it runs.
        finished: called with each result.

    Raises:
        AcceleratorError: no check has one of the names, or the backend cannot be selected.
    """
    names = tuple(only)
    known = list(dict.fromkeys(check.name for check in CHECKS))
    for wanted in names:
        if wanted not in known:
            hint = did_you_mean(wanted, known)
            raise AcceleratorError(f"no check is named {wanted!r}; {hint}known: {', '.join(known)}")
    results: list[Result] = []
    with Subject(name) as subject:
        for check in CHECKS:
            if not names or check.name in names:
                started(str(check))
                results.append(_run_check(check, subject))
                finished(results[-1])
    return results


def _run_check(check: Check, subject: Subject) -> Result:
    verdict: Verdict = "passed"
    start = time.monotonic()
    try:
        with _quiet():
            reason = check.run(subject)
    except SkipTest as error:
        verdict, reason = "skipped", _one_line(error)
    except (Exception, SystemExit) as error:
        verdict, reason = "failed", _one_line(error)
    return Result(str(check), check.title, verdict, reason, round(time.monotonic() - start, 2))


def _one_line(error: BaseException) -> str:
    """Return a failed check's own line; for any other exception also its type and the place that raised it."""
    message = one_line(str(error))
    if isinstance(error, (AssertionError, SkipTest)) and message:
        return message
    source = error.__cause__ if isinstance(error, PluginError) else error
    frames = traceback.extract_tb(source.__traceback__ if source else None)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{place}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the output of a check and its libraries away from the lines of progress."""
    with tempfile.TemporaryFile() as sink, redirect_fd(1, sink.fileno()), redirect_fd(2, sink.fileno()):
        yield
