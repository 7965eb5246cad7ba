"""The values that plugins, the registry and the trainers exchange.

Plugins hand in specs, probes, kernels and problems; backends answer with devices, memory figures and precisions.
Every value is frozen, and nothing here imports torch, so that a plugin can be discovered before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from accelerators.accelerator import Accelerator

API_VERSION = 1
"""Version of the interface; a plugin states the one that it was written for."""

OPERATIONS = (
    "adamw",
    "adamw_cpu_offload",
    "clip_grad_norm",
    "attention",
    "graph_capture",
    "quantized_weights",
)
"""What `Accelerator.kernel` can be asked for; every backend reports each in its capabilities."""


class AcceleratorError(Exception):
    """A backend cannot be selected, or cannot do what was asked; one line that the user can act on."""

    exit_code = 2


class CaptureError(AcceleratorError):
    """A function cannot be captured: it reads values on the host, or its arguments do not fit the recording."""


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run here, found without importing torch or opening the device.

    `count` devices of `model` were found; `reason` says why there are none, or how they were found.
    """

    ok: bool
    reason: str
    count: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        _require_reason(self.ok, self.reason)


@dataclass(frozen=True)
class Support:
    """Whether an operation is available, by which implementation; a refusal always carries its reason."""

    ok: bool
    reason: str
    implementation: str = ""

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, kw_only=True)
class KernelImpl:
    """One implementation of an operation; the supported one with the highest priority is used.

    `factory(accelerator)` returns the implementation itself; it is called when a trainer first asks for it.
    """

    operation: str
    name: str
    factory: Callable[[Accelerator], Any]
    supported: Callable[[Accelerator], Support]
    priority: int = 0


@dataclass(frozen=True)
class Problem:
    """Why a run must not start (`reason`), and what the user can do (`remedy`)."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class DeviceInfo:
    """The devices of a backend: model name, how many this machine has, and the software that drives them."""

    model: str
    count: int
    software: str


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory: in use by this process, the most since the last reset, and what the device has."""

    allocated: int
    peak: int
    total: int


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

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward pass; models are held in `dtype`, so by default there is nothing to cast."""
        return nullcontext()

    def deepspeed_config(self) -> dict[str, Any]:
        """What this precision adds to DeepSpeed's JSON; empty for fp32. A loss scale of 0 means a dynamic one."""
        if self.name == "fp32":
            return {}
        scaling = {"loss_scale": 0} if self.loss_scaling else {}
        return {self.name: {"enabled": True, **scaling}}


def _require_reason(ok: bool, reason: str) -> None:
    if not ok and not reason:
        raise ValueError("a refusal needs a reason")
