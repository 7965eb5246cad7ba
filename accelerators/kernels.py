"""The implementations of a backend's operations, and the selection among them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from accelerators.errors import AcceleratorError, describe_error, is_built_in, name_kernel, naming_method
from accelerators.types import AUTO, NONE, OPERATIONS, Backend, KernelImpl, Support, expect, one_line

CHECK_OF_A_MODEL = "its check of the model"
"""Start of a refusal that is caused by an error in the plugin."""

logger = logging.getLogger(__name__)


class KernelSet:
    """The kernels of a backend (`Accelerator.kernels`): its implementations, and those that plugins add.

    An operation uses the supported implementation with the highest priority, unless another was chosen. If a check, a
    factory or its result fails, the next implementation is used, with a warning that names the plugin.
    """

    def __init__(self, accelerator: Backend) -> None:
        self._accelerator = accelerator
        self._added: list[KernelImpl] = []
        self._choices: dict[str, str] = {}
        self._failures: dict[tuple[str, str, str], str] = {}

    def add(self, implementations: Iterable[KernelImpl]) -> None:
        """Add implementations that plugins offer for this backend."""
        self._added += implementations

    def choose(self, operation: str, name: str) -> None:
        """Use only the named implementation for an operation, regardless of priorities.

        Args:
            operation: a name in OPERATIONS.
            name: name of an implementation; `auto`, the best; or `none` for an optional operation.

        Raises:
            AcceleratorError: no implementation has this name, or it cannot be used here.
        """
        self._choices.pop(operation, None)
        if name == AUTO:
            return
        supports = {offer.name: self._support(offer) for offer, _ in self.candidates(operation)}
        if OPERATIONS[operation].optional:
            supports[NONE] = Support(True, "the operation is left out")
        backend = self._accelerator.name
        if name not in supports:
            known = ", ".join(supports) or "nothing"
            raise AcceleratorError(f"{operation}: {backend} has no implementation {name}; use one of: {known}")
        if not supports[name].ok:
            raise AcceleratorError(f"{operation}: {name} cannot be used on {backend}: {supports[name].reason}")
        self._choices[operation] = name

    def is_left_out(self, operation: str) -> bool:
        """Return whether `none` was chosen for an operation."""
        return self._choices.get(operation) == NONE

    def candidates(self, operation: str) -> list[tuple[KernelImpl, Support]]:
        """Return the implementations of an operation, best first: the supported ones by priority, then the others."""
        choice = self._choices.get(operation)
        pairs = []
        for implementation in (*self._backend_implementations(), *self._added):
            if implementation.operation == operation and choice in (None, implementation.name):
                support = self._support(implementation)
                if implementation.only_chosen and choice is None and support.ok:
                    support = Support(False, f"used only if it is chosen by name: {support.reason}")
                pairs.append((implementation, support))
        return sorted(pairs, key=lambda pair: (pair[1].ok, pair[0].priority), reverse=True)

    def capabilities(self) -> dict[str, Support]:
        """Return for every operation whether it is available, by which implementation, and why or why not."""
        return {operation: self._capability(operation) for operation in OPERATIONS}

    def get(self, operation: str, required: bool = False) -> Any:
        """Return the kernel of the best implementation of an operation (see OPERATIONS); None if there is none.

        Raises:
            AcceleratorError: `required`, and there is none; the message contains the reason.
        """
        for _, kernel in self.usable(operation):
            return kernel
        if required:
            reason = self._capability(operation).reason
            raise AcceleratorError(f"{self._accelerator.name}: no {operation} here: {reason}")
        return None

    def usable(self, operation: str) -> Iterator[tuple[KernelImpl, Any]]:
        """Yield the supported implementations whose factory succeeds, best first, each with its kernel."""
        for implementation, support in self.candidates(operation):
            if support.ok and (kernel := self._build(implementation)) is not None:
                yield implementation, kernel

    def refusal(self, implementation: KernelImpl, model: Any) -> str:
        """Return why an implementation cannot serve a model, given transformers' configuration of it; "" if it can."""
        try:
            return one_line(expect(implementation.refuses(model), str))
        except (Exception, SystemExit) as error:
            plugin = self._plugin(implementation)
            return f"{CHECK_OF_A_MODEL} failed ({describe_error(error)}); report it to the authors of {plugin}"

    def _backend_implementations(self) -> list[KernelImpl]:
        """Return the backend's implementations, without those of other plugins."""
        with naming_method(self._accelerator, "kernel_implementations"):
            return [expect(item, KernelImpl) for item in self._accelerator.kernel_implementations()]

    def _plugin(self, implementation: KernelImpl) -> str:
        return implementation.plugin or self._accelerator.provider or self._accelerator.name

    def _support(self, implementation: KernelImpl) -> Support:
        """Return the result of an implementation's check; a check that fails is a refusal and does not end the run."""
        if failure := self._failures.get(_key(implementation)):
            return Support(False, failure)
        try:
            return expect(implementation.supported(self._accelerator), Support)
        except (Exception, SystemExit) as error:
            return Support(False, f"its check failed ({describe_error(error)})")

    def _build(self, implementation: KernelImpl) -> Any:
        """Return the factory's kernel; if it cannot be used, return None and refuse the implementation from now on."""
        plugin = self._plugin(implementation)
        try:
            kernel = implementation.factory(self._accelerator)
            if not is_built_in(implementation.factory):
                _check_kernel(implementation, kernel)
        except (Exception, SystemExit) as error:
            failure = f"its factory failed ({describe_error(error)}); report it to the authors of {plugin}"
            self._failures[_key(implementation)] = failure
            logger.warning("%s: %s is not used: %s", implementation.operation, implementation.name, failure)
            return None
        return name_kernel(implementation, kernel, plugin)

    def _capability(self, operation: str) -> Support:
        if self.is_left_out(operation):
            return Support(False, "none was chosen")
        ranked = self.candidates(operation)
        if not ranked:
            backend = self._accelerator
            return Support(False, backend.absent.get(operation, f"the {backend.name} backend has no {operation}"))
        implementation, support = ranked[0]
        if support.ok:
            return Support(True, support.reason, implementation.name)
        return Support(False, "; ".join(f"{impl.name}: {refusal.reason}" for impl, refusal in ranked))


def _key(implementation: KernelImpl) -> tuple[str, str, str]:
    """Return the identity of an implementation; backends may create a new `KernelImpl` at each call."""
    return implementation.operation, implementation.name, implementation.plugin


def _check_kernel(implementation: KernelImpl, kernel: Any) -> None:
    """Check the kernel of a plugin's factory before its first use, so that the next implementation can replace it."""
    operation = OPERATIONS[implementation.operation]
    if not operation.accepts(kernel):
        raise TypeError(f"it made {one_line(repr(kernel))}, expected {operation.makes}")
    if operation.name == "attention":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        known = ("eager", *ALL_ATTENTION_FUNCTIONS.keys())
        if kernel not in known and "/" not in kernel:  # a name with a slash is that of a kernel on the hub
            raise ValueError(f"it made {kernel!r}, which transformers does not know; known: {', '.join(known)}")
