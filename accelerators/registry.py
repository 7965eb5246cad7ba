"""Chooses one of the installed backends.

Input: the reports of `discovery`, and the user's wish. Output: a `Selection` that can create the backend, or an
`AcceleratorError` with the reason. This module does not import torch: the choice comes first.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import reprlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pluggy

from accelerators import compatibility
from accelerators.discovery import Report, answers, discover, time_limit, warn_after
from accelerators.errors import (
    AUTHORS,
    AcceleratorError,
    PluginError,
    describe_error,
    is_built_in,
    name_backend,
    naming,
    set_out_of_memory_judge,
)
from accelerators.types import ALLOWLIST_ENV, AcceleratorSpec, KernelImpl, Problem, did_you_mean, expect

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
        """The backend's name."""
        return self.spec.name

    def export(self, environ: MutableMapping[str, str], run: Mapping[str, Any] | None = None) -> None:
        """Write the choice and the backend's environment variables to where other processes will read them.

        Call it before torch is imported. Variables that the user has set keep their values.

        Args:
            environ: the environment.
            run: the run's configuration as nested plain values.

        Raises:
            AcceleratorError: the backend's `env` failed or returned something else than strings.
        """
        with naming(f"{self._where}: its env"):
            variables = dict(self.spec.env(run or {}))
            for key, value in variables.items():
                if not (isinstance(key, str) and isinstance(value, str)):
                    raise TypeError(f"{key!r} or its value is no str")
        environ[ENV] = self.name
        for key, value in variables.items():
            environ.setdefault(key, value)

    def create(self) -> Accelerator:
        """Import the backend and create it; torch is imported here.

        Raises:
            AcceleratorError: the factory cannot be imported, or creates no complete `Accelerator`.
        """
        from accelerators.accelerator import Accelerator

        where = f"{self._where}: factory {self.spec.factory!r}"
        module, _, attribute = self.spec.factory.partition(":")
        with naming(where):
            try:
                cls = getattr(importlib.import_module(module), attribute)
            except ImportError as error:
                reason = f"{where} cannot be imported ({describe_error(error)})"
                raise AcceleratorError(f"{reason}; reinstall {self.provider}") from error
            if not (inspect.isclass(cls) and issubclass(cls, Accelerator)):
                raise TypeError(f"it is {reprlib.repr(cls)}, expected a subclass of Accelerator")
            if (name := getattr(cls, "name", None)) != self.name:
                raise ValueError(f"its name is {name!r}, expected {self.name!r}")
            accelerator = compatibility.adapt(cls, compatibility.used_version(self.spec), self._where)()
        accelerator.provider = self.provider
        set_out_of_memory_judge(accelerator)
        accelerator.kernels.add(self._contributed_kernels(accelerator))
        return accelerator if is_built_in(cls) else name_backend(accelerator, self._where)

    def check_run(self, accelerator: Accelerator, run: Mapping[str, Any]) -> None:
        """Let every plugin object to a run, given as its configuration's nested plain values.

        A check that fails is an objection of the plugin that offers this backend; of other plugins, a warning.

        Raises:
            AcceleratorError: at least one plugin objects; the message contains every reason with its remedy.
        """
        problems: list[Problem] = []
        failures: list[Problem] = []
        own_failed = False
        for plugin, module in self.plugins.list_name_plugin():
            try:
                with warn_after(time_limit(os.environ), f"plugin {plugin} does not answer rlhf_check_run"):
                    for answer in answers(self.plugins, module, "rlhf_check_run", accelerator=accelerator, run=run):
                        problems.append(expect(answer, Problem))
            except (Exception, SystemExit) as error:
                reason = f"the check of plugin {plugin} failed ({describe_error(error)})"
                failures.append(Problem(reason, f"update it, or leave it out with {ALLOWLIST_ENV}"))
                own_failed = own_failed or self._offers_backend(plugin)
        objections = [f"{problem.reason}: {problem.remedy}" for problem in (*problems, *failures)]
        if problems or own_failed:
            raise AcceleratorError(f"this run cannot start on {self.name}: {'; '.join(objections)}")
        for objection in objections:
            logger.warning("%s", objection)

    @property
    def _where(self) -> str:
        """The backend and its plugin in messages."""
        return f"accelerator {self.name} of {self.provider}"

    def _contributed_kernels(self, accelerator: Accelerator) -> list[KernelImpl]:
        """Return the kernels of all plugins; the plugin that offers this backend must not fail."""
        kernels: list[KernelImpl] = []
        for plugin, module in self.plugins.list_name_plugin():
            try:
                with warn_after(time_limit(os.environ), f"plugin {plugin} does not answer rlhf_kernels"):
                    offers = list(answers(self.plugins, module, "rlhf_kernels", accelerator=accelerator))
                kernels += [replace(expect(kernel, KernelImpl), plugin=plugin) for kernel in offers]
            except (Exception, SystemExit) as error:
                if self._offers_backend(plugin):
                    reason = f"{self._where}: its hook rlhf_kernels failed ({describe_error(error)})"
                    raise PluginError(f"{reason}; {AUTHORS}") from error
                logger.warning("plugin %s offers no kernels: %s", plugin, describe_error(error))
        return kernels

    def _offers_backend(self, plugin: str) -> bool:
        """Return whether a plugin, by its name in the manager, offers this backend."""
        return plugin.startswith(f"{self.provider} ")


