"""The CUDA backend: NVIDIA GPUs, one for each process.

Facts from NVML (`info.py`) decide what the chip can do, so that it can be explained without a CUDA context. `bind`
opens the device. Repeated work is recorded as CUDA graphs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from accelerators import portable
from accelerators.accelerator import Accelerator
from accelerators.backends.cuda import info as cuda_info
from accelerators.capture import StreamGraphs
from accelerators.errors import AcceleratorError
from accelerators.precisions import choose_precision
from accelerators.shapes import ShapePolicy
from accelerators.streams import StreamAccelerator
from accelerators.types import DeviceInfo, Health, KernelImpl, Precision, Support

NATIVE_BF16, FLASH_ATTENTION, CUDNN_ATTENTION, TENSOR_CORES = (8, 0), (8, 0), (8, 0), (7, 0)


class CUDA(StreamAccelerator):
    """One NVIDIA GPU, with NCCL between processes."""

    name = "cuda"
    out_of_memory_pattern = "_STATUS_ALLOC_FAILED"  # of cuBLAS, cuDNN and cuSOLVER, which allocate without torch

    allocator_setting = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    environment_prefixes: ClassVar[tuple[str, ...]] = ("CUDA_", "CUDNN_", "CUBLAS_", "NCCL_", "NVIDIA_", "PYTORCH_")

    def __init__(self) -> None:
        self.graphs = StreamGraphs(torch.cuda, "CUDAGraph", self._leave_recording)

    @functools.cached_property
    def machine(self) -> cuda_info.Machine:
        """The driver and the visible GPUs, read once and without a CUDA context."""
        return cuda_info.machine()

    def bind(self, local_rank: int) -> torch.device:
        """Bind the GPU of this rank; refuse it if torch has no code for it, or if it is not NVIDIA's."""
        if torch.version.hip or not torch.version.cuda:
            target = f"for ROCm {torch.version.hip}" if torch.version.hip else "without CUDA"
            raise AcceleratorError(
                f"cuda: torch {torch.__version__} is built {target}, although torch.cuda exists; "
                f"{self.machine.torch.remedy}"
            )
        gpus = self.machine.gpus
        self.require_device(local_rank, len(gpus), cuda_info.VISIBLE_ENV)
        gpu = gpus[local_rank]
        architectures = torch.cuda.get_arch_list()
        if not any(cuda_info.runs_on(architecture, gpu.capability) for architecture in architectures):
            raise AcceleratorError(
                f"cuda: torch {torch.__version__} has no code for GPU {gpu.index}, {gpu}, but for "
                f"{', '.join(architectures) or 'no GPU at all'}; {self.machine.torch.remedy}"
            )
        torch.cuda.set_device(local_rank)
        # cuDNN's attention gives NaN gradients for left-padded rows of 64 columns mod 128 (pytorch #196678, seen on an
        # H200 with cuDNN 9.19), and wrong outputs on B200 (pytorch #193893).
        torch.backends.cuda.enable_cudnn_sdp(False)
        if torch.cuda.get_device_capability(local_rank) < self.machine.weakest.capability:
            raise AcceleratorError(
                f"cuda: device {local_rank} is {torch.cuda.get_device_name(local_rank)}, which NVML counts elsewhere; "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
        self._prove(local_rank)
        return torch.device("cuda", local_rank)

    def _prove(self, local_rank: int) -> None:
        """Refuse a device that NVIDIA's driver does not know: other vendors' builds of torch have `torch.cuda` too.

        The name is enough: for a divided board (MIG), either side may return the UUID of a part.
        """
        properties = torch.cuda.get_device_properties(local_rank)
        uuid = f"GPU-{getattr(properties, 'uuid', '')}"
        if not any(gpu.uuid == uuid or properties.name.startswith(gpu.name) for gpu in self.machine.gpus):
            boards = " / ".join(f"{gpu.name} {gpu.uuid}" for gpu in self.machine.gpus)
            raise AcceleratorError(
                f"cuda: torch {torch.__version__} opened {properties.name} ({uuid}), which NVIDIA's driver does not "
                f"know (it has {boards}); use the plugin of that device's vendor, or install NVIDIA's build of torch"
            )

    def info(self) -> DeviceInfo:
        """Return the facts of the driver; the peak is that of the weakest GPU."""
        software = f"torch {torch.__version__}, CUDA {torch.version.cuda}, driver {self.machine.driver}"
        peaks = self.machine.weakest.peak_flops
        bandwidth, uuids = self.machine.weakest.peak_bandwidth, tuple(gpu.uuid for gpu in self.machine.gpus)
        return DeviceInfo(self.machine.model, len(self.machine.gpus), software, peaks, bandwidth, uuids)

    def health(self) -> Health:
        """Return what NVML reports of the bound GPU."""
        return cuda_info.health(self.machine.gpus[self.device().index].uuid)

    def environment_report(self) -> Mapping[str, str]:
        """Return what the driver says, and the versions and architectures of torch's libraries."""
        return cuda_info.environment_report() | {
            "CUDA of torch": str(torch.version.cuda),
            "architectures of torch": " ".join(torch.cuda.get_arch_list()),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none",
        }

    @contextlib.contextmanager
    def named_range(self, name: str) -> Iterator[None]:
        """Name the range for torch's profiler and, through NVTX, for NVIDIA's tools."""
        with super().named_range(name), torch.cuda.nvtx.range(name):
            yield

    def deterministic(self, on: bool) -> tuple[str, ...]:
        """Let torch and cuBLAS repeat their sums; cuBLAS reads its setting once."""
        torch.use_deterministic_algorithms(on)
        if on and cuda_info.REPEATABLE_ENV not in os.environ:
            return (f"products of matrices: {cuda_info.REPEATABLE_ENV}=:4096:8 was not set when the process started",)
        return ()

    def precision(self, wish: str = "auto") -> Precision:
        """Return bf16 if the chip has it, else fp16 with loss scaling, or the wished one."""
        return choose_precision(self.name, wish, _precisions(self.machine.weakest))

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return PyTorch's implementations and those for CUDA."""
        return (*_PORTABLE, portable.FUSED_ADAMW, FLASH_ATTENTION_2, SDPA_CUDNN, CUDA_GRAPHS, PACKED_PRODUCTS)

    def shape_policy(self) -> ShapePolicy:
        """Return few lengths, because each is a separate recording; tensor cores multiply multiples of 8 fastest."""
        return ShapePolicy("bucketed", pad_to_multiple=8, first=64)

    def _leave_recording(self) -> None:
        """End the recording mode of torch's generator after a failed recording.

        If the driver ends a recording, torch 2.11 leaves its generator in this mode, and every later random number is
        an error. A recording that succeeds ends the mode.
        """
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=self.device())


