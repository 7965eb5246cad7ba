"""Loads the installed plugins one by one and probes the backends that they offer.

Input: the entry points of the environment. Output: pluggy's manager with the plugins that work, and a `Report` on every
backend and on every plugin that does not work. A plugin can neither stop the others nor print to standard output.
This module does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import pluggy

from accelerators import compatibility, hookspecs
from accelerators.errors import AUTHORS, AcceleratorError, PluginError, causes, describe_error
from accelerators.host import stdout_to_stderr
from accelerators.types import ALLOWLIST_ENV, AcceleratorSpec, Probe, expect

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

TIME_LIMIT_ENV = "RLHF_PROBE_TIMEOUT"
"""The environment variable with the seconds that a plugin may take to answer."""

BUILTIN = "accelerators.backends.plugin"
MOST_ANSWERS = 100
"""Limit of a plugin's answers to one hook: more would be an endless generator."""

_IMPORTS_TORCH = (
    "imports torch {when}, which must come after the choice of a backend: some runtimes read their environment then"
)


_CALLERS = ("threading", "importlib", "_frozen_importlib", "_frozen_importlib_external", "pluggy", __package__)
"""Packages whose frames come before those of a plugin's code."""

_MAY_LACK_MEMORY = re.compile(r"exhaust|memory|\bHBM\b|alloc", re.IGNORECASE)

_EXTENSION = re.compile(r"Failed to load the backend extension: (\w+)")
"""torch's words if a vendor's package fails that every `import torch` loads."""


@dataclass(frozen=True)
class Report:
    """The state of one backend, or of a plugin that could not be loaded.

    Exactly one of `probe` and `error` is set. A plugin that failed before it offered a backend has the name of its
    entry point and no `spec`. `warning` is something that the plugin should not do although it works.
    """

    name: str
    distribution: str
    version: str
    spec: AcceleratorSpec | None = None
    probe: Probe | None = None
    error: str | None = None
    warning: str | None = None

    @property
    def priority(self) -> int | None:
        """The backend's priority; None if it has no spec."""
        return self.spec.priority if self.spec else None

    @property
    def available(self) -> bool:
        """True if the backend can run here."""
        return self.probe is not None and self.probe.ok

    @property
    def provider(self) -> str:
        """The distribution and its version, as pip names them."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def devices(self) -> str:
        """The devices, usable or not, as "2 x Model"; empty if there is none."""
        return f"{self.probe.count} x {self.probe.model or 'device'}" if self.probe and self.probe.count else ""

    @property
    def reason(self) -> str:
        """The reason why the backend is available or not."""
        return self.probe.reason if self.probe else f"broken: {self.error}"


def available(environ: Mapping[str, str] = os.environ) -> list[Report]:
    """Return a report on every backend that a plugin offers and on every broken plugin, best first."""
    return discover(environ)[1]


def discover(environ: Mapping[str, str]) -> tuple[pluggy.PluginManager, list[Report]]:
    """Load plugins one at a time; a broken one becomes a report and stays out of the manager."""
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    points, reports = _allowed(*_installed(), environ.get(ALLOWLIST_ENV))
    limit = time_limit(environ)
    loaded: dict[ModuleType, tuple[str, str, str]] = {}
    warnings: dict[ModuleType, str] = {}
    with stdout_to_stderr():
        for point in points:
            origin = (point.name, *_named(point.dist))
            clean = "torch" not in sys.modules
            try:
                plugin = _load(plugins, point, origin, limit)
            except PluginError as error:
                reports.append(Report(*origin, error=str(error)))
                continue
            loaded[plugin] = origin
            if clean and "torch" in sys.modules:
                warnings[plugin] = _IMPORTS_TORCH.format(when="when it is loaded")
        for plugin, problem in _with_unknown_hooks(plugins):
            reports.append(Report(*loaded.pop(plugin), error=problem))
        for plugin, origin in loaded.items():
            reports += [
                replace(report, warning=report.warning or warnings.get(plugin))
                for report in _offers(plugins, plugin, origin, limit)
            ]
    return plugins, sorted(reports, key=_rank)


def _installed() -> tuple[list[EntryPoint], list[Report]]:
    """Return the entry points of all plugins, and a report for each distribution whose entry points are unreadable."""
    group = hookspecs.ENTRY_POINT_GROUP
    with contextlib.suppress(Exception):
        return list(entry_points(group=group)), []
    points: list[EntryPoint] = []
    reports: list[Report] = []
    seen: set[str] = set()
    for distribution in distributions():
        name, version = _named(distribution)
        if name != "unknown" and name in seen:  # once more, further down the path
            continue
        seen.add(name)
        try:
            points += distribution.entry_points.select(group=group)
        except Exception as error:
            text = group  # if it is no text, they may be a plugin's
            with contextlib.suppress(Exception):
                text = distribution.read_text("entry_points.txt") or ""
            if group in text:
                reports.append(
                    Report(name, name, version, error=f"its entry points cannot be read ({describe_error(error)})")
                )
    return points, reports


def _named(distribution: Distribution | None) -> tuple[str, str]:
    """Return name and version of a distribution, whose metadata may be missing or damaged."""
    try:
        assert distribution is not None
        return distribution.name or "unknown", distribution.version or ""
    except Exception:
        return "unknown", ""


def _load(plugins: pluggy.PluginManager, point: EntryPoint, origin: tuple[str, str, str], limit: float) -> ModuleType:
    """Import a plugin and register it under the reports' `provider` and its entry point."""
    plugin = run_within(None if point.value == BUILTIN else limit, "its import", point.load)
    if not isinstance(plugin, ModuleType):
        raise PluginError(f"its entry point names a {type(plugin).__name__} instead of a module")
    name = f"{Report(*origin).provider} ({origin[0]})"
    try:
        plugins.register(plugin, name=name)
    except (Exception, SystemExit) as error:
        if plugins.get_plugin(name) is plugin:
            plugins.unregister(plugin)
        raise PluginError(describe_error(error)) from error
    return plugin


