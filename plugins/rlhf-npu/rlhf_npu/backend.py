"""The backend: what differs from the defaults of `accelerators.StreamAccelerator` on Ascend NPUs.

torch_npu registers `torch.npu`, which resembles `torch.cuda`, and serves `torch.accelerator`. Sources, each named where
it is used:
[chips] torch_npu, NpuVariables.h and NpuVariables.cpp: `SocVersion`, `IsBF16Supported`
[attention] github.com/Ascend/op-plugin, op_plugin/ops/opapi, `scaled_dot_product_attention`
[adamw] hiascend.com, CANN, aclnnApplyAdamWV2, which `torch._fused_adamw_` calls: Atlas A2 and later
[graphs] torch_npu/npu/graphs.py; hiascend.com, CANN, aclmdlRICaptureBegin: Atlas A2 and later, experimental
[memory] hiascend.com, Ascend Extension for PyTorch, environment variable PYTORCH_NPU_ALLOC_CONF
[errors] torch_npu; hiascend.com, CANN troubleshooting: EL0004 (driver), EI0011 (HCCL), 207001 (ACL)
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from accelerators import (
    FUSED_ADAMW,
    AcceleratorError,
    DeviceInfo,
    Health,
    KernelImpl,
    Precision,
    StreamAccelerator,
    StreamGraphs,
    Support,
    choose_precision,
    describe_error,
    portable_kernels,
    stream_graphs,
)
from rlhf_npu import plugin


class NPU(StreamAccelerator):
    """One Ascend NPU, with hccl between processes; DeepSpeed knows it by the same name."""

    name = "npu"
    environment_prefixes = ("ASCEND_", "HCCL_", "ACL_", "TORCH_NPU_", "PYTORCH_NPU_", "TASK_QUEUE_", "INF_NAN_")
    allocator_setting = ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")  # [memory]
    out_of_memory_pattern = r"NPU out of memory|\b(?:EL0004|EI0011|207001)\b"  # [errors]

    @property
    def _npu(self) -> Any:
        """The module `torch.npu`, which the import of torch_npu registers."""
        return importlib.import_module(plugin.RUNTIME).npu

    def bind(self, local_rank: int) -> torch.device:
        """Make the NPU of this rank the current one."""
        try:
            npu = self._npu
        except Exception as error:  # a missing library of CANN, or another vendor's build of torch
            remedy = "source CANN's set_env.sh in this shell, and use a build of torch for the CPU"
            raise AcceleratorError(f"npu: torch_npu cannot be imported ({describe_error(error)}); {remedy}") from error
        self.require_device(local_rank, npu.device_count(), plugin.VISIBLE)
        npu.set_device(local_rank)
        self.graphs = StreamGraphs(npu, "NPUGraph")
        return torch.device("npu", local_rank)

    def info(self) -> DeviceInfo:
        """Return what the runtime says of the devices."""
        npu, extension = self._npu, importlib.import_module(plugin.RUNTIME).__version__
        software = f"torch {torch.__version__}, torch_npu {extension}, CANN {npu.utils.get_cann_version()}"
        return DeviceInfo(npu.get_device_name(), npu.device_count(), software)

    def health(self) -> Health:
        """Return what npu-smi says of the NPU."""
        return plugin.health(self.device().index or 0)

    def environment_report(self) -> Mapping[str, str]:
        """Return what npu-smi, the driver's files and CANN say."""
        return plugin.environment_report()

    def precision(self, wish: str = "auto") -> Precision:
        """Return bf16 from Ascend 910B on, else fp16 with loss scaling, or the wished one."""
        return choose_precision(
            self.name,
            wish,
            {
                "bf16": _from_910b("native from Ascend 910B on")(self),
                "fp16": Support(True, "the format of every chip's matrix unit, with dynamic loss scaling"),
                "fp32": Support(True, "every chip has it"),
            },
        )

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return PyTorch's implementations, of which torch_npu replaces operators, and graphs."""
        return (*portable_kernels(SDPA), ADAMW, NPU_GRAPHS)

    def dist_backend(self) -> str:
        """Return Ascend's collective library; torch_npu registers two for the device."""
        return "hccl"


def _from_910b(reason: str) -> Callable[[Any], Support]:
    """Return a check that chips from Ascend 910B (Atlas A2) on pass: torch_npu calls them those with bf16 [chips]."""

    def supported(accelerator: Any) -> Support:
        if accelerator._npu.is_bf16_supported():
            return Support(True, reason)
        return Support(False, f"{reason}; this is {accelerator._npu.get_device_name()}")

    return supported


SDPA = (
    "torch's scaled_dot_product_attention: from Ascend 910B on, torch_npu gives it to npu_fusion_attention, training "
    "included, if the mask is boolean, as here; plain operators on older chips"
)  # [attention]
ADAMW = dataclasses.replace(  # [adamw]
    FUSED_ADAMW, supported=_from_910b("one operator a tensor, from Ascend 910B on")
)
NPU_GRAPHS = stream_graphs(  # [graphs]
    "npu-graphs", _from_910b("all launches of a recorded function are replayed as one, from Ascend 910B on")
)