def _precisions(chip: cuda_info.GPU) -> dict[str, Support]:
    """Return which precisions a chip has, best first."""
    bf16 = Support(True, f"native on {chip}, and needs no loss scaling")
    if chip.capability < NATIVE_BF16:
        bf16 = Support(False, f"emulated below sm_80, and this is {chip}")
    fp16 = Support(True, f"fast on {chip}, with dynamic loss scaling")
    if chip.capability < TENSOR_CORES:
        fp16 = Support(False, f"DeepSpeed trains in it from sm_70 on, and this is {chip}")
    return {"bf16": bf16, "fp16": fp16, "fp32": Support(True, f"runs on {chip}")}


def _flash_attention_2(accelerator: Accelerator) -> Support:
    assert isinstance(accelerator, CUDA)
    chip = accelerator.machine.weakest
    if chip.capability < FLASH_ATTENTION:
        return Support(False, f"flash attention needs sm_80; found {chip}")
    return Support(
        False,
        "batches are padded to fixed shapes: it takes no mask, and its path for rows of different lengths reads them "
        "on the host, which no recording allows; sdpa has a memory-efficient kernel for masked batches",
    )


def _sdpa_cudnn(accelerator: Accelerator) -> Support:
    assert isinstance(accelerator, CUDA)
    chip = accelerator.machine.weakest
    if chip.capability < CUDNN_ATTENTION:
        return Support(False, f"cuDNN's attention needs sm_80; found {chip}")
    return Support(
        True,
        "it can be faster, but had NaN gradients of padded rows for some lengths (pytorch #196678) and wrong outputs "
        "on B200 (pytorch #193893); cuDNN 9.13 cannot be recorded beyond 1,024 columns (TransformerEngine #2344)",
    )


def attend_cudnn(*tensors: Any, **features: Any) -> tuple[Any, None]:
    """Attend as `portable.attend_sdpa` does, with cuDNN's kernel for the inputs that it supports."""
    kinds = torch.nn.attention.SDPBackend
    kernels = [kinds.CUDNN_ATTENTION, kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION, kinds.MATH]
    with torch.nn.attention.sdpa_kernel(kernels, set_priority=True):
        return portable.attend_sdpa(*tensors, **features)


_SDPA = (
    "torch's scaled_dot_product_attention picks its kernel, but never cuDNN's, whose gradients of padded rows are NaN "
    "for some lengths (pytorch #196678)"
)
_PORTABLE = portable.portable_kernels(_SDPA)
FLASH_ATTENTION_2 = KernelImpl(
    operation="attention",
    name="flash_attention_2",
    factory=lambda accelerator: "flash_attention_2",
    supported=_flash_attention_2,
    priority=10,
)
SDPA_CUDNN = KernelImpl(
    operation="attention",
    name="sdpa-cudnn",
    factory=lambda accelerator: portable.register_sdpa("sdpa_cudnn", attend_cudnn),
    supported=_sdpa_cudnn,
    refuses=portable.beyond_sdpa,
    only_chosen=True,
)
CUDA_GRAPHS = portable.stream_graphs(
    "cuda-graphs", portable.always("all launches of a recorded function are replayed as one")
)
PACKED_PRODUCTS = KernelImpl(
    operation="quantized_weights",
    name="torch-cuda",
    factory=portable.quantized_weights,
    supported=lambda accelerator: Support(
        False,
        "torch's product of int8 weights on CUDA has a thread for each number and no tensor cores: unpacking first is "
        "faster; its int4 weights lie in an order for products alone, and gradients need them unpacked",
    ),
    priority=10,
)
