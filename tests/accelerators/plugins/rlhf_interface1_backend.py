"""The template of interface 1, as it was: the backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from accelerators import Accelerator, AcceleratorError, DeviceInfo, KernelImpl, Memory, Precision, Support


class Example(Accelerator):
    """The CPU under another name, with a DeepSpeed accelerator of its own."""

    name = "interface-1"
    deepspeed_name = "cpu"  # the device type of its tensors; a real device has its own
    absent: ClassVar[Mapping[str, str]] = {
        "graph_capture": "an Example One launches nothing, so there is nothing to record",
        "inference_weights": "an Example One reads weights in any order equally fast",
        "fused_layers": "an Example One launches nothing, so there is nothing to save",
    }

    def bind(self, local_rank: int) -> torch.device:
        """A real device: import its runtime here, make device `local_rank` the current one, return it."""
        torch.set_num_threads(int(os.environ.get("RLHF_EXAMPLE_THREADS", "1")))
        return torch.device("cpu")

    def info(self) -> DeviceInfo:
        return DeviceInfo(model="Example One", count=1, software=f"torch {torch.__version__}")

    def synchronize(self) -> None:
        """A real device: wait for its queue."""

    def precision(self, wish: str = "auto") -> Precision:
        if wish in ("auto", "fp32"):
            return Precision(torch.float32, "fp32", "an Example One is exact")
        if wish == "bf16":
            return Precision(torch.bfloat16, "bf16", "an Example One has it, but slowly")
        raise AcceleratorError(f"precision {wish} on {self.name}: an Example One has none; use auto, bf16 or fp32")

    def kernels(self) -> Iterable[KernelImpl]:
        """PyTorch's implementations, and one that is better here."""
        return (*super().kernels(), FUSED_ADAMW)

    def memory(self) -> Memory:
        """A real device: ask its allocator. This one counts what the process holds."""
        lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        held = {key: int(value.split()[0]) * 1024 for key, value in lines if key in ("VmRSS", "VmHWM")}
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Memory(allocated=held["VmRSS"], peak=held["VmHWM"], total=total)

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def deepspeed_accelerator(self) -> Any:
        """Only for a device that DeepSpeed does not know: the default, None, leaves it to `deepspeed_name`."""
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        class ExampleAccelerator(CPU_Accelerator):
            """A real device: implement `deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator`."""

            def create_op_builder(self, name: str) -> None:
                """No operators of DeepSpeed's are compiled for this device."""

        return ExampleAccelerator()


FUSED_ADAMW = KernelImpl(
    operation="adamw",
    name="example-fused",
    factory=lambda accelerator: lambda params, **settings: torch.optim.AdamW(params, fused=True, **settings),
    supported=lambda accelerator: Support(True, "one pass over memory"),
    priority=10,
)
