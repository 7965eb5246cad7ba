"""The values that plugins, the registry and the trainers exchange.

Plugins hand in specs, probes, kernels and problems; backends answer with devices, memory figures and precisions.
Every value is frozen, and nothing here imports torch, so that a plugin can be discovered before torch is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

API_VERSION = 1
"""Version of the interface; a plugin states the one that it was written for."""

OPERATIONS = (
    "adamw",
    "adamw_cpu_offload",
    "clip_grad_norm",
    "attention",
    "graph_capture",
    "quantized_weights",
    "inference_weights",
    "fused_layers",
)
"""What `Accelerator.kernel` can be asked for; every backend reports each in its capabilities."""

RESERVED: tuple[str, ...] = ()
"""Those of OPERATIONS that no trainer asks for yet."""

AUTO, NONE = "auto", "none"
"""What may be chosen in place of an implementation: the best, or, of what is in OPTIONAL, none."""

OPTIONAL = ("graph_capture", "inference_weights", "fused_layers")
"""Those of OPERATIONS that trainers do without where there is no implementation."""

ALLOWLIST_ENV = "RLHF_PLUGINS"
"""The environment variable that names the plugins to load."""

AUTHORS = "report it to the plugin's authors"
"""What the user can do about a plugin's defect."""

DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
"""The precisions, and the dtype of each."""

Value = TypeVar("Value")


class AcceleratorError(Exception):
    """A backend cannot be selected, or cannot do what was asked; one line that the user can act on."""

    exit_code = 2


class HiddenError(AcceleratorError):
    """The user's environment hides all of the `count` devices that are there."""

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


class PluginDefect(AcceleratorError):
    """A plugin failed, or gave what the interface does not allow; the message names the plugin and what it did."""


class CaptureError(AcceleratorError):
    """A function cannot be captured: it reads values on the host, or its arguments do not fit the recording."""


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run here, found without importing torch or opening the device.

    `count` devices of `model` were found; `reason` says why there are none, or how they were found. Where the backend
    cannot run, `present` says that a device is there all the same and only software is missing: `auto` then refuses
    to take the CPU in its place. A device that the user has hidden, or that is too old, is counted, not `present`.
    `devices` names the devices that the backend would use, each by its PCI address ("pci:0000:19:00.0"), or by its file
    ("/dev/npu0") where it has none; among backends that name the same one, `auto` does not choose.
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
    """Whether an operation is available, by which implementation, and why; a refusal always carries its reason.

    The reason goes with `ok`: what speaks for an implementation that can be used, or why it cannot be.
    """

    ok: bool
    reason: str
    implementation: str = ""

    def __post_init__(self) -> None:
        _check_types(self, ok=bool, reason=str, implementation=str)
        _require_reason(self.ok, self.reason)

    def __bool__(self) -> bool:
        return self.ok


