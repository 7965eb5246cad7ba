# ruff: noqa: B027 (methods that do nothing by default are meant)
"""The interface between the trainers and the hardware.

A trainer calls these methods and nothing of a vendor's; a backend overrides what differs from the defaults, which
suit a device that runs eagerly and needs no special care. Only the abstract methods have to be written.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from accelerators import blame, capture, deepspeed_bridge, kernels
from accelerators.guard import is_lack_of_memory, text
from accelerators.shapes import ShapePolicy
from accelerators.types import (
    AUTO,
    NONE,
    OPERATIONS,
    OPTIONAL,
    AcceleratorError,
    DeepSpeedView,
    DeviceInfo,
    KernelImpl,
    Memory,
    Precision,
    Support,
    received,
)
from accelerators.watched import running

Batch = TypeVar("Batch")
Function = TypeVar("Function", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


class Accelerator(ABC):
    """One backend in one process.

    What a plugin's method raises, or answers of another type than is written here, becomes a `PluginDefect`: one line
    with the plugin's name (`accelerators/blame.py`). `AcceleratorError`s and lacks of memory stay what they are.
    """

    name: ClassVar[str]
    """The name that the backend's spec carries."""

    deepspeed_name: ClassVar[str]
    """What DeepSpeed calls this device, in DS_ACCELERATOR."""

    absent: ClassVar[Mapping[str, str]] = {}
    """Operations that this backend has no implementation of, each with the reason."""

    provider: str = ""
    """The distribution that offers this backend, and its version; `Selection.create` fills it in."""

    _device: torch.device | None = None
    _contributed: tuple[KernelImpl, ...] = ()
    _failures: Mapping[tuple[str, str, str], str] = {}
    _chosen: Mapping[str, str] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls.bind, "remembers"):  # its own, or that of a class that is no Accelerator
            cls.bind = _remembering(inspect.getattr_static(cls, "bind"))  # type: ignore[method-assign]

    # placement

    @abstractmethod
    def bind(self, local_rank: int) -> torch.device:
        """Initialize the runtime, give this process the device of its rank on this machine, and return it.

        What a backend returns is what `device` gives from then on.
        """

    def device(self) -> torch.device:
        """The device that `bind` returned."""
        if self._device is None:
            raise AcceleratorError(f"{self.name}: no device is bound to this process; call bind(local_rank) first")
        return self._device

    def to_device(self, batch: Batch) -> Batch:
        """Return the same structure (tensors in dicts, lists, tuples) with every tensor on the device."""
        # Copies to a device may overlap with what runs there; they are queued in order, so nobody has to wait.
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device(), non_blocking=True), batch)

    @abstractmethod
    def info(self) -> DeviceInfo:
        """Model, number and software of the devices."""

    # synchronization

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""

    def step_boundary(self, tag: str) -> None:
        """End a part of a step, named for reports; a backend that records operators lazily runs them here."""

    def capture(self, fn: Function, key: str) -> Function:
        """`fn`, recorded and replayed where the device can (operation `graph_capture`); else `fn` itself.

        Where it is not recorded its first call is checked all the same, unless none was chosen.

        `fn` works on tensors of fixed shapes: its arguments, and those it holds and changes in place. `key` names
        it in reports. What was recorded is freed with the function that this returns.

        Raises:
            CaptureError: on a call, where `fn` waits for the device or its arguments' shapes have changed.
        """
        if self._chosen.get("graph_capture") == NONE:
            return fn
        recorded = self.kernel("graph_capture")
        return recorded(fn, key) if recorded else capture.checked(fn, key)

    def is_lazy(self) -> bool:
        """Whether operators wait for a step boundary."""
        return False

    def compilations(self) -> int | None:
        """Graphs compiled so far in this process; None where nothing is compiled or counted."""
        return None

    # precision

    @abstractmethod
    def precision(self, wish: str = "auto") -> Precision:
        """The precision to compute in; `wish` is auto, bf16, fp16 or fp32.

        Raises:
            AcceleratorError: the device does not support `wish`; the message says why and what to use.
        """

    # kernels

    def kernels(self) -> Iterable[KernelImpl]:
        """Implementations that this backend brings; those of plugins compete with them."""
        return kernels.PORTABLE

    def contribute(self, implementations: Iterable[KernelImpl]) -> None:
        """Add implementations that plugins offer for this backend."""
        self._contributed += tuple(implementations)

    def choose(self, operation: str, name: str) -> None:
        """Have an operation done by the implementation of this name alone, whatever the priorities.

        Args:
            name: or auto, the best; or none, for an operation in OPTIONAL: it is done without.

        Raises:
            AcceleratorError: there is none of this name, or it cannot be used here.
        """
        self._chosen = {other: taken for other, taken in self._chosen.items() if other != operation}
        if name == AUTO:
            return
        found = {impl.name: support for impl, support in self.candidates(operation)}
        if operation in OPTIONAL:
            found[NONE] = Support(True, "it is done without")
        if name not in found:
            there = ", ".join(found) or "nothing"
            raise AcceleratorError(f"{operation}: {self.name} has no implementation {name}; there is: {there}")
        if not found[name].ok:
            raise AcceleratorError(f"{operation}: {name} cannot be used on {self.name}: {found[name].reason}")
        self._chosen = {**self._chosen, operation: name}

    def candidates(self, operation: str) -> list[tuple[KernelImpl, Support]]:
        """The implementations of an operation, best first: the supported ones by priority, then the others."""
        offered = [impl for impl in self._offered() if impl.operation == operation]
        chosen = self._chosen.get(operation)
        judged = [(impl, self._supported(impl)) for impl in offered if chosen in (None, impl.name)]
        return sorted(judged, key=lambda pair: (pair[1].ok, pair[0].priority), reverse=True)

    def capabilities(self) -> dict[str, Support]:
        """For every operation, whether it is available, by which implementation, and why or why not."""
        return {operation: self._capability(operation) for operation in OPERATIONS}

    def kernel(self, operation: str, required: bool = False) -> Any:
        """The best implementation of an operation, or None where there is none.

        One that cannot be made gives way to the next best, with a warning that names its plugin. What comes back:
            adamw, adamw_cpu_offload: (params, lr=, betas=, eps=, weight_decay=) -> torch.optim.Optimizer
            clip_grad_norm: (parameters, max_norm) -> total norm, a scalar tensor
            attention: a name for transformers' `attn_implementation`
            graph_capture: (fn, key) -> fn, what `capture` gives out
            quantized_weights: `pack`, `unpack` and `multiply`, as `accelerators.quantized.QuantizedWeights` has them
            inference_weights: (module, keep) -> a function that puts the module back bit for bit; until it is called
                weights do not change, and only reading is quick. `keep`: they can be read and trained as before, and
                tokens decoded, into a cache with `room`; else whatever the device likes best is in their place
            fused_layers: (module), whose layers compute what they did, fused, forward and backward

        Raises:
            AcceleratorError: `required`, and there is none; the message carries the reason.
        """
        for _, made in self.offers(operation):
            return made
        if required:
            raise AcceleratorError(f"{self.name}: no {operation} here: {self._capability(operation).reason}")
        return None

    def offers(self, operation: str) -> Iterator[tuple[KernelImpl, Any]]:
        """The supported implementations that can be made, best first, each with what `kernel` would give of it."""
        for implementation, support in self.candidates(operation):
            if support.ok and (made := self._made(implementation)) is not None:
                yield implementation, made

    def refusal(self, implementation: KernelImpl, model: Any) -> str:
        """Why an implementation cannot serve a model, given transformers' configuration of it; empty where it can."""
        return blame.refusal(implementation, model, implementation.plugin or self.provider)

    def _offered(self) -> list[KernelImpl]:
        """Its own implementations, and those of plugins."""
        return [*self.kernels(), *self._contributed]

    def _supported(self, implementation: KernelImpl) -> Support:
        """A plugin's check that raises is a refusal, not the end of the run."""
        if failure := self._failures.get(_identity(implementation)):
            return Support(False, failure)
        try:
            with running(implementation.plugin or self.provider):
                return received(implementation.supported(self), Support)
        except (Exception, SystemExit) as error:
            return Support(False, f"its check failed ({text(error)})")

    def _made(self, implementation: KernelImpl) -> Any:
        """What the factory makes; None, and a refusal from now on, where that is nothing to use."""
        plugin = implementation.plugin or self.provider or self.name
        try:
            with running(plugin):
                made = implementation.factory(self)
        except (Exception, SystemExit) as error:
            wrong = text(error)
        else:
            if not (wrong := blame.wrongly_made(implementation, made)):
                return blame.kernel(implementation, made, plugin)
        failure = f"its factory failed ({wrong}), which is for the authors of {plugin}"
        self._failures = {**self._failures, _identity(implementation): failure}
        logger.warning("%s: %s is not used: %s", implementation.operation, implementation.name, failure)
        return None

    def _capability(self, operation: str) -> Support:
        ranked = self.candidates(operation)
        if self._chosen.get(operation) == NONE:
            return Support(False, "none was chosen")
        if not ranked:
            return Support(False, self.absent.get(operation, f"the {self.name} backend has no {operation}"))
        implementation, support = ranked[0]
        if support.ok:
            return Support(True, support.reason, implementation.name)
        return Support(False, "; ".join(f"{impl.name}: {refused.reason}" for impl, refused in ranked))

    # shapes

    def shape_policy(self) -> ShapePolicy:
        """How batches are padded where the user names no policy."""
        return ShapePolicy("dynamic")

    # memory and random numbers

    def host_device(self) -> torch.device:
        """Where what is offloaded waits; the device itself, where that has no memory of its own."""
        return torch.device("cpu")

    def pins_memory(self) -> bool:
        """Whether tensors there can be page-locked (`Tensor.pin_memory`), so that copies to the device are fast."""
        return False

    @abstractmethod
    def memory(self) -> Memory:
        """Bytes in use, at most since `reset_peak`, and in all."""

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""

    def empty_cache(self) -> None:
        """Return memory that is held but not in use."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device had too little memory, in whatever words its software has for that.

        It is asked of every error that a run ends with, and of those that it came from; what torch and Python say of
        themselves (`torch.OutOfMemoryError`, `MemoryError`) counts in any case.
        """
        return is_lack_of_memory(error)

    def seed(self, n: int) -> None:
        """Seed the generators of Python, torch and the device."""
        random.seed(n)
        torch.manual_seed(n)

    def rng_state(self) -> dict[str, Any]:
        """The state of the generators that `seed` sets, in values that `torch.load(weights_only=True)` reads."""
        return {"python": random.getstate(), "torch": torch.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `rng_state` returned."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])

    # distributed

    def dist_backend(self) -> str:
        """Name of the torch.distributed backend for collectives on this device."""
        return "gloo"

    def deepspeed_accelerator(self) -> Any:
        """A `DeepSpeedAccelerator` for a device that DeepSpeed does not know; None where the name is enough."""
        return None

    def prepare_deepspeed(self) -> DeepSpeedView:
        """Make DeepSpeed use this device; call it before anything else imports deepspeed.

        Raises:
            AcceleratorError: DeepSpeed has settled on another device.
        """
        return deepspeed_bridge.prepare(self.name, self.deepspeed_name, self.deepspeed_accelerator())

    def deepspeed_operator(self, builder: str) -> Support:
        """Whether an operator of DeepSpeed's own, by the name of its builder, can be made for this device."""
        return deepspeed_bridge.operator(builder)


def _remembering(bind: Any) -> Callable[..., torch.device]:
    """A backend's `bind`, after which `device` gives what it returned."""

    def bound(self: Accelerator, *arguments: Any, **options: Any) -> torch.device:
        method = bind.__get__(self, type(self)) if hasattr(bind, "__get__") else bind
        device: torch.device = method(*arguments, **options)
        self._device = device
        return device

    functools.update_wrapper(bound, bind)
    if not inspect.isfunction(bind):  # a staticmethod or the like, whose signature has no `self`
        del vars(bound)["__wrapped__"]

    vars(bound)["remembers"] = True
    return bound


def _identity(implementation: KernelImpl) -> tuple[str, str, str]:
    """Backends may make their `KernelImpl`s anew at each question."""
    return implementation.operation, implementation.name, implementation.plugin
