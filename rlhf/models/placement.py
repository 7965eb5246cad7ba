"""Moving a model to the device in the compute precision, without touching what must stay precise."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers alone: DeepSpeed (0.19) does not, of a model whose parameters are sharded already."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def place_model(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """Move a model to `device`, its parameters in `dtype`; in place, and returned.

    Buffers keep their type, as they do under DeepSpeed: rotary frequencies rounded to bf16 turn the angle of position
    1,000 by several degrees, and two copies of one model, one trained and one frozen, would compute different numbers.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model.to(device)
