"""Finds the installed plugins, probes their backends and chooses one.

In: the entry points of the environment, and what the user asked for. Out: a `Selection` that can create the backend,
or one `AcceleratorError` that says why there is none. Imports no torch: the choice comes first.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from accelerators import hookspecs
from accelerators.types import API_VERSION, AcceleratorError, AcceleratorSpec, KernelImpl, Probe, Problem

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

BUILTIN = "accelerators.builtin"
CPU = "cpu"
ENV = "RLHF_ACCELERATOR"
ALLOWLIST_ENV = "RLHF_PLUGINS"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What is known of one backend, or of a plugin that could not be loaded.

    Exactly one of `probe` and `error` is set. A plugin that failed before it offered a backend goes by its entry
    point's name and has no `spec`.
    """

    name: str
    distribution: str
    version: str
    spec: AcceleratorSpec | None = None
    probe: Probe | None = None
    error: str | None = None

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


@dataclass(frozen=True)
class Selection:
    """The backend that was chosen, why, and the plugins that take part in its runs."""

    spec: AcceleratorSpec
    provider: str
    reason: str
    plugins: pluggy.PluginManager = field(repr=False)

    @property
    def name(self) -> str:
        return self.spec.name

    def export(self, environ: MutableMapping[str, str], run: Mapping[str, Any] | None = None) -> None:
        """Write the choice, and what the backend wants set for `run`, where other processes will read them.

        Call it before torch is imported. Variables of the backend that the user has set keep their values.
        """
        environ[ENV] = self.name
        for key, value in self.spec.env(run or {}).items():
            environ.setdefault(key, value)

    def create(self) -> Accelerator:
        """Import the backend and make it; torch is imported here.

        Raises:
            AcceleratorError: the factory cannot be imported, or does not make a complete `Accelerator`.
        """
        from accelerators.accelerator import Accelerator

        where = f"accelerator {self.name} of {self.provider}: factory {self.spec.factory!r}"
        module, _, attribute = self.spec.factory.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise AcceleratorError(f"{where} cannot be imported ({_text(error)}); reinstall {self.provider}") from error
        if not (inspect.isclass(cls) and issubclass(cls, Accelerator)):
            raise AcceleratorError(f"{where} is not an Accelerator subclass; report it to the plugin's authors")
        if missing := sorted(cls.__abstractmethods__):
            raise AcceleratorError(f"{where} lacks {', '.join(missing)}; report it to the plugin's authors")
        if (found := getattr(cls, "name", None)) != self.name:
            raise AcceleratorError(f"{where} is named {found!r} instead; report it to the plugin's authors")
        try:
            accelerator = cls()
        except Exception as error:
            raise AcceleratorError(f"{where} failed ({_text(error)}); report it to the plugin's authors") from error
        accelerator.contribute(self._contributed_kernels(accelerator))
        return accelerator

    def check_run(self, accelerator: Accelerator, run: Mapping[str, Any]) -> None:
        """Let every plugin object to a run, given as its configuration's nested plain values.

        Raises:
            AcceleratorError: at least one plugin objects; the message holds every reason with its remedy.
        """
        problems: list[Problem] = []
        for provider, plugin in self.plugins.list_name_plugin():
            try:
                problems += _answers(self.plugins, plugin, "rlhf_check_run", accelerator=accelerator, run=run)
            except Exception as error:
                reason = f"the check of plugin {provider} failed ({_text(error)})"
                problems.append(Problem(reason, f"update it, or leave it out with {ALLOWLIST_ENV}"))
        if problems:
            objections = "; ".join(f"{problem.reason}: {problem.remedy}" for problem in problems)
            raise AcceleratorError(f"this run cannot start on {self.name}: {objections}")

    def _contributed_kernels(self, accelerator: Accelerator) -> Iterable[KernelImpl]:
        for provider, plugin in self.plugins.list_name_plugin():
            try:
                yield from _answers(self.plugins, plugin, "rlhf_kernels", accelerator=accelerator)
            except Exception as error:
                logger.warning("plugin %s offers no kernels: %s", provider, _text(error))


