"""The types of values that plugins, the registry and the trainers exchange.

Plugins return specs, probes, kernels and problems; backends return devices, memory figures and precisions. Every value
is frozen, and this module does not import torch, so that a plugin can be discovered before torch is loaded.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

API_VERSION = 3
"""Version of the interface; a plugin states the version, or the range of versions, that it was written for."""

OLDEST_API_VERSION = 1
"""The oldest version whose plugins still work; `accelerators.compatibility` adapts them."""

AUTO, NONE = "auto", "none"
"""Choices instead of an implementation's name: the best one; or, for an optional operation, none."""

REFERENCE = "cpu"
"""The backend that every machine has, with which others are compared."""

ALLOWLIST_ENV = "RLHF_PLUGINS"
"""The environment variable that names the plugins to load."""

DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
"""The precisions and their dtypes."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Operation:
    """A computation for which `Accelerator.kernels` selects an implementation.

    Attributes:
        name: key of `KernelImpl.operation` and of `engine.kernels` in a recipe.
        makes: what the factory of an implementation returns, and how trainers call it.
        optional: trainers work without it if no implementation is supported.
        methods: names of the methods that trainers call; empty if they call the result itself.
        text: the result is a name, not a function.
    """

    name: str
    makes: str
    optional: bool = False
    methods: tuple[str, ...] = ()
    text: bool = False

    def accepts(self, made: Any) -> bool:
        """Return whether the result of a factory can be used at all."""
        if self.text:
            return isinstance(made, str)
        return all(callable(getattr(made, method, None)) for method in self.methods or ("__call__",))


_ADAMW = "(params, lr=, betas=, eps=, weight_decay=) -> torch.optim.Optimizer"

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("adamw", _ADAMW),
        Operation("adamw_cpu_offload", _ADAMW),
        Operation("clip_grad_norm", "(parameters, max_norm) -> the total norm, a scalar tensor"),
        Operation("attention", "a name for transformers' `attn_implementation`", text=True),
        Operation("graph_capture", "(fn, key) -> fn, the result of `Accelerator.capture`", optional=True),
        Operation(
            "quantized_weights",
            "an object with `pack`, `unpack` and `multiply`; see `accelerators.quantized.QuantizedWeights`",
            methods=("pack", "unpack", "multiply"),
        ),
        Operation(
            "inference_weights",
            "(module, keep) -> a function that restores the module bit for bit; until then weights do not change and "
            "only reading is fast. With `keep` they can be read and trained as before, and tokens decoded into a "
            "cache with `decode_buffers`, for as much memory again as the weights take; without it the device may "
            "replace them by the form it likes best, but holds no second copy",
            optional=True,
        ),
        Operation(
            "fused_layers",
            "(module) -> None; the module's layers compute the same numbers in fused form, forward and backward",
            optional=True,
        ),
        Operation(
            "sampling",
            "(logits [B, V], uniform [B] float32 from 0 to below 1, temperature above 0) -> tokens [B] int64 and their "
            "log-probabilities [B] float32: of each row, the first token at which the cumulative probability exceeds "
            "its uniform number; NaN log-probabilities for logits of NaN",
            optional=True,
        ),
        Operation(
            "batch_invariant",
            "() -> a context, in which the numbers of a row do not depend on the batch: on other rows, padding, the "
            "length of a cache, or the device's choice of routines for them, in any model with eager operators or the "
            "`attention` of the device",
            optional=True,
        ),
    )
}
"""All operations by name; every backend reports each of them in its capabilities."""


@dataclass(frozen=True)
class Probe:
    """The result of a probe: if the backend can run here, found without importing torch or opening the device.

    Attributes:
        ok: the backend can run.
        reason: why it cannot run, or how the devices were detected.
        count: number of devices; a device that the user has hidden, or that is too old, counts too.
        model: name of the devices' model.
        present: a usable device is here and only software is missing; `auto` then refuses to take the CPU instead.
        devices: the devices that the backend would use, each by its PCI address ("pci:0000:19:00.0"), or by its file
            ("/dev/npu0") if it has none. `auto` does not choose among backends that name the same device.
    """

    ok: bool
    reason: str
    count: int = 0
    model: str = ""
    present: bool = False
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_types(self, ok=bool, reason=str, count=int, model=str, present=bool, devices=tuple)
        _require_reason(self.ok, self.reason)
        if self.count < 0:
            raise ValueError(f"Probe: count is {self.count}, expected 0 or more")
        if not all(isinstance(device, str) for device in self.devices):
            raise TypeError(f"Probe: devices is {reprlib.repr(self.devices)}, expected a tuple of str")


@dataclass(frozen=True)
class Support:
    """The availability of an operation: the implementation, and the reason why it is available or not.

    A refusal always has a reason.
    """

    ok: bool
    reason: str
    implementation: str = ""

    def __post_init__(self) -> None:
        _check_types(self, ok=bool, reason=str, implementation=str)
        _require_reason(self.ok, self.reason)

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, kw_only=True)
class AcceleratorSpec:
    """A backend that a plugin offers.

    Attributes:
        name: name of the backend, one word.
        api_version: version of the interface that the plugin was written for, or the oldest and the newest one that it
            works with. It runs as a plugin of the newest one that rlhf has too.
        factory: "package.module:Class", imported when the backend is chosen, not before.
        probe: reports whether the backend can run here.
        priority: `auto` takes the available backend with the highest one.
        env: receives the run's configuration as nested plain values and returns environment variables, which are
            applied with `setdefault` before torch is imported.
    """

    name: str
    api_version: int | tuple[int, int]
    factory: str
    probe: Callable[[], Probe]
    priority: int = 0
    env: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda run: {}

    def __post_init__(self) -> None:
        _check_types(self, name=str, factory=str, probe=Callable, priority=int, env=Callable)
        if not _is_version_range(self.api_versions):
            version = reprlib.repr(self.api_version)
            raise TypeError(f"AcceleratorSpec: api_version is {version}, expected an int, or two: (oldest, newest)")
        if self.name in ("", AUTO) or self.name != "".join(self.name.split()):
            raise ValueError(f"AcceleratorSpec: name is {self.name!r}, expected one word other than auto")

    @property
    def api_versions(self) -> tuple[int, int]:
        """The oldest and the newest version of the interface that the plugin works with."""
        return self.api_version if isinstance(self.api_version, tuple) else (self.api_version, self.api_version)


@dataclass(frozen=True, kw_only=True)
class KernelImpl:
    """One implementation of an operation; the supported one with the highest priority is used.

    Attributes:
        operation: a name in OPERATIONS.
        name: name of the implementation.
        factory: receives the `Accelerator` and returns a kernel, as the operation's `makes` describes. If it fails, the
            next implementation is used, with a warning.
        supported: receives the `Accelerator` and reports whether the implementation can be used.
        priority: order among the supported implementations.
        refuses: for operation `attention`; receives transformers' configuration of a model and returns why this
            implementation cannot serve the model ("" if it can). The model then gets the next implementation.
        only_chosen: it is used only if the user chooses it by name, whatever its priority.
        plugin: the plugin that offers it; set when the plugin is loaded.
    """

    operation: str
    name: str
    factory: Callable[[Any], Any]
    supported: Callable[[Any], Support]
    priority: int = 0
    refuses: Callable[[Any], str] = lambda model: ""
    only_chosen: bool = False
    plugin: str = ""

    def __post_init__(self) -> None:
        _check_types(self, operation=str, name=str, factory=Callable, supported=Callable, priority=int, plugin=str)
        _check_types(self, refuses=Callable, only_chosen=bool)
        if self.operation not in OPERATIONS:
            hint = did_you_mean(self.operation, OPERATIONS)
            known = ", ".join(OPERATIONS)
            raise ValueError(f"KernelImpl: no operation is named {self.operation!r}; {hint}known: {known}")
        if self.name in ("", AUTO, NONE):
            raise ValueError(f"KernelImpl: name is {self.name!r}, expected one that says what it is")


class Backend(Protocol):
    """The part of an `Accelerator` that its kernels and the search for out-of-memory errors use."""

    name: ClassVar[str]
    absent: ClassVar[Mapping[str, str]]
    provider: str

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return the implementations of this backend."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error means that the device is out of memory."""


