"""The template of interface 2, as it was: the backend."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from accelerators import (
    Accelerator,
    AcceleratorError,
    DeviceInfo,
    KernelImpl,
    Precision,
    Support,
    missing_features,
    register_attention,
)


class Example(Accelerator):
    """The CPU under another name, with its own DeepSpeed accelerator."""

    name = "interface-2"
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
            return Precision(torch.float32, "fp32", "the device is exact")
        if wish == "bf16":
            return Precision(torch.bfloat16, "bf16", "the device has it, but slowly")
        raise AcceleratorError(f"precision {wish} on {self.name}: the device has none; use auto, bf16 or fp32")

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return PyTorch's implementations, and two that are better here."""
        return (*super().kernel_implementations(), FUSED_ADAMW, ATTENTION)

    def deepspeed_accelerator(self) -> Any:
        """Only for a device that DeepSpeed does not know; the default, None, leaves it to `deepspeed_name`."""
        from accelerators import DeepSpeedDevice  # imports DeepSpeed

        return DeepSpeedDevice(self)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attend in plain PyTorch; for a real device: call its kernel. See `register_attention` for shapes."""
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = (scores if mask is None else scores + mask).softmax(-1, torch.float32).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), None


LACKING = ("softcap", "s_aux", "position_bias")
"""Features of some models that `attend` does not implement; these models get the next implementation."""

ATTENTION = KernelImpl(
    operation="attention",
    name="example-attention",
    factory=lambda accelerator: register_attention("example_attention", attend, LACKING),
    supported=lambda accelerator: Support(True, "it shows how; slower than torch's"),
    priority=-1,  # below torch's. A kernel of a real device has at least 10.
    refuses=missing_features(LACKING),
)

FUSED_ADAMW = KernelImpl(
    operation="adamw",
    name="example-fused",
    factory=lambda accelerator: lambda params, **settings: torch.optim.AdamW(params, fused=True, **settings),
    supported=lambda accelerator: Support(True, "one pass over memory"),
    priority=10,
)
