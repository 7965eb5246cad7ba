"""The backend: the abstract methods of `accelerators.Accelerator`, and what differs from its defaults."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from accelerators import Accelerator, AcceleratorError, DeviceInfo, KernelImpl, Precision, Support


class Example(Accelerator):
    """The CPU under another name, with its own DeepSpeed accelerator."""

    name = "example"
    deepspeed_name = "cpu"  # DeepSpeed's name for the device; by default `name`

    def bind(self, local_rank: int) -> torch.device:
        """For a real device: import its runtime here, make device `local_rank` the current one, return it."""
        torch.set_num_threads(int(os.environ.get("RLHF_EXAMPLE_THREADS", "1")))
        return torch.device("cpu")

    def info(self) -> DeviceInfo:
        """Return model, number and software of the devices."""
        return DeviceInfo(model="Example One", count=1, software=f"torch {torch.__version__}")

    def precision(self, wish: str = "auto") -> Precision:
        """Return a precision, or refuse it with a reason and a remedy."""
        if wish in ("auto", "fp32"):
            return Precision(torch.float32, "fp32", "an Example One is exact")
        if wish == "bf16":
            return Precision(torch.bfloat16, "bf16", "an Example One has it, but slowly")
        raise AcceleratorError(f"precision {wish} on {self.name}: an Example One has none; use auto, bf16 or fp32")

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return PyTorch's implementations, and one that is better here."""
        return (*super().kernel_implementations(), FUSED_ADAMW)

    def deepspeed_accelerator(self) -> Any:
        """Only for a device that DeepSpeed does not know; the default, None, leaves it to `deepspeed_name`."""
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        class ExampleAccelerator(CPU_Accelerator):
            """For a real device: implement `deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator`."""

            def create_op_builder(self, name: str) -> None:
                """Build none of DeepSpeed's operators for this device."""

        return ExampleAccelerator()


FUSED_ADAMW = KernelImpl(
    operation="adamw",
    name="example-fused",
    factory=lambda accelerator: lambda params, **settings: torch.optim.AdamW(params, fused=True, **settings),
    supported=lambda accelerator: Support(True, "one pass over memory"),
    priority=10,
)