@dataclass(frozen=True)
class Problem:
    """An objection to a run: the reason why it must not start, and a remedy."""

    reason: str
    remedy: str

    def __post_init__(self) -> None:
        _check_types(self, reason=str, remedy=str)


@dataclass(frozen=True)
class DeviceInfo:
    """The devices of a backend.

    Attributes:
        model: name of the model.
        count: number of devices of this machine.
        software: the software that drives them, with versions.
        peak_flops: the maker's maximum of operations per second for products of dense matrices on one device, by
            precision ({"bf16": 989e12}). No share is recorded for a precision that is not listed.
        peak_bandwidth: the maker's maximum of bytes per second that one device reads from its memory; 0 if not known.
        uuids: the lasting names of the devices, in the order of local ranks; empty if they have none.
    """

    model: str
    count: int
    software: str
    peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    peak_bandwidth: float = 0.0
    uuids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_types(self, model=str, count=int, software=str, peak_flops=Mapping, uuids=tuple)
        if isinstance(self.peak_bandwidth, bool) or not isinstance(self.peak_bandwidth, int | float):
            raise TypeError(f"DeviceInfo: peak_bandwidth is {self.peak_bandwidth!r}, expected a number")
        for name, peak in self.peak_flops.items():
            if name not in DTYPES or isinstance(peak, bool) or not isinstance(peak, int | float) or not peak > 0:
                expected = f"{' or '.join(DTYPES)} and a number above 0"
                raise TypeError(f"DeviceInfo: peak_flops has {reprlib.repr({name: peak})}, expected {expected}")


