"""Implementations that run on any device with plain PyTorch.

They are every backend's defaults: a backend or a plugin that has something faster offers it with a higher priority.
At the bottom for attention is `eager`, which every architecture has and some have alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from accelerators.types import KernelImpl, Support


def adamw(accelerator: object) -> Any:
    """torch's AdamW over lists of tensors."""
    import torch

    return torch.optim.AdamW


def fused_adamw(accelerator: object) -> Any:
    """torch's AdamW in one pass over memory; a constructor like `torch.optim.AdamW`."""
    from functools import partial

    import torch

    return partial(torch.optim.AdamW, fused=True)


def clip_grad_norm(accelerator: object) -> Any:
    """torch's clipping by the global norm."""
    import torch

    return torch.nn.utils.clip_grad_norm_


def quantized_weights(accelerator: object) -> Any:
    """Weights of 8 or 4 bits; see `accelerators.quantized`."""
    from accelerators.quantized import QuantizedWeights

    return QuantizedWeights()


def softcap(model: Any) -> float | None:
    """What a model's configuration bounds its attention's scores by; None: nothing."""
    return getattr(model.get_text_config(decoder=True), "attn_logit_softcapping", None)


def beyond_sdpa(model: Any) -> str:
    """What the model of a configuration hands to its attention that torch's has not: transformers would drop it."""
    return "torch's scaled_dot_product_attention has no softcap" if softcap(model) else ""


def register_attention(name: str, attend: Callable[..., Any]) -> str:
    """Make an implementation known to transformers by its name, with masks to add.

    They are made once a forward pass: no value is read to see whether one is needed, and a row without a single real
    token gets a finite mean instead of NaN.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    return name


def handed_over(model: Any, features: Iterable[str]) -> list[str]:
    """Those of `features` that the model of a configuration hands to its attention, told by its code and values."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model), None)
    code = inspect.getsource(sys.modules[architecture.__module__]) if architecture else ""
    return [name for name in features if (softcap(model) if name == "softcap" else f" {name}=" in code)]


def _always(reason: str) -> Any:
    return lambda accelerator: Support(True, reason)


KERNELS = (
    KernelImpl(operation="adamw", name="torch-foreach", factory=adamw, supported=_always("plain torch operators")),
    KernelImpl(
        operation="adamw_cpu_offload",
        name="torch-fused",
        factory=fused_adamw,
        supported=_always("torch's fused AdamW also runs on the host, with nothing to compile"),
    ),
    KernelImpl(
        operation="clip_grad_norm", name="torch", factory=clip_grad_norm, supported=_always("plain torch operators")
    ),
    KernelImpl(
        operation="attention",
        name="sdpa",
        factory=lambda accelerator: "sdpa",
        supported=_always("torch's scaled_dot_product_attention picks its own kernel"),
        refuses=beyond_sdpa,
    ),
    KernelImpl(
        operation="attention",
        name="eager",
        factory=lambda accelerator: "eager",
        supported=_always("every architecture's own operators"),
        priority=-1000,
    ),
    KernelImpl(
        operation="quantized_weights",
        name="torch",
        factory=quantized_weights,
        supported=_always("plain torch operators: the weight of one layer at a time is unpacked, then multiplied"),
    ),
)
