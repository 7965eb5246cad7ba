# ruff: noqa: D102 (DeepSpeed documents its methods)
"""A DeepSpeed accelerator for a device that DeepSpeed does not know, made of the device's backend.

DeepSpeed's interface has 65 abstract methods. Most repeat what a backend already answers (memory, random numbers, data
types, synchronization), and training at ZeRO 0 to 3 calls few of the others. Importing this module imports DeepSpeed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from accelerators.errors import AcceleratorError, PluginError, is_built_in, name_backend
from accelerators.precisions import holds_float64

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedDevice(DeepSpeedAccelerator):
    """DeepSpeed's view of a bound backend; `Accelerator.deepspeed_accelerator` returns it.

    Streams, events and generators are those of torch's module for the device (`torch.npu` for a device `npu`). A
    device without such a module, or with CPU tensors, runs one operator after the other. Override what differs: for
    example `create_op_builder` if there are builds of DeepSpeed's operators for the device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        # DeepSpeed calls the backend through this object, so errors of a plugin's methods must name it here too.
        where = f"accelerator {accelerator.name} of {accelerator.provider}"
        self._accelerator = accelerator if is_built_in(type(accelerator)) else name_backend(accelerator, where)
        self._name = accelerator.deepspeed_name
        self._communication_backend_name = accelerator.dist_backend()
        self._module = None if self._on_cpu() else torch.get_device_module(accelerator.device())
        self._compile_backend = "eager"

    def _on_cpu(self) -> bool:
        return self._accelerator.device().type == "cpu"

    # the device: `bind` has made it the current one

    def device_name(self, device_index: int | None = None) -> str:
        return self._name

    def device(self, device_index: int | None = None) -> torch.device:
        return self._accelerator.device()

    def set_device(self, device_index: int) -> None:
        pass

    def current_device(self) -> int:
        return self._accelerator.device().index or 0

    def current_device_name(self) -> str:
        return str(self._accelerator.device())

    def device_count(self) -> int:
        return self._accelerator.info().count

    def is_available(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._accelerator.device().type

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    # order of execution

    def synchronize(self, device_index: int | None = None) -> None:
        self._accelerator.synchronize()

    def is_synchronized_device(self) -> bool:
        return self._module is None

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    @property
    def Stream(self) -> Any:
        return getattr(self._module, "Stream", None)

    @property
    def Event(self) -> Any:
        return getattr(self._module, "Event", None)

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else self._module.stream(stream)  # type: ignore[union-attr]

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._call("current_stream")

    def default_stream(self, device_index: int | None = None) -> Any:
        return self._call("default_stream")

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def _call(self, function: str) -> Any:
        return getattr(self._module, function, lambda: None)()

    # random numbers

    def random(self) -> Any:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        state: torch.Tensor = (self._accelerator.rng_module() or torch).get_rng_state()
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        (self._accelerator.rng_module() or torch).set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        generators = getattr(self._module, "default_generators", None)
        return generators[device_index] if generators else torch.default_generator

    # memory: reserved and cached bytes count as allocated

    def empty_cache(self) -> None:
        self._accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._accelerator.memory().allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._accelerator.memory().peak

    def total_memory(self, device_index: int | None = None) -> int:
        return self._accelerator.memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        memory = self._accelerator.memory()
        return memory.total - memory.allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        memory = self._accelerator.memory()
        return {"allocated_bytes.all.current": memory.allocated, "allocated_bytes.all.peak": memory.peak}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._accelerator.reset_peak()

    memory_cached = memory_reserved = memory_allocated
    max_memory_cached = max_memory_reserved = max_memory_allocated
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    @property
    def _torch_pins_host_memory(self) -> bool:
        return self._accelerator.pins_memory()

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._accelerator.pins_memory() else tensor

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return tensor.new_empty(shape, pin_memory=self._accelerator.pins_memory())

    # data types

    def supported_dtypes(self) -> list[torch.dtype]:
        return [dtype for name, dtype in _DTYPES.items() if self._grants(name)]

    def is_bf16_supported(self) -> bool:
        return self._grants("bf16")

    def is_fp16_supported(self) -> bool:
        return self._grants("fp16")

    def is_fp64_supported(self) -> bool:
        return holds_float64(self._accelerator.device())

    def _grants(self, precision: str) -> bool:
        try:
            return self._accelerator.precision(precision).name == precision
        except PluginError:
            raise
        except AcceleratorError:
            return False

    def _constructor(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=self._accelerator.device())

    BFloat16Tensor = property(lambda self: self._constructor(torch.bfloat16))
    ByteTensor = property(lambda self: self._constructor(torch.uint8))
    DoubleTensor = property(lambda self: self._constructor(torch.float64))
    FloatTensor = property(lambda self: self._constructor(torch.float32))
    HalfTensor = property(lambda self: self._constructor(torch.float16))
    IntTensor = property(lambda self: self._constructor(torch.int32))
    LongTensor = property(lambda self: self._constructor(torch.int64))

    # compiled operators and graphs: none by default; decoding is captured by `Accelerator.capture`

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder.cpu"

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return builder and builder()

    def get_op_builder(self, class_name: str) -> Any:
        return None

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def is_triton_supported(self) -> bool:
        return False

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        pass

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    # profiling, and the environment of DeepSpeed's own launcher, which is not used

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        pass

    def range_pop(self, domain: Any = None) -> None:
        pass

    def export_envs(self) -> list[str]:
        return []

    def visible_devices_envs(self) -> list[str]:
        return []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        pass