def _no_env(run: Mapping[str, Any]) -> dict[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class AcceleratorSpec:
    """A backend that a plugin offers.

    `factory` ("package.module:Class") is imported when the backend is chosen, not before. `env` receives the run's
    configuration as nested plain values; what it returns is applied with `setdefault` before torch is imported.
    """

    name: str
    api_version: int
    factory: str
    probe: Callable[[], Probe]
    priority: int = 0
    env: Callable[[Mapping[str, Any]], Mapping[str, str]] = _no_env

    def __post_init__(self) -> None:
        _check_types(self, name=str, api_version=int, factory=str, probe=Callable, priority=int, env=Callable)
        if self.name in ("", "auto") or self.name != "".join(self.name.split()):
            raise ValueError(f"AcceleratorSpec: name is {self.name!r}, expected one word other than auto")


def _nothing(model: Any) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class KernelImpl:
    """One implementation of an operation; the supported one with the highest priority is used.

    `factory(accelerator)` returns the implementation itself; it is called when a trainer asks for it. If it fails, the
    next implementation is used, with a warning. `refuses(model)`, for operation `attention`, says of a model why this
    one cannot serve it, given transformers' configuration of it, and "" where it can; the model gets the next one then.
    `plugin`, the plugin that offers it, is filled in when it is loaded.
    """

    operation: str
    name: str
    # Of an Accelerator, whose file imports this one.
    factory: Callable[[Any], Any]
    supported: Callable[[Any], Support]
    priority: int = 0
    refuses: Callable[[Any], str] = _nothing
    plugin: str = ""

    def __post_init__(self) -> None:
        _check_types(self, operation=str, name=str, factory=Callable, supported=Callable, priority=int, plugin=str)
        _check_types(self, refuses=Callable)
        if self.operation not in OPERATIONS:
            meant = nearest(self.operation, OPERATIONS)
            hint = f"did you mean {meant!r}? " if meant else ""
            raise ValueError(
                f"KernelImpl: no operation is named {self.operation!r}; {hint}known: {', '.join(OPERATIONS)}"
            )
        if self.name in ("", AUTO, NONE):
            raise ValueError(f"KernelImpl: name is {self.name!r}, expected one that says what it is")


@dataclass(frozen=True)
class Problem:
    """Why a run must not start (`reason`), and what the user can do (`remedy`)."""

    reason: str
    remedy: str

    def __post_init__(self) -> None:
        _check_types(self, reason=str, remedy=str)


@dataclass(frozen=True)
class DeviceInfo:
    """The devices of a backend: model name, how many this machine has, and the software that drives them.

    `peak_flops`: operations a second that the maker states at most for products of dense matrices on one device, by the
    precision of their numbers, as {"bf16": 989e12}; what is not in it is not stated, and no share of it is recorded.
    """

    model: str
    count: int
    software: str
    peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_types(self, model=str, count=int, software=str, peak_flops=Mapping)
        for name, peak in self.peak_flops.items():
            if name not in DTYPES or isinstance(peak, bool) or not isinstance(peak, int | float) or not peak > 0:
                expected = f"{' or '.join(DTYPES)} and a number above 0"
                raise TypeError(f"DeviceInfo: peak_flops has {reprlib.repr({name: peak})}, expected {expected}")


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory: in use by this process, the most since the last reset, and what the device has."""

    allocated: int
    peak: int
    total: int

    def __post_init__(self) -> None:
        _check_types(self, allocated=int, peak=int, total=int)


@dataclass(frozen=True)
class DeepSpeedView:
    """How DeepSpeed sees the device: its class for it, its name, its collectives and the numbers it trains in."""

    implementation: str
    device: str
    communication: str
    dtypes: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Precision:
    """The numbers that models compute in; the methods' defaults suit a plain fp32 backend.

    `name` is bf16, fp16 or fp32; `reason` says why this one was taken and why the others were not.
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
        """The context for a forward pass; models are held in `dtype`, so by default there is nothing to cast."""
        return nullcontext()

    def deepspeed_config(self) -> dict[str, Any]:
        """What this precision adds to DeepSpeed's JSON; empty for fp32. A loss scale of 0 means a dynamic one."""
        if self.name == "fp32":
            return {}
        scaling = {"loss_scale": 0} if self.loss_scaling else {}
        return {self.name: {"enabled": True, **scaling}}


def received(value: Any, kind: type[Value]) -> Value:
    """A plugin's answer as a plain `kind`, checked anew: a subclass, or what only looks like one, may hold anything.

    Raises:
        TypeError: it is no `kind`, or a field is wrong; the message says what it is instead.
    """
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} instead of {kind.__name__}")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    try:
        return kind(**{field.name: getattr(value, field.name) for field in fields})
    except Exception as error:
        raise TypeError(f"{kind.__name__} with wrong fields ({error})") from error


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The one of `known` that `name` may be a slip of; empty where none is near."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), "")


def one_line(said: str) -> str:
    """Text without line breaks, and without what no terminal can show (halves of characters in file names)."""
    return " ".join(said.split()).encode("utf-8", "replace").decode("utf-8")


def _check_types(value: Any, **kinds: Any) -> None:
    """Plugins hand these values in, so annotations alone hold nobody to them; texts become one line."""
    for field, kind in kinds.items():
        found = getattr(value, field)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            expected = "a function" if kind is Callable else f"{'an' if kind is int else 'a'} {kind.__name__}"
            raise TypeError(f"{type(value).__name__}: {field} is {reprlib.repr(found)}, expected {expected}")
        if kind is str:
            object.__setattr__(value, field, one_line(found))


def _require_reason(ok: bool, reason: str) -> None:
    if not ok and not reason:
        raise ValueError("a refusal needs a reason")