def available(environ: Mapping[str, str] = os.environ) -> list[Report]:
    """Every backend that a plugin offers and every plugin that is broken, best first. Never raises."""
    return _discover(environ)[1]


def select(cli: str | None = None, config: str = "auto", environ: Mapping[str, str] = os.environ) -> Selection:
    """Choose a backend: the command line's wish, else that of RLHF_ACCELERATOR, else the config's, else the best.

    A backend that was named is taken or the reason why not is raised; there is no fallback.

    Raises:
        AcceleratorError: nothing can be chosen, or the choice would be ambiguous.
    """
    wish, source = _wish(cli, config, environ.get(ENV))
    plugins, reports = _discover(environ)
    if wish == "auto":
        report, reason = _best(reports)
    else:
        report, reason = _named(wish, source, reports), f"{wish} was asked for{source}"
    assert report.spec is not None  # an available backend has one
    return Selection(report.spec, report.provider, reason, plugins)


def verify_agreement(names: Sequence[str]) -> None:
    """Check the backends' names of all ranks, in rank order.

    Raises:
        AcceleratorError: they differ; the message names the ranks.
    """
    if len(set(names)) > 1:
        found = {
            name: [str(rank) for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)
        }
        listed = "; ".join(f"{name} on ranks {', '.join(ranks)}" for name, ranks in found.items())
        raise AcceleratorError(f"ranks run on different accelerators ({listed}); start all with the same --accelerator")


def _wish(cli: str | None, config: str, env: str | None) -> tuple[str, str]:
    """What was asked for, and where unless on the command line.

    An `auto` there overrides the config, but not a name in the environment: the launcher has resolved it already.
    """
    cli, env = cli or None, env or None
    if cli and env and "auto" not in (cli, env) and cli != env:
        raise AcceleratorError(f"--accelerator {cli} contradicts {ENV}={env}; drop one of them")
    for value, source in ((cli, ""), (env, f" ({ENV})")):
        if value and value != "auto":
            return value, source
    return ("auto", "") if cli or env else (config, " (from the config)")


def _named(name: str, source: str, reports: list[Report]) -> Report:
    usable = ", ".join(dict.fromkeys(report.name for report in reports if report.available)) or "none"
    where = f"accelerator {name!r}{source}"
    same = [report for report in reports if report.name == name]
    if sum(report.spec is not None for report in same) > 1:
        raise AcceleratorError(f"{where}: {_duplicate(same)}")
    if same:
        report = same[0]
        if report.available:
            return report
        if report.error:
            raise AcceleratorError(
                f"{where}: its plugin {report.provider} is {report.reason}; update or reinstall it, or use: {usable}"
            )
        raise AcceleratorError(f"{where}: not available here: {report.reason}; available: {usable}")
    near = difflib.get_close_matches(name, [report.name for report in reports], n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}? " if near else ""
    broken = "".join(f"; plugin {report.provider} is {report.reason}" for report in reports if report.error)
    raise AcceleratorError(f"{where}: no such accelerator; {hint}available: {usable}{broken}")