@dataclass(frozen=True)
class Health:
    """The state of this process's device, as its driver reports it.

    Attributes:
        readings: for reports, such as {"clock": "1,980 of 1,980 MHz"}.
        problems: reasons why the device is slower or less reliable now than it should be, each a clause.
        errors: numbers of errors since the driver was loaded; results are suspect if one rises during a run.
    """

    readings: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    problems: tuple[str, ...] = ()
    errors: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_types(self, readings=Mapping, problems=tuple, errors=Mapping)

    def problems_since(self, before: Health) -> tuple[str, ...]:
        """Return the present problems, and the errors that have occurred since `before`."""
        risen = {name: count - before.errors.get(name, 0) for name, count in self.errors.items()}
        return (*self.problems, *(f"{count:,} more {name}" for name, count in risen.items() if count > 0))


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory.

    Attributes:
        allocated: in use by this process.
        peak: the maximum of `allocated` since the last reset.
        total: all of the device's.
        available: what this process can still allocate, next to other programs; None if not known.
    """

    allocated: int
    peak: int
    total: int
    available: int | None = None

    def __post_init__(self) -> None:
        known = {} if self.available is None else {"available": int}
        _check_types(self, allocated=int, peak=int, total=int, **known)


@dataclass(frozen=True)
class DeclaredException:
    """A failure of `rlhf accelerators certify` that a backend's author knows, with the time at which it must be gone.

    Attributes:
        check: the check that fails.
        reason: why, and where it is followed, for readers of certificates.
        expires: a date (2027-03-01), or a version of rlhf (0.3.0) from which on the exception does not count.
        operator: for checks `operators` and `operations`: the one whose failure counts as known, as it is listed.
    """

    check: str
    reason: str
    expires: str
    operator: str = ""

    def __post_init__(self) -> None:
        _check_types(self, check=str, reason=str, expires=str, operator=str)
        _require_reason(False, self.reason)
        try:
            if re.fullmatch(r"\d{4}-\d{2}-\d{2}", self.expires):
                datetime.date.fromisoformat(self.expires)
            elif not re.fullmatch(r"\d+(\.\d+)+", self.expires):
                raise ValueError
        except ValueError:
            message = f"DeclaredException: expires is {self.expires!r}, expected a date (2027-03-01) or a version"
            raise ValueError(message) from None


@dataclass(frozen=True)
class DeepSpeedView:
    """DeepSpeed's view of the device: its class, its name, its collectives and the dtypes it trains in."""

    implementation: str
    device: str
    communication: str
    dtypes: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Precision:
    """The numbers that models compute in; the methods suit a plain backend without autocast.

    Attributes:
        dtype: dtype of the models' weights.
        name: bf16, fp16 or fp32.
        reason: why this precision was chosen, and why others were not.
        loss_scaling: the loss is scaled dynamically.
    """

    dtype: torch.dtype
    name: str
    reason: str
    loss_scaling: bool = False

    def __post_init__(self) -> None:
        _check_types(self, name=str, reason=str, loss_scaling=bool)
        if self.name not in DTYPES:
            raise ValueError(f"Precision: name is {self.name!r}, expected {', '.join(DTYPES)}")
        if str(self.dtype) != DTYPES[self.name]:
            raise ValueError(f"Precision: dtype of {self.name} is {self.dtype}, expected {DTYPES[self.name]}")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass; models are in `dtype`, so by default nothing has to be cast."""
        return nullcontext()

    def deepspeed_config(self) -> dict[str, Any]:
        """Return this precision's part of DeepSpeed's configuration; a loss scale of 0 means a dynamic one."""
        if self.name == "fp32":
            return {}
        scaling = {"loss_scale": 0} if self.loss_scaling else {}
        return {self.name: {"enabled": True, **scaling}}


def expect(value: Any, kind: type[Value]) -> Value:
    """Return a value that must be of a type.

    Raises:
        TypeError: it is of another type.
    """
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} instead of {kind.__name__}")
    return value


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the hint "did you mean ...? " with the known name that `name` may be a slip of; "" if none is near."""
    return "".join(f"did you mean {near!r}? " for near in difflib.get_close_matches(name, sorted(known), 1, cutoff))


def one_line(text: str) -> str:
    """Return text without line breaks and without characters that no terminal can show (lone surrogates)."""
    return " ".join(text.split()).encode("utf-8", "replace").decode("utf-8")


def _check_types(value: Any, **kinds: Any) -> None:
    """Check the types of fields, since plugins may ignore annotations, and collapse strings to one line."""
    for field, kind in kinds.items():
        content = getattr(value, field)
        if not isinstance(content, kind) or (kind is int and isinstance(content, bool)):
            expected = "a function" if kind is Callable else f"{'an' if kind is int else 'a'} {kind.__name__}"
            raise TypeError(f"{type(value).__name__}: {field} is {reprlib.repr(content)}, expected {expected}")
        if kind is str:
            object.__setattr__(value, field, one_line(content))


def _is_version_range(versions: tuple[Any, ...]) -> bool:
    return len(versions) == 2 and all(type(version) is int for version in versions) and versions[0] <= versions[1]


def _require_reason(ok: bool, reason: str) -> None:
    if not ok and not reason:
        raise ValueError("a refusal needs a reason")
