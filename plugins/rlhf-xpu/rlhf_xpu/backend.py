"""The backend: what differs from the defaults of `accelerators.StreamAccelerator` on Intel GPUs.

Sources, each named where it is used:
[attention] pytorch, aten/src/ATen/native/mkldnn/xpu/Attention.cpp, `select_sdp_backend_xpu`
[memory] pytorch, c10/xpu/XPUCachingAllocator.cpp, `getMemoryInfo`: some GPUs do not tell their free memory
[fused] torch/utils/_foreach_utils.py, `_get_fused_kernels_supported_devices`
[graphs] torch/xpu/graphs.py; github.com/intel/torch-xpu-ops/issues/3142: operators that cannot be recorded
[errors] github.com/intel/llvm, unified-runtime: UR_RESULT_ERROR_OUT_OF_*, in words "level_zero backend failed with ..."
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accelerators import (
    FUSED_ADAMW,
    AcceleratorError,
    DeviceInfo,
    Health,
    KernelImpl,
    Memory,
    Precision,
    StreamAccelerator,
    StreamGraphs,
    Support,
    choose_precision,
    portable_kernels,
    stream_graphs,
)
from rlhf_xpu import plugin


class XPU(StreamAccelerator):
    """One Intel GPU, or one tile of it, with xccl between processes; DeepSpeed knows it by the same name."""

    name = "xpu"
    environment_prefixes = ("ZE_", "ZES_", "ONEAPI_", "SYCL_", "UR_", "CCL_", "IGC_", "NEO", "PYTORCH_", "TORCH_XPU_")
    out_of_memory_pattern = r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY"  # [errors]

    def __init__(self) -> None:
        self.graphs = StreamGraphs(torch.xpu, "XPUGraph")

    def bind(self, local_rank: int) -> torch.device:
        """Make the device of this rank the current one."""
        if torch.version.xpu is None:
            raise AcceleratorError(
                f"xpu: torch {torch.__version__} is built without XPU; install PyTorch's build for it"
            )
        self.require_device(local_rank, torch.xpu.device_count(), plugin.MASK)
        torch.xpu.set_device(local_rank)
        return torch.device("xpu", local_rank)

    @functools.cached_property
    def _properties(self) -> list[Any]:
        """The properties of all devices, so that all ranks decide alike."""
        return [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]

    def info(self) -> DeviceInfo:
        """Return what the runtime says of the devices."""
        models = " / ".join(dict.fromkeys(properties.name for properties in self._properties))
        software = f"torch {torch.__version__}, compute runtime {self._properties[0].driver_version}"
        uuids = tuple(str(properties.uuid) for properties in self._properties)
        distinct = len(set(uuids)) == len(uuids)  # zeros for devices that do not tell theirs
        return DeviceInfo(models, len(uuids), software, uuids=uuids if distinct else ())

    def health(self) -> Health:
        """Return the clock, and the kernel's reasons for a lower one."""
        return plugin.health(self.device().index or 0)

    def environment_report(self) -> Mapping[str, str]:
        """Return what xpu-smi, the kernel's files and torch's build say."""
        return plugin.environment_report() | {"oneAPI of torch": str(torch.version.xpu)}

    def precision(self, wish: str = "auto") -> Precision:
        """Return bf16 if every device converts to it, else fp16 if every device has it, or the wished one."""
        supports = {}
        for name, feature in (("bf16", "has_bfloat16_conversions"), ("fp16", "has_fp16")):
            without = [properties.name for properties in self._properties if not getattr(properties, feature)]
            supports[name] = Support(
                not without, f"{', '.join(without)} lacks it" if without else "native on every device"
            )
        supports["fp32"] = Support(True, "every Intel GPU has it; some lack float64, which nothing here needs")
        return choose_precision(self.name, wish, supports)

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return PyTorch's implementations, and graphs."""
        return (*portable_kernels(SDPA), FUSED_ADAMW, XPU_GRAPHS)  # [fused]

    def memory(self) -> Memory:
        """Return the figures of torch's allocator, and the size of the device, which every GPU tells [memory]."""
        device = self.device()
        total = torch.xpu.get_device_properties(device).total_memory
        return Memory(torch.xpu.memory_allocated(device), torch.xpu.max_memory_allocated(device), total)


def _graphs_supported(accelerator: object) -> Support:
    if not hasattr(torch.xpu, "XPUGraph"):
        return Support(False, f"torch {torch.__version__} has no torch.xpu.XPUGraph")
    return Support(
        True,
        "all launches of a recorded function are replayed as one; an operator that cannot be recorded "
        "(torch-xpu-ops #3142) leaves the function unrecorded, with a warning",
    )


SDPA = (
    "torch's scaled_dot_product_attention: oneDNN's kernel for passes without gradients, and plain operators for those "
    "with gradients, because its kernel for training takes no mask"
)  # [attention]
XPU_GRAPHS = stream_graphs("xpu-graphs", _graphs_supported)  # [graphs]
