"""Frozen linear layers in 8 or 4 bits: the weights of a transformer's layers, packed one after the other.

A model, or a way to fill one, flows in; its linear layers become quantized ones in place, under the names that they
had, so that adapters are put on them as on any others. Embeddings, the output embedding, a scalar head and norms stay
as they are. How weights are packed and multiplied is the accelerator's (operation `quantized_weights`).
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
    """A quantized layer's `weight`: what peft and the code of models ask of one, but for its numbers.

    Its type is that of whole numbers, which nobody takes for weights to be cast, added to, or trained.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def is_floating_point(self) -> bool:
        return False


def _multiplied(layer: Any, inputs: Tensor) -> Tensor:
    product: Tensor = layer.packing.multiply(inputs, layer._buffers)
    return product if layer.bias is None else product + layer.bias.to(product.dtype)


def _outline(layer: Any) -> PackedWeightInfo:
    shape = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    return PackedWeightInfo(torch.Size(shape), torch.int8, next(iter(layer._buffers.values())).device)


class QuantizedLinear(nn.Linear):
    """In the place of torch's. The tensors of the packed weight are the layer's buffers.

    They are in no checkpoint: a frozen weight is loaded anew.
    """

    packing: QuantizedWeights
    source: Source | None
    """Where the weight is as it was before; None where nobody will ask for it."""

    forward = _multiplied  # type: ignore[assignment]  # the layer is an argument here
    weight = property(_outline)


class QuantizedConv1D(Conv1D):
    """In the place of transformers', which holds its weight transposed, [in, out]; else as `QuantizedLinear`."""

    packing: QuantizedWeights
    source: Source | None

    forward = _multiplied
    weight = property(_outline)


Quantized = QuantizedLinear | QuantizedConv1D


def quantize(model: Any, kind: QuantizationKind, packing: QuantizedWeights, *, exported: bool) -> None:
    """Pack the weights of all linear layers of a model of transformers that are not packed yet, in place.

    Args:
        exported: keep in mind where the weights are as they were before: in a file, else in memory.
    """
    for path, layer in list(model.named_modules()):
        if _is_packed(path, layer):
            found = get_source(layer.weight) or InMemory(layer.weight.detach())
            _become(layer, kind, packing, layer.weight, found)
        if isinstance(layer, Quantized) and not exported:
            layer.source = None


def quantize_on_load(
    put: PlaceParameter, kind: QuantizationKind, packing: QuantizedWeights, device: torch.device
) -> PlaceParameter:
    """Return a `PlaceParameter` that packs linear layers on `device` as they are read; `put` places all others."""

    room = torch.empty(0, device=device)  # the same for all layers: many allocations would leave holes between weights

    def quantizing_put(name: str, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter | None:
        path, _, key = name.rpartition(".")
        if key != "weight" or not _is_packed(path, module):
            return put(name, module, parameter)
        found = get_source(parameter)
        assert found is not None
        nonlocal room
        if room.numel() < parameter.numel():
            room = torch.empty(parameter.numel(), device=device)
        weight = lazy_tensors.copy_source(found, room[: parameter.numel()].view(parameter.shape))
        _become(module, kind, packing, weight, found)
        return None

    return quantizing_put


def find_quantized_layers(model: nn.Module) -> dict[str, Quantized]:
    """Quantized layers by their paths."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, Quantized)}


def unpack_weight(layer: Quantized) -> Tensor:
    """The weight that a layer multiplies with, in float32, as the layer that it was held it."""
    weight = layer.packing.unpack({name: buffer for name, buffer in layer._buffers.items() if buffer is not None})
    return weight.T if isinstance(layer, Conv1D) else weight


def compute_export_weight(model: Any, path: str) -> Tensor:
    """The weight of the quantized layer at `path` as an export has it, in float32.

    As it was before it was packed, and the layer's adapters added.
    """
    layer = model.get_submodule(path)
    assert layer.source is not None, f"{path} was packed for a model that nobody exports"
    weight = lazy_tensors.read_whole(layer.source, torch.float32)
    around = model.get_submodule(path.rpartition(".")[0])
    if isinstance(around, LoraLayer):
        weight += compute_adapter_update(around).detach().to(weight.device)
    return weight


def count_quantized(model: nn.Module) -> int:
    """How many numbers are quantized; they are among no module's parameters."""
    once = {id(next(iter(layer._buffers.values()))): layer for layer in find_quantized_layers(model).values()}
    return sum(layer.weight.shape.numel() for layer in once.values())


def _is_packed(path: str, layer: nn.Module) -> bool:
    """Whether a layer is one of those to be packed: a linear one of the transformer, which heads are not part of.

    Subclasses do something else besides: they are routers of experts, but for one.
    """
    linear = type(layer) in (nn.Linear, Conv1D) or type(layer).__name__ == "FalconLinear"
    return linear and "." in path and ".lora_" not in path


def _become(layer: Any, kind: QuantizationKind, packing: QuantizedWeights, weight: Tensor, source: Source) -> None:
    """Turn a layer into a quantized one: the same object, so that whatever refers to it goes on doing so."""
    transposed, parameter = isinstance(layer, Conv1D), layer._parameters.pop("weight")
    packed = getattr(parameter, "packed", None)  # by another layer, which has the same weight
    if packed is None:
        packed = parameter.packed = packing.pack(weight.detach().T if transposed else weight.detach(), kind)
    layer.__class__ = QuantizedConv1D if transposed else QuantizedLinear
    for name, tensor in packed.items():
        layer.register_buffer(name, tensor, persistent=False)
    layer.packing, layer.source = packing, source
