"""Frozen linear layers in 8 or 4 bits: the weights of a transformer's layers, packed one after the other.

The linear layers of a model become quantized ones in place, under the same names, so that they can have adapters as any
others. Embeddings, the output embedding, a scalar head and norms stay unchanged. The accelerator packs and multiplies
the weights (operation `quantized_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.models import lazy_tensors
from rlhf.models.lazy_tensors import InMemory, Source
from rlhf.models.lora import compute_adapter_update
from rlhf.models.weight_loading import PlaceParameter, get_source

if TYPE_CHECKING:
    from accelerators import QuantizedWeights

QuantizationKind = Literal["int8", "int4"]


@dataclass(frozen=True)
class PackedWeightInfo:
    """A quantized layer's `weight` without its numbers: what peft and the code of models read from it.

    Its type is an integer one, so that no code casts, adds to, or trains it.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def is_floating_point(self) -> bool:
        """Return False, as an integer tensor does."""
        return False


def _multiplied(layer: Any, inputs: Tensor) -> Tensor:
    product: Tensor = layer.packing.multiply(inputs, layer._buffers)
    return product if layer.bias is None else product + layer.bias.to(product.dtype)


def _outline(layer: Any) -> PackedWeightInfo:
    shape = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    return PackedWeightInfo(torch.Size(shape), torch.int8, next(iter(layer._buffers.values())).device)


class QuantizedLinear(nn.Linear):
    """Replaces `nn.Linear`. The tensors of the packed weight are the layer's buffers.

    They are in no checkpoint, since frozen weights are loaded again.
    """

    packing: QuantizedWeights
    source: Source | None
    """The unpacked weight; None if no export needs it."""

    forward = _multiplied  # type: ignore[assignment]  # the layer is an argument here
    weight = property(_outline)


class QuantizedConv1D(Conv1D):
    """Replaces transformers' `Conv1D`, whose weight is transposed, [in, out]; else like `QuantizedLinear`."""

    packing: QuantizedWeights
    source: Source | None

    forward = _multiplied
    weight = property(_outline)


Quantized = QuantizedLinear | QuantizedConv1D


def quantize(model: Any, kind: QuantizationKind, packing: QuantizedWeights, *, exported: bool) -> None:
    """Pack the weights of all linear layers of a model that are not packed yet, in place.

    If it is `exported`, the sources of the unpacked weights, in a file or in memory, are kept.
    """
    for path, layer in list(model.named_modules()):
        if _should_pack(path, layer):
            source = get_source(layer.weight) or InMemory(layer.weight.detach())
            _convert_layer(layer, kind, packing, layer.weight, source)
        if isinstance(layer, Quantized) and not exported:
            layer.source = None


def quantize_on_load(
    put: PlaceParameter, kind: QuantizationKind, packing: QuantizedWeights, device: torch.device
) -> PlaceParameter:
    """Return a `PlaceParameter` that packs linear layers on `device` as they are read; `put` places all others."""
    # One buffer for all layers: many allocations would fragment the memory between weights.
    buffer = torch.empty(0, device=device)

    def quantizing_put(name: str, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter | None:
        path, _, key = name.rpartition(".")
        if key != "weight" or not _should_pack(path, module):
            return put(name, module, parameter)
        source = get_source(parameter)
        assert source is not None
        nonlocal buffer
        if buffer.numel() < parameter.numel():
            buffer = torch.empty(parameter.numel(), device=device)
        weight = lazy_tensors.copy_source(source, buffer[: parameter.numel()].view(parameter.shape))
        _convert_layer(module, kind, packing, weight, source)
        return None

    return quantizing_put


def find_quantized_layers(model: nn.Module) -> dict[str, Quantized]:
    """Return quantized layers by their paths."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, Quantized)}


def compute_export_weight(model: Any, path: str) -> Tensor:
    """Return the weight of the quantized layer at `path` for an export: unpacked, plus its adapters, in float32."""
    layer = model.get_submodule(path)
    assert layer.source is not None, f"{path} was packed for a model that is not exported"
    weight = lazy_tensors.read_whole(layer.source, torch.float32)
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, LoraLayer):
        weight += compute_adapter_update(parent).detach().to(weight.device)
    return weight


def count_quantized(model: nn.Module) -> int:
    """Return how many numbers are quantized; no module has them among its parameters."""
    unique = {id(next(iter(layer._buffers.values()))): layer for layer in find_quantized_layers(model).values()}
    return sum(layer.weight.shape.numel() for layer in unique.values())


def _should_pack(path: str, layer: nn.Module) -> bool:
    """Return True if a layer is to be packed: a linear layer of the transformer, which heads are not part of.

    Subclasses are excluded except one, since they do more than multiply (routers of experts).
    """
    linear = type(layer) in (nn.Linear, Conv1D) or type(layer).__name__ == "FalconLinear"
    return linear and "." in path and ".lora_" not in path


def _convert_layer(
    layer: Any, kind: QuantizationKind, packing: QuantizedWeights, weight: Tensor, source: Source
) -> None:
    """Turn a layer into a quantized one; it stays the same object, so that references to it stay valid."""
    transposed, parameter = isinstance(layer, Conv1D), layer._parameters.pop("weight")
    packed = getattr(parameter, "packed", None)  # by another layer that shares the weight
    if packed is None:
        packed = parameter.packed = packing.pack(weight.detach().T if transposed else weight.detach(), kind)
    layer.__class__ = QuantizedConv1D if transposed else QuantizedLinear
    for name, tensor in packed.items():
        layer.register_buffer(name, tensor, persistent=False)
    layer.packing, layer.source = packing, source