def _best(reports: list[Report]) -> tuple[Report, str]:
    """The available backend with the highest priority (reports come best first), and why it and not the others."""
    for name in dict.fromkeys(report.name for report in reports if report.spec):
        same = [report for report in reports if report.spec and report.name == name]
        if len(same) > 1:
            raise AcceleratorError(_duplicate(same))
    usable = [report for report in reports if report.available]
    broken = [report for report in reports if report.error]
    if not usable:
        reasons = "; ".join(f"{report.name}: {report.reason}" for report in reports) or "no plugin is installed"
        raise AcceleratorError(f"no accelerator is available ({reasons}); reinstall rlhf, which brings the cpu backend")
    best = usable[0]
    tied = [report for report in usable if report.priority == best.priority]
    if len(tied) > 1:
        rivals = " and ".join(f"{report.name} ({report.provider})" for report in tied)
        raise AcceleratorError(
            f"{rivals} are both available with priority {best.priority}; name one with --accelerator {best.name}"
        )
    if best.name == CPU and broken:
        listed = "; ".join(f"{report.provider} is {report.reason}" for report in broken)
        raise AcceleratorError(
            f"only the cpu is left, while a plugin could not be used: {listed}; "
            f"repair or uninstall it, or ask for the CPU with --accelerator {CPU}"
        )
    others = [
        f"{report.name} has priority {report.priority}" if report.available else f"{report.name}: {report.reason}"
        for report in reports
        if report is not best
    ]
    reason = f"auto: {best.name} has the highest priority ({best.priority}) of those available"
    return best, "; ".join([reason, *others])


def _duplicate(reports: list[Report]) -> str:
    providers = " and ".join(report.provider for report in reports)
    return f"{providers} both offer an accelerator named {reports[0].name!r}; uninstall one of them"


def _discover(environ: Mapping[str, str]) -> tuple[pluggy.PluginManager, list[Report]]:
    """Load plugins one at a time; a broken one becomes a report and stays out of the manager."""
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    points, reports = _allowed(entry_points(group=hookspecs.ENTRY_POINT_GROUP), environ.get(ALLOWLIST_ENV))
    loaded: dict[Any, tuple[str, str, str]] = {}
    for point in points:
        distribution, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "")
        origin = (point.name, distribution, version)
        registered = f"{distribution} {version} ({point.name})"
        try:
            plugin = point.load()
            plugins.register(plugin, name=registered)
            loaded[plugin] = origin
        except (Exception, SystemExit) as error:
            if plugins.has_plugin(registered):
                plugins.unregister(name=registered)
            reports.append(Report(*origin, error=_text(error)))
    for plugin, problem in _with_unknown_hooks(plugins):
        reports.append(Report(*loaded.pop(plugin), error=problem))
    for plugin, origin in loaded.items():
        reports += _offers(plugins, plugin, origin)
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
            yield error.plugin, _text(error)


def _offers(plugins: pluggy.PluginManager, plugin: Any, origin: tuple[str, str, str]) -> list[Report]:
    try:
        return [_probed(spec, origin) for spec in _answers(plugins, plugin, "rlhf_accelerators")]
    except Exception as error:
        return [Report(*origin, error=f"rlhf_accelerators failed ({_text(error)})")]


def _probed(spec: AcceleratorSpec, origin: tuple[str, str, str]) -> Report:
    provider = origin[1:]
    if not isinstance(spec, AcceleratorSpec):
        return Report(*origin, error=f"rlhf_accelerators returned a {type(spec).__name__} instead of AcceleratorSpec")
    if spec.api_version != API_VERSION:
        error = f"it is written for version {spec.api_version} of the accelerator interface, this is {API_VERSION}"
        return Report(spec.name, *provider, spec=spec, error=error)
    try:
        probe = spec.probe()
        if not isinstance(probe, Probe):
            raise TypeError(f"it returned a {type(probe).__name__} instead of Probe")
    except (Exception, SystemExit) as error:
        return Report(spec.name, *provider, spec=spec, error=f"its probe failed ({_text(error)})")
    return Report(spec.name, *provider, spec=spec, probe=probe)


def _answers(plugins: pluggy.PluginManager, plugin: Any, hook: str, **arguments: Any) -> Iterator[Any]:
    """What one plugin answers to a hook; pluggy would stop all at the first that raises."""
    others = [other for _, other in plugins.list_name_plugin() if other is not plugin]
    for answer in plugins.subset_hook_caller(hook, others)(**arguments):
        yield from answer


def _rank(report: Report) -> tuple[int, int, str]:
    group = 0 if report.available else 2 if report.error else 1
    return group, -(report.priority or 0), report.name


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _text(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
