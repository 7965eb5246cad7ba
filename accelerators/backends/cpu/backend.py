"""The CPU backend: overrides of the interface's defaults for the host's processor.

bf16 is used if the processor has bf16 instructions; memory figures are those of the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import ClassVar

import torch

from accelerators import host, portable, quantized
from accelerators.accelerator import Accelerator
from accelerators.backends.cpu import attention
from accelerators.backends.cpu import info as cpu_info
from accelerators.backends.cpu.kernels import decode, invariant, layers, packed, sampling
from accelerators.errors import AcceleratorError
from accelerators.types import DeviceInfo, KernelImpl, Precision

NO_FP16 = "DeepSpeed's CPU accelerator does not train in fp16"


class CPU(Accelerator):
    """The processor, with gloo between processes."""

    name = "cpu"
    absent: ClassVar[dict[str, str]] = {
        "graph_capture": "operators run on the calling thread of a CPU: there are no launches to record",
    }

    def bind(self, local_rank: int) -> torch.device:
        """Return the CPU; ranks on one machine share its cores, unless OMP_NUM_THREADS is set."""
        _keep_freed_memory()
        share = max(1, cpu_info.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if share < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(share)
        return torch.device("cpu")

    def info(self) -> DeviceInfo:
        """Return the processor's name."""
        return DeviceInfo(model=cpu_info.cpu_model(), count=1, software=f"torch {torch.__version__}")

    def precision(self, wish: str = "auto") -> Precision:
        """Return bf16 if the processor has it natively, else fp32."""
        native = cpu_info.native_bf16()
        no_bf16 = f"this processor has no native bf16 ({' or '.join(cpu_info.BF16)}), and emulation is slower than fp32"
        if wish == "fp16":
            raise AcceleratorError(f"precision fp16 on cpu: {NO_FP16}; use auto or fp32")
        if wish == "bf16" and not native:
            raise AcceleratorError(f"precision bf16 on cpu: {no_bf16}; use auto or fp32")
        if wish == "bf16" or (wish == "auto" and native):
            return Precision(torch.bfloat16, "bf16", f"native on this processor ({', '.join(native)}); {NO_FP16}")
        if wish == "auto":
            return Precision(torch.float32, "fp32", f"{no_bf16}; {NO_FP16}")
        if wish == "fp32":
            return Precision(torch.float32, "fp32", "asked for; every processor has it")
        raise AcceleratorError(f"precision {wish!r}: not known; use auto, bf16, fp16 or fp32")

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return PyTorch's implementations and those for CPUs."""
        of_trainers = (attention.COMPOSED, FUSED_ADAMW, quantized.CPU_KERNELS, layers.FUSED_LAYERS)
        of_rollouts = (packed.PACKED, decode.DECODE, sampling.SAMPLING, invariant.INVARIANT)
        return (*super().kernel_implementations(), *of_trainers, *of_rollouts)

    def empty_cache(self) -> None:
        """Return freed memory, which the process keeps, to the system."""
        host.return_freed_memory()


def _keep_freed_memory() -> None:
    """Have the process keep freed blocks below 32 MiB for the next tensor, until `empty_cache`.

    By default, glibc returns the memory at the end of its heap, and maps most large blocks separately. Each new tensor
    then consists of pages that the kernel must clear first, which takes longer than most operators on it. Larger blocks
    are returned, because other blocks would split the gaps that they leave, and the heap would grow.
    """
    library = host.glibc()
    if library:
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
        library.mallopt(mmap_threshold, 2**25)  # the largest that glibc accepts
        library.mallopt(trim_threshold, -1)  # as an unsigned number, the largest
        library.mallopt(top_pad, 2**26)  # the heap grows in steps that are small compared with a model


# One step over 31.5M fp32 parameters on two cores: this takes 16 ms, DeepSpeedCPUAdam and DeepSpeed's FusedAdam 22 ms
# (after a minute of compilation on first use), torch's foreach AdamW 83 ms.
FUSED_ADAMW = KernelImpl(
    operation="adamw",
    name="torch-fused",
    factory=portable.fused_adamw,
    supported=portable.always("one pass over memory, nothing to compile"),
    priority=10,
)
