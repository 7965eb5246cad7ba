"""Loads the installed plugins one by one and probes the backends that they offer.

In: the entry points of the environment. Out: pluggy's manager with the plugins that work, and a `Report` on every
backend and on every plugin that does not work; one broken plugin stops none of the others. Imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from accelerators import hookspecs
from accelerators.types import API_VERSION, AcceleratorError, AcceleratorSpec, Probe

BUILTIN = "accelerators.builtin"
ALLOWLIST_ENV = "RLHF_PLUGINS"
TIME_LIMIT_ENV = "RLHF_PROBE_TIMEOUT"

_IMPORTS_TORCH = (
    "imports torch {when}, which must come after the choice of a backend: some runtimes read their environment then"
)


@dataclass(frozen=True)
class Report:
    """What is known of one backend, or of a plugin that could not be loaded.

    Exactly one of `probe` and `error` is set. A plugin that failed before it offered a backend goes by its entry
    point's name and has no `spec`. `warning` says what the plugin should not do although it works.
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
        return self.spec.priority if self.spec else None

    @property
    def available(self) -> bool:
        return self.probe is not None and self.probe.ok

    @property
    def provider(self) -> str:
        """The distribution and its version, as pip names them."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def reason(self) -> str:
        """Why the backend is, or is not, available."""
        return self.probe.reason if self.probe else f"broken: {self.error}"


def available(environ: Mapping[str, str] = os.environ) -> list[Report]:
    """Every backend that a plugin offers and every plugin that is broken, best first."""
    return discover(environ)[1]


def discover(environ: Mapping[str, str]) -> tuple[pluggy.PluginManager, list[Report]]:
    """Load plugins one at a time; a broken one becomes a report and stays out of the manager."""
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    points, reports = _allowed(entry_points(group=hookspecs.ENTRY_POINT_GROUP), environ.get(ALLOWLIST_ENV))
    limit = _time_limit(environ)
    loaded: dict[Any, tuple[str, str, str]] = {}
    warnings: dict[Any, str] = {}
    for point in points:
        distribution, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "")
        origin = (point.name, distribution, version)
        registered = f"{distribution} {version} ({point.name})"
        clean = "torch" not in sys.modules
        try:
            plugin = point.load()
            plugins.register(plugin, name=registered)
            loaded[plugin] = origin
            if clean and "torch" in sys.modules:
                warnings[plugin] = _IMPORTS_TORCH.format(when="when it is loaded")
        except (Exception, SystemExit) as error:
            if plugins.has_plugin(registered):
                plugins.unregister(name=registered)
            reports.append(Report(*origin, error=text(error)))
    for plugin, problem in _with_unknown_hooks(plugins):
        reports.append(Report(*loaded.pop(plugin), error=problem))
    for plugin, origin in loaded.items():
        reports += [
            replace(report, warning=report.warning or warnings.get(plugin))
            for report in _offers(plugins, plugin, origin, limit)
        ]
    return plugins, sorted(reports, key=_rank)


def _allowed(points: Iterable[EntryPoint], allowlist: str | None) -> tuple[list[EntryPoint], list[Report]]:
    """The entry points to load, in order of name, and a report for each plugin that the allowlist names in vain.

    The list names entry points or distributions; the built-in backends are always there, so `none` leaves only them.
    """
    points = sorted(points, key=lambda point: (point.name, point.value))
    if not allowlist:
        return points, []
    wanted = {_normalized(part) for part in allowlist.split(",")} - {"", "none"}
    names = [{_normalized(point.name), _normalized(point.dist.name if point.dist else "")} for point in points]
    missing = sorted(wanted.difference(*names))
    error = f"named in {ALLOWLIST_ENV}, but no such plugin is installed"
    return (
        [point for point, own in zip(points, names, strict=True) if point.module == BUILTIN or own & wanted],
        [Report(name, name, "", error=error) for name in missing],
    )


def _with_unknown_hooks(plugins: pluggy.PluginManager) -> Iterator[tuple[Any, str]]:
    """Take out the plugins that mark a function as a hook which does not exist: a misspelt one would do nothing."""
    while True:
        try:
            return plugins.check_pending()
        except pluggy.PluginValidationError as error:
            plugins.unregister(error.plugin)
            yield error.plugin, text(error)


def _offers(plugins: pluggy.PluginManager, plugin: Any, origin: tuple[str, str, str], limit: float) -> list[Report]:
    try:
        return [_probed(spec, origin, limit) for spec in answers(plugins, plugin, "rlhf_accelerators")]
    except Exception as error:
        return [Report(*origin, error=f"rlhf_accelerators failed ({text(error)})")]


def _probed(spec: AcceleratorSpec, origin: tuple[str, str, str], limit: float) -> Report:
    provider = origin[1:]
    if not isinstance(spec, AcceleratorSpec):
        return Report(*origin, error=f"rlhf_accelerators returned a {type(spec).__name__} instead of AcceleratorSpec")
    if spec.api_version != API_VERSION:
        error = f"it is written for version {spec.api_version} of the accelerator interface, this is {API_VERSION}"
        return Report(spec.name, *provider, spec=spec, error=error)
    clean = "torch" not in sys.modules
    answer = _within(limit, spec)
    warning = _IMPORTS_TORCH.format(when="in its probe") if clean and "torch" in sys.modules else None
    if isinstance(answer, Probe):
        return Report(spec.name, *provider, spec=spec, probe=answer, warning=warning)
    return Report(spec.name, *provider, spec=spec, error=answer, warning=warning)


def _within(limit: float, spec: AcceleratorSpec) -> Probe | str:
    """A backend's probe, or what is wrong with it.

    It runs in a thread, which ends before anything forks; one that hangs (a driver that does not answer) is left
    behind and does not keep the process from ending.
    """
    answers: list[Probe | str] = []

    def probe() -> None:
        try:
            found = spec.probe()
            right = isinstance(found, Probe)
            answers.append(found if right else f"its probe returned a {type(found).__name__} instead of a Probe")
        except (Exception, SystemExit) as error:
            answers.append(f"its probe failed ({text(error)})")

    thread = threading.Thread(target=probe, name=f"probe of {spec.name}", daemon=True)
    thread.start()
    thread.join(limit)
    late = f"its probe did not answer within {limit:g} s; the driver may hang ({TIME_LIMIT_ENV} sets the limit)"
    return answers[0] if answers else late


def _time_limit(environ: Mapping[str, str]) -> float:
    """Seconds that a probe may take."""
    wish = environ.get(TIME_LIMIT_ENV) or "10"
    try:
        limit = float(wish)
    except ValueError:
        limit = 0
    if not 0 < limit < threading.TIMEOUT_MAX:
        raise AcceleratorError(f"{TIME_LIMIT_ENV}={wish}: not a number of seconds above 0")
    return limit


def answers(plugins: pluggy.PluginManager, plugin: Any, hook: str, **arguments: Any) -> Iterator[Any]:
    """What one plugin answers to a hook; pluggy would stop all at the first that raises."""
    others = [other for _, other in plugins.list_name_plugin() if other is not plugin]
    for answer in plugins.subset_hook_caller(hook, others)(**arguments):
        yield from answer


def _rank(report: Report) -> tuple[int, int, str]:
    group = 0 if report.available else 2 if report.error else 1
    return group, -(report.priority or 0), report.name


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def text(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