def _allowed(
    points: list[EntryPoint], unreadable: list[Report], allowlist: str | None
) -> tuple[list[EntryPoint], list[Report]]:
    """Return the entry points to load, by name, and a report for each plugin of the allowlist that is not installed.

    The list names entry points or distributions. The built-in backends are always included: `none` means only them.
    """
    points = sorted(points, key=lambda point: (point.name, point.value))
    if not allowlist:
        return points, unreadable
    wanted = {_normalized(part) for part in allowlist.split(",")} - {"", "none"}
    names = [{_normalized(point.name), _normalized(_named(point.dist)[0])} for point in points]
    missing = sorted(wanted.difference(*names))
    error = f"named in {ALLOWLIST_ENV}, but no such plugin is installed"
    return (
        [point for point, aliases in zip(points, names, strict=True) if point.value == BUILTIN or aliases & wanted],
        [Report(name, name, "", error=error) for name in missing],
    )


def _with_unknown_hooks(plugins: pluggy.PluginManager) -> Iterator[tuple[Any, str]]:
    """Unregister the plugins that mark a function as an unknown hook, and yield them: a misspelt hook does nothing."""
    while True:
        try:
            return plugins.check_pending()
        except pluggy.PluginValidationError as error:
            plugins.unregister(error.plugin)
            yield error.plugin, describe_error(error)


def _offers(
    plugins: pluggy.PluginManager, plugin: ModuleType, origin: tuple[str, str, str], limit: float
) -> list[Report]:
    try:
        offered = run_within(limit, "rlhf_accelerators", lambda: list(answers(plugins, plugin, "rlhf_accelerators")))
    except PluginError as error:
        return [Report(*origin, error=str(error))]
    reports: list[Report] = []
    for report in (_probed(offer, origin, limit) for offer in offered):
        if report.spec and report.name in [other.name for other in reports if other.spec]:
            report = replace(report, probe=None, error="rlhf_accelerators offers this name twice")
        reports.append(report)
    return reports


def _probed(offer: Any, origin: tuple[str, str, str], limit: float) -> Report:
    provider = origin[1:]
    try:
        spec = expect(offer, AcceleratorSpec)
    except TypeError as error:
        return Report(*origin, error=f"rlhf_accelerators returned {error}")
    if refusal := compatibility.refuse_versions(spec, provider[0]):
        return Report(spec.name, *provider, spec=spec, error=refusal)
    clean = "torch" not in sys.modules
    probe, failure = None, None
    try:
        probe = run_within(limit, "its probe", lambda: expect(spec.probe(), Probe))
    except PluginError as error:
        failure = str(error)
    warning = _IMPORTS_TORCH.format(when="in its probe") if clean and "torch" in sys.modules else None
    return Report(spec.name, *provider, spec=spec, probe=probe, error=failure, warning=warning)


def time_limit(environ: Mapping[str, str]) -> float:
    """Return the seconds that a plugin may take to answer."""
    wish = environ.get(TIME_LIMIT_ENV) or "10"
    try:
        limit = float(wish)
    except ValueError:
        limit = 0
    if not 0 < limit < threading.TIMEOUT_MAX:
        raise AcceleratorError(f"{TIME_LIMIT_ENV}={wish}: not a number of seconds above 0")
    return limit


