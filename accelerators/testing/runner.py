"""Runs the checks through pytest inside this process, away from the user's own pytest settings.

A backend's name and perhaps some checks flow in; a `Result` for each check flows out, as soon as it is known.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import accelerators
from accelerators.registry import ENV
from accelerators.testing.conformance import Conformance
from accelerators.types import AcceleratorError

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
    methods = {name: method for name, method in vars(Conformance).items() if name.startswith("test_")}
    return {_check_name(name): inspect.getdoc(method) or "" for name, method in methods.items()}


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
    session = _Session(accelerators.select(name, environ=environ).name, only, started, finished)
    here = Path(__file__).parent
    # `finished` reports instead of the terminal; what libraries leave to the garbage collector is not checked.
    off = [part for plugin in ("cacheprovider", "terminal", "unraisableexception") for part in ("-p", f"no:{plugin}")]
    arguments = [str(here / "suite.py"), f"--rootdir={here}", f"--config-file={os.devnull}", "--noconftest", *off]
    arguments.append("--import-mode=importlib")  # leaves sys.path alone
    with _without_users_pytest():
        code = pytest.main(arguments, plugins=[session])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest could not run the checks ({pytest.ExitCode(code).name.lower()})")
    return session.results


class _Session:
    """The pytest plugin behind `run`: picks the checks, and turns pytest's reports into results."""

    def __init__(
        self,
        name: str,
        only: tuple[str, ...],
        started: Callable[[str], None],
        finished: Callable[[Result], None],
    ) -> None:
        self.results: list[Result] = []
        self._name = name
        self._only = only
        self._started = started
        self._finished = finished
        self._verdict: Verdict = "passed"
        self._reason = ""
        self._seconds = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        items[:] = [item for item in items if not self._only or _check_name(item.originalname) in self._only]
        for item in items:
            assert item.cls is not None
            item.cls.name = self._name

    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo[Any]) -> None:
        """Called for a check's setup, call and teardown; what goes wrong first is what counts."""
        if call.when == "setup":
            self._verdict, self._reason, self._seconds = "passed", "", 0.0
            self._started(_full_name(item))
        self._seconds += call.duration
        if call.excinfo is not None and self._verdict == "passed":
            self._verdict = "skipped" if call.excinfo.errisinstance(pytest.skip.Exception) else "failed"
            self._reason = _one_line(call.excinfo)
        if call.when == "teardown":
            notes = [str(value) for key, value in item.user_properties if key == "note"]
            title = inspect.getdoc(item.function) or ""
            result = Result(
                _full_name(item), title, self._verdict, self._reason or "; ".join(notes), round(self._seconds, 2)
            )
            self.results.append(result)
            self._finished(result)


def _known(check: str) -> None:
    known = list(checks())
    if check not in known:
        near = difflib.get_close_matches(check, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise AcceleratorError(f"no check is named {check!r}; {hint}known: {', '.join(known)}")


def _check_name(method: str) -> str:
    return method.removeprefix("test_").replace("_", "-")


def _full_name(item: pytest.Function) -> str:
    """The check's name, with its parameter where it has one."""
    parameter = f"[{item.callspec.id}]" if hasattr(item, "callspec") else ""
    return _check_name(item.originalname) + parameter


def _one_line(found: pytest.ExceptionInfo[BaseException]) -> str:
    """A failed check's own line; of any other exception also its type, and the place that raised it."""
    text = " ".join(str(found.value).split())
    if isinstance(found.value, (AssertionError, pytest.skip.Exception, pytest.fail.Exception)) and text:
        return text
    place = found.traceback[-1]
    return f"{found.typename}: {text} ({place.path}:{place.lineno + 1})"


@contextmanager
def _without_users_pytest() -> Iterator[None]:
    """No options and plugins that are meant for the user's own tests: xdist would run checks elsewhere."""
    before = {key: value for key, value in os.environ.items() if key.startswith("PYTEST_")}
    for key in before:
        del os.environ[key]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        os.environ.update(before)
