"""Plugins of former versions of the interface: which are accepted, and all that rlhf does so that they keep working.

A new version adds members with defaults, so that plugins of the version before need no adapter. Only this module
translates former names; it logs each of them once in a process. It does not import torch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accelerators import errors
from accelerators.types import API_VERSION, OLDEST_API_VERSION, AcceleratorSpec, KernelImpl

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

CHANGES: Mapping[int, tuple[str, ...]] = {
    2: (
        "rename kernels() to kernel_implementations()",
        "call kernels.get() and kernels.capabilities() instead of kernel() and capabilities()",
        "import PluginError and find_out_of_memory instead of PluginDefect and lack_of_memory",
    ),
    3: (),
}
"""The changes that each version asks of authors; docs/interface-changelog.md lists additions too."""

PAGE = "docs/interface-changelog.md"

FORMER_NAMES: Mapping[str, str] = {"PluginDefect": "PluginError", "lack_of_memory": "find_out_of_memory"}
"""Names that `accelerators` exported in interface 1, and the present ones, which `accelerators.errors` has."""

logger = logging.getLogger(__name__)


def refuse_versions(spec: AcceleratorSpec, distribution: str) -> str:
    """Return why rlhf cannot use a plugin of these versions of the interface, and what to do; "" if it can."""
    oldest, newest = spec.api_versions
    stated = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    accepted = f"rlhf accepts {OLDEST_API_VERSION} to {API_VERSION}"
    if oldest > API_VERSION:
        remedy = f"update rlhf, or install an older {distribution}"
        return f"it needs {stated} of the accelerator interface, and {accepted}; {remedy}"
    if newest < OLDEST_API_VERSION:
        return f"it is written for {stated} of the accelerator interface, and {accepted}; update {distribution}"
    return ""


def used_version(spec: AcceleratorSpec) -> int:
    """Return the version of the interface that an accepted plugin runs with."""
    return min(spec.api_versions[1], API_VERSION)


def describe_changes(version: int) -> str:
    """Return in one line what the author of a plugin of this version has to change; "" if it is the newest."""
    if version == API_VERSION:
        return ""
    later = [change for number, changes in CHANGES.items() if number > version for change in changes]
    steps = "; ".join([*later, f"state api_version={API_VERSION}"])
    return f"written for interface {version}, and the newest is {API_VERSION}: {steps}; {PAGE} lists what is new"


def adapt(backend: type[Accelerator], version: int, where: str) -> type[Accelerator]:
    """Return a plugin's class as rlhf calls it: the class itself, or for former versions a subclass that translates.

    Args:
        backend: the class.
        version: the version of the interface that it was written for.
        where: the backend and its plugin, for messages.

    Raises:
        TypeError: the plugin defines a former name, but states a version that no longer has it.
    """
    from accelerators.accelerator import Accelerator

    former = vars(Accelerator)["kernels"]
    method: Callable[[Any], Iterable[KernelImpl]] = backend.kernels  # type: ignore[assignment]
    if method is former:
        return backend
    if version > 1:
        raise TypeError(f"it defines kernels(), which interface 2 renamed to kernel_implementations(); {CHANGES[2][0]}")
    _name_once(f"{where}: kernels() is now kernel_implementations()")

    @functools.wraps(method)
    def kernel_implementations(self: Any) -> Iterable[KernelImpl]:
        return method(self)

    members = {"__module__": backend.__module__, "kernels": former, "kernel_implementations": kernel_implementations}
    return type(backend.__name__, (backend, _interface_1()), members)


@functools.cache
def _interface_1() -> type[Accelerator]:
    """Return the base class that the backends of interface 1 had: they call its methods on themselves and `super()`."""
    from accelerators.accelerator import Accelerator
    from accelerators.portable import KERNELS

    class Interface1(Accelerator):
        def kernels(self) -> Iterable[KernelImpl]:  # type: ignore[override]
            return KERNELS

    def translate(method: str, now: str) -> Callable[..., Any]:
        def call(self: Accelerator, *arguments: Any, **options: Any) -> Any:
            _name_once(f"accelerator {self.name} of {self.provider}: {method}() is now kernels.{now}()")
            return getattr(self.kernels, now)(*arguments, **options)

        return call

    # Not in the class's body: one that defines `kernel` is taken for a slip of `kernels`.
    for method, now in (("kernel", "get"), ("capabilities", "capabilities")):
        setattr(Interface1, method, translate(method, now))
    return Interface1


def former_name(name: str) -> Any:
    """Return what `accelerators` exported under a former name.

    Raises:
        AttributeError: it never exported this name.
    """
    if name not in FORMER_NAMES:
        raise AttributeError(f"module 'accelerators' has no attribute {name!r}")
    _name_once(f"a plugin imports accelerators.{name}, which is now {FORMER_NAMES[name]}")
    return getattr(errors, FORMER_NAMES[name])


@functools.cache
def _name_once(text: str) -> None:
    logger.warning("%s; rlhf translates it; `rlhf accelerators check` says what to change", text)