def answers(plugins: pluggy.PluginManager, plugin: Any, hook: str, **arguments: Any) -> Iterator[Any]:
    """Yield one plugin's answers to a hook; pluggy itself would stop at the first plugin that raises."""
    for implementation in getattr(plugins.hook, hook).get_hookimpls():
        if implementation.plugin is plugin:
            answer = implementation.function(*(arguments[name] for name in implementation.argnames))
            if isinstance(answer, str):
                raise TypeError(f"{hook} returned a str instead of a list")
            items = iter(() if answer is None else answer)
            yield from islice(items, MOST_ANSWERS)
            if next(items, items) is not items:
                raise ValueError(f"{hook} gave more than {MOST_ANSWERS} answers")


def blame_plugin(error: BaseException) -> PluginError | None:
    """Return the error that names the plugin whose code raised `error`, by the traceback; None if no plugin's did.

    It covers calls that do not pass through the wrappers of `accelerators.errors`: attention, which transformers
    calls, and backward passes, which autograd calls. A vendor's package that fails in `import torch` is named too.
    """
    providers = {
        name: Report(point.name, *_named(point.dist)).provider
        for point in _installed()[0]
        if point.value != BUILTIN
        for name in _list_packages(point)
    }
    for cause in causes(error):
        if extension := _EXTENSION.search(describe_error(cause)):
            reason = describe_error(cause.__cause__ or cause)
            return PluginError(
                f"import torch failed in {extension[1]} ({reason}); load the environment of its vendor's software, "
                "uninstall it, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use another device"
            )
        for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if package in ("rlhf", __package__):
                return None  # even if a plugin called
            if package in providers:
                code = frame.f_code
                place = f"{Path(code.co_filename).name}, line {line}, in {code.co_name}"
                words = describe_error(cause)
                hint = "; if it means a lack of memory, the backend's is_out_of_memory must recognize it"
                hint = hint if _MAY_LACK_MEMORY.search(words) else ""
                return PluginError(f"{providers[package]} failed ({place}: {words}); {AUTHORS}{hint}")
    return None


def _list_packages(point: EntryPoint) -> set[str]:
    """Return the top-level packages of a plugin: that of its entry point, and those of its distribution."""
    names = {re.split("[.:]", point.value)[0].strip()}
    with contextlib.suppress(Exception):  # its metadata may be missing or damaged
        assert point.dist is not None
        declared = (point.dist.read_text("top_level.txt") or "").split()
        names.update(declared or (file.parts[0].removesuffix(".py") for file in point.dist.files or ()))
    return names


def _rank(report: Report) -> tuple[int, int, str]:
    group = 0 if report.available else 2 if report.error else 1
    return group, -(report.priority or 0), report.name


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def run_within(limit: float | None, what: str, task: Callable[[], Result]) -> Result:
    """Return the result of `task`, which runs in a thread for at most `limit` seconds.

    A task that hangs (a driver that does not answer) stays behind and does not keep the process from ending. One that
    hangs while it keeps Python's global lock cannot be left behind.

    Args:
        limit: seconds; None: no limit.
        what: name of the task in messages.
        task: the function.

    Raises:
        PluginError: it failed in any way, also by exiting, or took longer.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(task())
        except BaseException as error:  # Ctrl-C does not reach this thread: the plugin itself raised it
            failures.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(limit)
    if results:
        return results[0]
    if failures:
        place = _last_place(traceback.walk_tb(failures[0].__traceback__))
        raise PluginError(f"{what} failed ({describe_error(failures[0])}){place}") from failures[0]
    frame = sys._current_frames().get(thread.ident or 0)
    place = _last_place(reversed(list(traceback.walk_stack(frame)))) if frame else ""
    raise PluginError(
        f"{what} did not answer within {limit:g} s{place}; the driver may hang ({TIME_LIMIT_ENV} sets the limit)"
    )


def _last_place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return " at FILE, line N" of the innermost frame in a plugin's package; "" if no frame is a plugin's.

    Args:
        frames: frames with their lines, the outermost first. The first package outside `_CALLERS` is the plugin's.
    """
    plugin, place = "", ""
    for frame, line in frames:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _CALLERS and package == (plugin := plugin or package):
            place = f" at {Path(frame.f_code.co_filename).name}, line {line}"
    return place


@contextlib.contextmanager
def warn_after(limit: float, what: str) -> Iterator[None]:
    """Warn if this block has not ended after `limit` seconds; for code that must run in the thread of the run."""
    timer = threading.Timer(limit, logger.warning, ["%s (for %g s now)", what, limit])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
