"""Chooses one of the backends that are installed.

In: the reports of `discovery`, and what the user asked for. Out: a `Selection` that can create the backend, or one
`AcceleratorError` that says why there is none. Imports no torch: the choice comes first.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pluggy

from accelerators.discovery import Report, answers, discover, time_limit
from accelerators.guard import lack_of_memory, let_judge, noticed, text
from accelerators.types import (
    ALLOWLIST_ENV,
    AUTHORS,
    AcceleratorError,
    AcceleratorSpec,
    KernelImpl,
    PluginDefect,
    Problem,
    nearest,
    received,
)
from accelerators.watched import running

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

CPU = "cpu"
ENV = "RLHF_ACCELERATOR"

_FROM_ENV, _FROM_CONFIG = f" ({ENV})", " (from the config)"
_WHERE = {"": "with --accelerator", _FROM_ENV: f"with {ENV}", _FROM_CONFIG: "in the config"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """The backend that was chosen, why, and the plugins that take part in its runs."""

    spec: AcceleratorSpec
    provider: str
    reason: str
    plugins: pluggy.PluginManager = field(repr=False)
    summary: str = ""
    """`reason` in a few words."""

    @property
    def name(self) -> str:
        return self.spec.name

    def export(self, environ: MutableMapping[str, str], run: Mapping[str, Any] | None = None) -> None:
        """Write the choice, and what the backend wants set for `run`, where other processes will read them.

        Call it before torch is imported. Variables of the backend that the user has set keep their values.

        Raises:
            AcceleratorError: the backend does not say what it wants set, or it is no text.
        """
        try:
            wanted = dict(self.spec.env(run or {}))
            wrong = [key for key, value in wanted.items() if not (isinstance(key, str) and isinstance(value, str))]
            if wrong:
                raise TypeError(f"{wrong[0]!r} or its value is no str")
        except (Exception, SystemExit) as error:
            raise PluginDefect(
                f"accelerator {self.name} of {self.provider}: its env failed ({text(error)}); {AUTHORS}"
            ) from error
        environ[ENV] = self.name
        for key, value in wanted.items():
            environ.setdefault(key, value)

    def create(self) -> Accelerator:
        """Import the backend and make it; torch is imported here.

        Raises:
            AcceleratorError: the factory cannot be imported, or does not make a complete `Accelerator`.
        """
        from accelerators import blame
        from accelerators.accelerator import Accelerator

        who = f"accelerator {self.name} of {self.provider}"
        where = f"{who}: factory {self.spec.factory!r}"
        module, _, attribute = self.spec.factory.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise AcceleratorError(f"{where} cannot be imported ({text(error)}); reinstall {self.provider}") from error
        except (Exception, SystemExit) as error:
            raise PluginDefect(f"{where} cannot be imported ({text(error)}); {AUTHORS}") from error
        if not (inspect.isclass(cls) and issubclass(cls, Accelerator)):
            raise PluginDefect(f"{where} is not an Accelerator subclass; {AUTHORS}")
        if (found := getattr(cls, "name", None)) != self.name:
            raise PluginDefect(f"{where} is named {found!r} instead; {AUTHORS}")
        if wrong := blame.mistake(cls, Accelerator):
            raise PluginDefect(f"{where} {wrong}; {AUTHORS}")
        try:
            accelerator = cls()
            accelerator.provider = self.provider
        except AcceleratorError:
            raise
        except (Exception, SystemExit) as error:
            if lack_of_memory(error):
                raise
            raise PluginDefect(f"{where} failed ({text(error)}); {AUTHORS}") from error
        if not blame.ours(cls):
            blame.watch(accelerator, Accelerator, who)
        let_judge(accelerator)
        accelerator.contribute(self._contributed_kernels(accelerator))
        return accelerator

    def check_run(self, accelerator: Accelerator, run: Mapping[str, Any]) -> None:
        """Let every plugin object to a run, given as its configuration's nested plain values.

        A check that fails is an objection of the plugin that offers this backend, else a warning.

        Raises:
            AcceleratorError: at least one plugin objects; the message holds every reason with its remedy.
        """
        problems: list[Problem] = []
        failures: list[Problem] = []
        own = False
        for plugin, module in self.plugins.list_name_plugin():
            try:
                with (
                    noticed(f"plugin {plugin} does not answer rlhf_check_run", time_limit(os.environ)),
                    running(plugin),
                ):
                    for answer in answers(self.plugins, module, "rlhf_check_run", accelerator=accelerator, run=run):
                        problems.append(received(answer, Problem))
            except (Exception, SystemExit) as error:
                reason = f"the check of plugin {plugin} failed ({text(error)})"
                failures.append(Problem(reason, f"update it, or leave it out with {ALLOWLIST_ENV}"))
                own = own or self._is_own(plugin)
        objections = [f"{problem.reason}: {problem.remedy}" for problem in (*problems, *failures)]
        if problems or own:
            raise AcceleratorError(f"this run cannot start on {self.name}: {'; '.join(objections)}")
        for objection in objections:
            logger.warning("%s", objection)

    def _contributed_kernels(self, accelerator: Accelerator) -> list[KernelImpl]:
        """The kernels of all plugins that answer as they should; the one that offers this backend has to."""
        found: list[KernelImpl] = []
        for plugin, module in self.plugins.list_name_plugin():
            try:
                with noticed(f"plugin {plugin} does not answer rlhf_kernels", time_limit(os.environ)), running(plugin):
                    offered = list(answers(self.plugins, module, "rlhf_kernels", accelerator=accelerator))
                found += [replace(received(kernel, KernelImpl), plugin=plugin) for kernel in offered]
            except (Exception, SystemExit) as error:
                if self._is_own(plugin):
                    who = f"accelerator {self.name} of {self.provider}"
                    raise PluginDefect(f"{who}: its hook rlhf_kernels failed ({text(error)}); {AUTHORS}") from error
                logger.warning("plugin %s offers no kernels: %s", plugin, text(error))
        return found

    def _is_own(self, plugin: str) -> bool:
        """Whether this plugin, as it is called in the manager, offers this backend."""
        return plugin.startswith(f"{self.provider} ")


def select(cli: str | None = None, config: str = "auto", environ: Mapping[str, str] = os.environ) -> Selection:
    """Choose a backend: the command line's wish, else that of RLHF_ACCELERATOR, else the config's, else the best.

    A backend that was named is taken or the reason why not is raised; there is no fallback.

    Raises:
        AcceleratorError: nothing can be chosen, or the choice would be ambiguous.
    """
    wish, source = _wish(cli, config, environ.get(ENV))
    plugins, reports = discover(environ)
    if wish == "auto":
        report, reason = _best(reports)
        summary = _summary(report, reports)
    else:
        report, reason = _named(wish, source, reports), f"{wish} was asked for{source}"
        summary = f"asked for {_WHERE[source]}"
    assert report.spec is not None  # an available backend has one
    return Selection(report.spec, report.provider, reason, plugins, summary)


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
    for value, source in ((cli, ""), (env, _FROM_ENV)):
        if value and value != "auto":
            return value, source
    return ("auto", "") if cli or env else (config, _FROM_CONFIG)


def _named(name: str, source: str, reports: list[Report]) -> Report:
    usable = ", ".join(dict.fromkeys(report.name for report in reports if report.available)) or "none"
    where = f"accelerator {name!r}{source}"
    broken = "".join(f"; plugin {report.provider} is {report.reason}" for report in reports if report.error)
    same = [report for report in reports if report.name == name]
    if len(whole := _whole(same)) > 1:
        raise AcceleratorError(f"{where}: {_duplicate(whole)}")
    if same:
        report = [*whole, *same][0]
        if report.available:
            return report
        if report.error:
            raise AcceleratorError(
                f"{where}: its plugin {report.provider} is {report.reason}; update or reinstall it, or use: {usable}"
            )
        raise AcceleratorError(f"{where}: not available here: {report.reason}; available: {usable}{broken}")
    near = nearest(name, [report.name for report in reports], cutoff=0.7)
    hint = f"did you mean {near!r}? " if near else ""
    raise AcceleratorError(f"{where}: no such accelerator; {hint}available: {usable}{broken}")


def _best(reports: list[Report]) -> tuple[Report, str]:
    """The available backend with the highest priority (reports come best first), and why it and not the others."""
    for name in dict.fromkeys(report.name for report in reports):
        same = [report for report in _whole(reports) if report.name == name]
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
    if sharing := [report for report in usable[1:] if _shared(best, report)]:
        rivals = " and ".join(f"{report.name} ({report.provider})" for report in (best, *sharing))
        raise AcceleratorError(
            f"{rivals} claim the same device, {_shared(best, sharing[0])}; name one with --accelerator {best.name}, or "
            f"leave a plugin out with {ALLOWLIST_ENV}"
        )
    if best.name == CPU and broken:
        listed = "; ".join(f"{report.provider} is {report.reason}" for report in broken)
        raise AcceleratorError(
            f"only the cpu is left, while a plugin could not be used: {listed}; "
            f"repair or uninstall it, or ask for the CPU with --accelerator {CPU}"
        )
    if best.name == CPU and (idle := [report for report in reports if report.probe and report.probe.present]):
        listed = "; ".join(f"{report.name} ({report.found}): {report.reason}" for report in idle)
        raise AcceleratorError(
            f"only the cpu is left, while a device is there that cannot be used: {listed}; "
            f"or ask for the CPU with --accelerator {CPU}"
        )
    others = [
        f"{report.name} has priority {report.priority}" if report.available else f"{report.name}: {report.reason}"
        for report in reports
        if report is not best
    ]
    reason = f"auto: {best.name} has the highest priority ({best.priority}) of those available"
    return best, "; ".join([reason, *others])


def _summary(best: Report, reports: list[Report]) -> str:
    """Why `auto` took this backend; where only the CPU is left, which others are installed."""
    missing = [report.name for report in reports if not report.available]
    if best.name != CPU or not missing:
        return "auto: the best available"
    unused = [
        f"{report.name} is not used: {report.reason}" for report in reports if not report.available and report.found
    ]
    if unused:  # hidden by the user, or too old
        return f"auto: {'; '.join(unused)}"
    verb = "is" if len(missing) == 1 else "are"
    return f"auto: {', '.join(missing)} {verb} not available, `rlhf accelerators explain` tells why"


def _shared(one: Report, other: Report) -> str:
    """A device that both backends name; empty where there is none."""
    named = other.probe.devices if other.probe else ()
    return next((device for device in one.probe.devices if device in named), "") if one.probe else ""


def _whole(reports: list[Report]) -> list[Report]:
    """Without the broken ones: those stand in the way of no other."""
    return [report for report in reports if not report.error]


def _duplicate(reports: list[Report]) -> str:
    providers = " and ".join(report.provider for report in reports)
    return (
        f"{providers} both offer an accelerator named {reports[0].name!r}; uninstall one of them, or leave it out with "
        f"{ALLOWLIST_ENV}, which names the plugins to load (none: only those of rlhf itself)"
    )