def select(cli: str | None = None, config: str = "auto", environ: Mapping[str, str] = os.environ) -> Selection:
    """Choose a backend: by the command line, else by RLHF_ACCELERATOR, else by the configuration, else the best.

    A named backend is taken, or an error says why not; there is no fallback.

    Raises:
        AcceleratorError: no backend can be chosen, or the choice is ambiguous.
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
    """Check that all ranks run on the same backend.

    Args:
        names: the ranks' backends, in rank order.

    Raises:
        AcceleratorError: they differ; the message names the ranks.
    """
    if len(set(names)) > 1:
        ranks = {
            name: [str(rank) for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)
        }
        listed = "; ".join(f"{name} on ranks {', '.join(numbers)}" for name, numbers in ranks.items())
        raise AcceleratorError(f"ranks run on different accelerators ({listed}); start all with the same --accelerator")


def _wish(cli: str | None, config: str, env: str | None) -> tuple[str, str]:
    """Return the wish, and where it comes from unless from the command line.

    An `auto` there overrides the configuration, but not a name in the environment: the launcher has resolved it.
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
            states_remedy = report.spec and compatibility.refuse_versions(report.spec, report.distribution)
            remedy = "or use" if states_remedy else "update or reinstall it, or use"
            raise AcceleratorError(f"{where}: its plugin {report.provider} is {report.reason}; {remedy}: {usable}")
        raise AcceleratorError(f"{where}: not available here: {report.reason}; available: {usable}{broken}")
    hint = did_you_mean(name, {report.name for report in reports}, cutoff=0.7)
    raise AcceleratorError(f"{where}: no such accelerator; {hint}available: {usable}{broken}")


def _best(reports: list[Report]) -> tuple[Report, str]:
    """Return the available backend with the highest priority (reports are ordered best first), and why."""
    for name in dict.fromkeys(report.name for report in reports):
        same = [report for report in _whole(reports) if report.name == name]
        if len(same) > 1:
            raise AcceleratorError(_duplicate(same))
    usable = [report for report in reports if report.available]
    broken = [report for report in reports if report.error]
    if not usable:
        reasons = "; ".join(f"{report.name}: {report.reason}" for report in reports) or "no plugin is installed"
        raise AcceleratorError(
            f"no accelerator is available ({reasons}); reinstall rlhf, which contains the cpu backend"
        )
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
            f"only the cpu is available, and a plugin could not be used: {listed}; "
            f"repair or uninstall it, or select the CPU with --accelerator {CPU}"
        )
    if best.name == CPU and (idle := [report for report in reports if report.probe and report.probe.present]):
        listed = "; ".join(f"{report.name} ({report.devices}): {report.reason}" for report in idle)
        raise AcceleratorError(
            f"only the cpu is available, and a device that is present cannot be used: {listed}; "
            f"or select the CPU with --accelerator {CPU}"
        )
    others = [
        f"{report.name} has priority {report.priority}" if report.available else f"{report.name}: {report.reason}"
        for report in reports
        if report is not best
    ]
    reason = f"auto: {best.name} has the highest priority ({best.priority}) of those available"
    return best, "; ".join([reason, *others])


def _summary(best: Report, reports: list[Report]) -> str:
    """Return why `auto` took this backend; if it is the CPU, which others are installed."""
    missing = [report.name for report in reports if not report.available]
    if best.name != CPU or not missing:
        return "auto: the best available"
    unused = [
        f"{report.name} is not used: {report.reason}" for report in reports if not report.available and report.devices
    ]
    if unused:  # hidden by the user, or too old
        return f"auto: {'; '.join(unused)}"
    verb = "is" if len(missing) == 1 else "are"
    return f"auto: {', '.join(missing)} {verb} not available, `rlhf accelerators explain` tells why"


def _shared(first: Report, second: Report) -> str:
    """Return a device that both backends name; "" if there is none."""
    devices = second.probe.devices if second.probe else ()
    return next((device for device in first.probe.devices if device in devices), "") if first.probe else ""


def _whole(reports: list[Report]) -> list[Report]:
    """Return the reports of plugins that work; broken ones do not compete."""
    return [report for report in reports if not report.error]


def _duplicate(reports: list[Report]) -> str:
    providers = " and ".join(report.provider for report in reports)
    return (
        f"{providers} both offer an accelerator named {reports[0].name!r}; uninstall one of them, or leave it out with "
        f"{ALLOWLIST_ENV}, which names the plugins to load (none: only those of rlhf itself)"
    )
