# ruff: noqa: B027 (methods that do nothing by default are meant)
"""The interface between the trainers and the hardware.

A trainer calls these methods and nothing of a vendor's. The defaults suit a device that torch knows and that runs
eagerly: its backend implements `bind`, `info` and `precision`, and overrides methods that differ.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch.utils._pytree import tree_map_only

from accelerators import capture, host, portable
from accelerators.errors import AcceleratorError, is_out_of_memory, naming_method
from accelerators.kernels import KernelSet
from accelerators.marks import HostMark, Mark
from accelerators.shapes import ShapePolicy
from accelerators.types import (
    DeclaredException,
    DeepSpeedView,
    DeviceInfo,
    Health,
    KernelImpl,
    Memory,
    Precision,
    Support,
    did_you_mean,
    expect,
)

Batch = TypeVar("Batch")
Function = TypeVar("Function", bound=Callable[..., Any])
Bind = Callable[["Accelerator", int], torch.device]

logger = logging.getLogger(__name__)


class Accelerator(ABC):
    """One backend in one process.

    If a plugin's method raises an error, or `precision`, `info` or `memory` returns another type, the caller gets a
    `PluginError`: one line with the names of the plugin and the method (`accelerators/errors.py`). `AcceleratorError`s
    and out-of-memory errors stay unchanged.
    """

    name: ClassVar[str]
    """The backend's name, as in its spec."""

    deepspeed_name: ClassVar[str] = ""
    """DeepSpeed's name for the device (DS_ACCELERATOR); empty: `name`."""

    chunk_elements: ClassVar[int] = 1 << 22
    """Logits of one chunk of the vocabulary; passes over them use up to three float32 tensors of this size.

    The default, of 16 MiB each, fits the caches of a CPU. Where each operator costs a launch, larger chunks are faster.
    """

    absent: ClassVar[Mapping[str, str]] = {}
    """Reasons why operations have no implementation on this backend; optional."""

    environment_prefixes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the environment variables that change how the device's software behaves, for reports; optional."""

    allocator_setting: ClassVar[tuple[str, str]] = ("", "")
    """The environment variable of the device's allocator, and its value against fragmented memory; optional."""

    out_of_memory_pattern: ClassVar[str] = ""
    """A regular expression that finds a lack of memory in the messages of the runtime's `RuntimeError`s; optional."""

    provider: str = ""
    """The distribution that offers this backend, and its version; set by `Selection.create`."""

    graphs: capture.StreamGraphs | None = None
    """The recorder of the device's stream; set in `__init__` if `graph_capture` is a `stream_graphs`."""

    _device: torch.device | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.deepspeed_name = cls.deepspeed_name or getattr(cls, "name", "")
        for name in vars(cls):
            inherited = any(hasattr(base, name) for base in cls.__bases__)
            near = "" if inherited or name.startswith("_") else did_you_mean(name, _interface(), cutoff=0.85)
            if near:
                raise TypeError(f"{cls.__name__} defines {name}, which nothing calls; {near}name a helper _{name}")
        if "bind" in vars(cls):
            cls.bind = _remember_device(cls.bind)  # type: ignore[assignment,method-assign]

    # placement

    @abstractmethod
    def bind(self, local_rank: int) -> torch.device:
        """Initialize the runtime, give this process the device of its rank on this machine, and return the device.

        From then on `device` returns it.
        """

    def device(self) -> torch.device:
        """Return the device that `bind` returned."""
        if self._device is None:
            raise AcceleratorError(f"{self.name}: no device is bound to this process; call bind(local_rank) first")
        return self._device

    def require_device(self, local_rank: int, count: int, variable: str) -> None:
        """Refuse a rank for which this machine has no device; for `bind`.

        Args:
            local_rank: the rank on this machine.
            count: number of devices that the runtime shows to this process.
            variable: the environment variable with which users limit them.

        Raises:
            AcceleratorError: there are fewer devices.
        """
        if local_rank >= count:
            wish = os.environ.get(variable)
            limit = "" if wish is None else f" ({variable}={wish})"
            raise AcceleratorError(
                f"{self.name}: no device for local rank {local_rank}, this machine shows {count}{limit}; "
                f"start at most {count} ranks per machine"
            )

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch (tensors in dicts, lists or tuples) with every tensor on the device."""
        # Copies may overlap with running operators; they are queued in order, so neither has to wait.
        move = functools.partial(torch.Tensor.to, device=self.device(), non_blocking=True)
        return cast(Batch, tree_map_only(torch.Tensor, move, batch))

    @abstractmethod
    def info(self) -> DeviceInfo:
        """Return model, number and software of the devices."""

    # reports

    def environment_report(self) -> Mapping[str, str]:
        """Return facts about the device's software on this machine, for reports that users send.

        Examples are the output of the vendor's tool, versions of libraries, and the device's files. It is called before
        `bind` and opens no device.
        """
        return {}

    def other_modes(self) -> Mapping[str, Mapping[str, str]]:
        """Return the other modes of the device's software, each with the environment variables that choose it.

        A checkpoint of this mode must resume in each of them. A mode that this machine's software lacks may be listed.
        """
        return {}

    def health(self) -> Health:
        """Return the state of the bound device: clocks, throttling, errors of its memory; empty if nothing tells it.

        It is called before and after a stage, and must not wait for the device.
        """
        return Health()

    def host_operators(self) -> Mapping[str, int]:
        """Return how often this process ran each operator on the host, because the device does not have it."""
        return {}

    def exceptions(self) -> tuple[DeclaredException, ...]:
        """Return the known failures of certificates, each with its reason and the time when it must be gone."""
        return ()

    # synchronization

    def synchronize(self) -> None:
        """Wait until the device has finished everything in its queue."""
        if self._has_queue():
            torch.accelerator.synchronize(self.device())

    def mark(self) -> Mark:
        """Return a mark of this place in the device's work; by default, wait for the device and read the clock.

        A device with a queue returns an `EventMark`, for which nothing waits.
        """
        with naming_method(self, "synchronize"):
            self.synchronize()
        return HostMark()

    def named_range(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that shows as a range of this name in torch's profiler, and in the device's own."""
        return torch.profiler.record_function(name)

    def step_boundary(self, tag: str) -> None:
        """End a part of a step; a backend that records operators lazily runs them here.

        Args:
            tag: name of the part, for reports.
        """

    def capture(self, fn: Function, key: str) -> Function:
        """Return `fn`, recorded and replayed if the device can (operation `graph_capture`).

        If it is not recorded, its first call is still checked, unless the operation was set to `none`. A recording is
        freed together with the returned function.

        Args:
            fn: a function of tensors with fixed shapes: its arguments, and tensors that it refers to and changes in
                place.
            key: its name in reports.

        Raises:
            CaptureError: on a call, if `fn` waits for the device or the shapes of its arguments have changed.
        """
        if self.kernels.is_left_out("graph_capture"):
            return fn
        if reason := self.refuse_capture(key):
            self.report_fallback(key, f"{key} runs operator by operator: {reason}")
            return fn
        record = self.kernels.get("graph_capture")
        return cast(Function, record(fn, key)) if record else capture.checked(fn, key)

    def refuse_capture(self, key: str) -> str:
        """Return why the part of a run that `capture` calls `key` cannot be recorded or compiled; "" if it can."""
        return ""

    def recordings_keep_memory(self) -> bool:
        """Return whether a function that `capture` recorded keeps the memory of its intermediate results."""
        return self.graphs is not None

    def is_lazy(self) -> bool:
        """Return whether operators wait for a step boundary."""
        return False

    def compilations(self) -> int | None:
        """Return the number of graphs compiled so far in this process; None if nothing is compiled or counted."""
        return None if self.graphs is None else self.graphs.recordings

    def report_fallback(self, part: str, message: str) -> None:
        """Log that a part of the run will not be captured, compiled or computed as chosen, once for each `part`.

        Nothing falls back silently: `metrics.jsonl` has the number of these parts as `fallbacks`.
        """
        if part not in self.fallbacks:
            self.fallbacks.append(part)
            logger.warning("%s", message)

    @functools.cached_property
    def fallbacks(self) -> list[str]:
        """The parts that were passed to `report_fallback`."""
        return []

    # precision

    def deterministic(self, on: bool) -> tuple[str, ...]:
        """Use only operators that give equal results in equal runs, or again any.

        An operator without such a form is an error of torch, which names it.

        Returns:
            The parts of a run that may differ nevertheless, each with the reason; empty if it is switched off.
        """
        torch.use_deterministic_algorithms(on)
        unknown = on and self._has_queue()
        return (f"operators of {self.name}: the backend does not say which are deterministic",) if unknown else ()

    @abstractmethod
    def precision(self, wish: str = "auto") -> Precision:
        """Return the precision to compute in.

        Args:
            wish: auto, bf16, fp16 or fp32.

        Raises:
            AcceleratorError: the device does not support `wish`; the message names it, the reason and a remedy.
        """

    # kernels

    @functools.cached_property
    def kernels(self) -> KernelSet:
        """The implementations of operations on this backend, and the choice among them."""
        return KernelSet(self)

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return the implementations of this backend; those of plugins compete with them."""
        return portable.KERNELS

    # shapes

    def shape_policy(self) -> ShapePolicy:
        """Return the padding of batches if the user names no policy."""
        return ShapePolicy("dynamic")

    # memory and random numbers

    def host_device(self) -> torch.device:
        """Return the device of offloaded tensors; `device()` if it has no memory separate from the host's."""
        return torch.device("cpu")

    def pins_memory(self) -> bool:
        """Return whether tensors on the host can be page-locked (`Tensor.pin_memory`) for fast copies."""
        return False

    def memory(self) -> Memory:
        """Return the bytes in use, the maximum since `reset_peak`, and the total."""
        if not self._has_queue():
            allocated, peak = host.resident_memory()
            return Memory(allocated, peak, host.total_memory(), host.available_memory())
        device = self.device()
        return Memory(
            allocated=torch.accelerator.memory_allocated(device),
            peak=torch.accelerator.max_memory_allocated(device),
            total=torch.get_device_module(device).mem_get_info(device)[1],
        )

    def reset_peak(self) -> None:
        """Reset the maximum of `memory` to the memory currently in use."""
        if self._has_queue():
            torch.accelerator.reset_peak_memory_stats(self.device())
        else:
            host.reset_peak_memory()

    def empty_cache(self) -> None:
        """Return reserved but unused memory to the system."""
        if self._has_queue():
            gc.collect()  # a recorded function and the object with its buffers often refer to each other
            torch.accelerator.empty_cache()

    def teardown(self) -> None:
        """Wait for the device and return what this process holds of it; afterwards `bind` may be called again."""
        if self._device is not None:
            self.synchronize()
            self.empty_cache()
            self._device = None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error of the device's software means that the device is out of memory.

        It is called for every error that ends a run, and for its causes. Errors of torch and Python
        (`torch.OutOfMemoryError`, `MemoryError`) are always recognized, and those that `out_of_memory_pattern` finds.
        """
        pattern = self.out_of_memory_pattern
        found = bool(pattern) and isinstance(error, RuntimeError) and re.search(pattern, str(error)) is not None
        return found or is_out_of_memory(error)

    def seed(self, n: int) -> None:
        """Seed the generators of Python, torch and the device."""
        random.seed(n)
        torch.manual_seed(n)  # this seeds all devices that torch knows

    def rng_state(self) -> dict[str, Any]:
        """Return the state of the generators that `seed` sets, in types that `torch.load(weights_only=True)` reads."""
        state = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if module := self.rng_module():
            state[self.device().type] = module.get_rng_state()
        return state

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `rng_state`.

        Raises:
            KeyError: the state is that of another device.
        """
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if module := self.rng_module():
            module.set_rng_state(state[self.device().type])

    def rng_module(self) -> Any:
        """Return the module whose `get_rng_state` and `set_rng_state` serve the device; None if the CPU's do."""
        return torch.get_device_module(self.device()) if self._has_queue() else None

    # distributed

    def dist_backend(self) -> str:
        """Return the name of the torch.distributed backend for collectives on this device."""
        backend: str = torch.distributed.get_default_backend_for_device(self.device())
        return backend

    def collectives_on_host(self) -> bool:
        """Return whether collectives also take tensors of the host, so that a flag need not be read from the device."""
        parts = [part.rpartition(":") for part in self.dist_backend().split(",")]
        return any(name in ("gloo", "mpi") and device in ("", "cpu") for device, _, name in parts)

    def deepspeed_accelerator(self) -> Any:
        """Return a `DeepSpeedAccelerator` for a device that DeepSpeed does not know; None if the name is enough."""
        return None

    def deepspeed_defaults(self) -> Mapping[str, Any]:
        """Return options of DeepSpeed's `zero_optimization` that suit the device better than DeepSpeed's own defaults.

        Options that rlhf or the user sets take precedence.
        """
        return {}

    def refuse_zero_stage(self, stage: int) -> str:
        """Return why models cannot be trained at ZeRO `stage` on this device, and what to do; "" if they can."""
        return ""

    def prepare_deepspeed(self) -> DeepSpeedView:
        """Make DeepSpeed use this device; must be called before anything else imports deepspeed.

        Raises:
            AcceleratorError: DeepSpeed already uses another device.
        """
        with naming_method(self, "deepspeed_accelerator"):
            accelerator = self.deepspeed_accelerator()
        device = self.deepspeed_name
        wanted = os.environ.setdefault("DS_ACCELERATOR", device) if accelerator is None else device
        if wanted != device:
            raise AcceleratorError(
                f"{self.name}: the environment asks DeepSpeed for another device (DS_ACCELERATOR={wanted}); "
                f"unset it, or set it to {device}"
            )
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.ops import __compatible_ops__

        # For CPU tensors, DeepSpeed would compile a shared-memory collective before the first step. That takes a
        # minute, even for one rank, and only DeepSpeed's inference uses it.
        __compatible_ops__["deepspeed_shm_comm"] = False
        if accelerator is not None:
            set_accelerator(accelerator)
        current = get_accelerator()
        if current.device_name() != device:
            raise AcceleratorError(
                f"{self.name}: DeepSpeed was set to {current.device_name()!r} earlier in this process; "
                f"import it only after prepare_deepspeed(), or start with DS_ACCELERATOR={device}"
            )
        return DeepSpeedView(
            implementation=f"{type(current).__module__}.{type(current).__qualname__}",
            device=current.device_name(),
            communication=current.communication_backend_name(),
            dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in current.supported_dtypes()),
            version=deepspeed.__version__,
        )

    def deepspeed_operator(self, builder: str) -> Support:
        """Return whether an operator of DeepSpeed, given the name of its builder, can be built for this device."""
        from deepspeed.accelerator import get_accelerator

        operator = get_accelerator().create_op_builder(builder)
        # For operators that a device lacks, deepspeed 0.19 returns None, or an empty builder that claims to fit.
        if operator is None or getattr(operator, "NAME", "") in ("", "deepspeed_not_implemented"):
            return Support(False, f"DeepSpeed has no {builder} for {get_accelerator().device_name()}")
        if not operator.is_compatible(verbose=False):
            return Support(False, f"DeepSpeed's {builder} cannot be built here")
        return Support(True, "it can be built", operator.NAME)

    def _has_queue(self) -> bool:
        """Return whether the device is one of torch's accelerators, and not the CPU."""
        return self._device is not None and self._device.type != "cpu"


@functools.cache
def _interface() -> list[str]:
    return [name for name in vars(Accelerator) if not name.startswith("_")]


def _remember_device(bind: Bind) -> Bind:
    @functools.wraps(bind)
    def call(self: Accelerator, local_rank: int) -> torch.device:
        self._device = expect(bind(self, local_rank), torch.device)
        return self._device

    return call
