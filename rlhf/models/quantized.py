"""Frozen linear layers in 8 or 4 bits: the weights of a transformer's layers, packed one after the other.

The linear layers of a model become quantized ones in place, under the same names, so that they can have adapters as any
others. Embeddings, the output embedding, a scalar head and norms stay unchanged. The accelerator packs and multiplies
the weights (operation `quantized_weights`).

At ZeRO-3 the tensors of a packed weight are one parameter, of bytes: DeepSpeed shards it like any other, so that each
rank stores a part of it, and gathers it whenever the layer needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.models import lazy_tensors
from rlhf.models.lazy_tensors import InMemory, Source, compute_in_parts
from rlhf.models.lora import compute_adapter_update, is_adapted
from rlhf.models.weight_loading import PlaceParameter, get_source, set_source

if TYPE_CHECKING:
    from accelerators import QuantizedWeights

QuantizationKind = Literal["int8", "int4"]

ALIGNED = 64
"""Bytes: each tensor of a joined packed weight begins at a multiple of it, as separate tensors do."""


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


@dataclass(frozen=True)
class PackedLayout:
    """The places of the tensors of a packed weight in one flat tensor of bytes."""

    places: Mapping[str, tuple[int, torch.Size, torch.dtype]]
    """Name -> (first byte, shape, type)."""

    @classmethod
    def join(cls, packed: Mapping[str, Tensor]) -> tuple[Tensor, PackedLayout]:
        """Return the bytes of tensors, one after the other, and their layout."""
        places, size = {}, 0
        for name, tensor in packed.items():
            places[name] = size, tensor.shape, tensor.dtype
            size += tensor.nbytes + -tensor.nbytes % ALIGNED
        layout = cls(places)
        joined = torch.zeros(size, dtype=torch.uint8, device=next(iter(packed.values())).device)
        for name, part in layout.split(joined).items():
            part.copy_(packed[name])
        return joined, layout

    def split(self, joined: Tensor) -> dict[str, Tensor]:
        """Return the tensors, which share the memory of `joined`."""
        return {
            name: joined[first : first + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (first, shape, dtype) in self.places.items()
        }


class _MultiplyGathered(torch.autograd.Function):
    """Saves the parameter itself for the backward pass, never a part: ZeRO-3 releases it meanwhile."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packing: QuantizedWeights, layout: PackedLayout, joined: Tensor) -> Tensor:
        ctx.packing, ctx.layout = packing, layout
        ctx.save_for_backward(joined)
        return packing.multiply(inputs, layout.split(joined))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (joined,) = gradients, ctx.saved_tensors
        return gradient @ ctx.packing.unpack(ctx.layout.split(joined), gradient.dtype), None, None, None


def _multiplied(layer: Any, inputs: Tensor) -> Tensor:
    if layer.layout is None:
        product: Tensor = layer.packing.multiply(inputs, layer._buffers)
    else:
        product = _MultiplyGathered.apply(inputs, layer.packing, layer.layout, layer.packed)
    return product if layer.bias is None else product + layer.bias.to(product.dtype)


def _outline(layer: Any) -> PackedWeightInfo:
    shape = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    return PackedWeightInfo(torch.Size(shape), torch.int8, _first_tensor(layer).device)


def _first_tensor(layer: Any) -> Tensor:
    """Return one tensor of a packed weight, which all layers with this weight share."""
    tensor: Tensor = next(iter(layer._buffers.values())) if layer.layout is None else layer._parameters["packed"]
    return tensor


def _save_others(layer: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    nn.Module._save_to_state_dict(layer, destination, prefix, keep_vars)
    destination.pop(f"{prefix}packed", None)


class QuantizedLinear(nn.Linear):
    """Replaces `nn.Linear`. The tensors of the packed weight are the layer's buffers, or at ZeRO-3 one parameter.

    They are in no checkpoint, since frozen weights are loaded again.
    """

    packing: QuantizedWeights
    source: Source | None
    """The unpacked weight; None if no export needs it."""
    layout: PackedLayout | None
    """The tensors in the parameter `packed`; None if they are buffers."""

    forward = _multiplied  # type: ignore[assignment]  # the layer is an argument here
    weight = property(_outline)

    _save_to_state_dict = _save_others


class QuantizedConv1D(Conv1D):
    """Replaces transformers' `Conv1D`, whose weight is transposed, [in, out]; else like `QuantizedLinear`."""

    packing: QuantizedWeights
    source: Source | None
    layout: PackedLayout | None

    forward = _multiplied
    weight = property(_outline)
    _save_to_state_dict = _save_others


Quantized = QuantizedLinear | QuantizedConv1D


def quantize(
    model: Any, kind: QuantizationKind, packing: QuantizedWeights, *, exported: bool, sharded: bool = False
) -> None:
    """Pack the weights of all linear layers of a model that are not packed yet, in place.

    If it is `exported`, the sources of the unpacked weights, in a file or in memory, are kept. If it will be `sharded`,
    the engine shards the packed weights.
    """
    for path, layer in list(model.named_modules()):
        if _should_pack(path, layer):
            source = get_source(layer.weight) or InMemory(layer.weight.detach())
            put = _keep_whole if sharded else None
            _convert_layer(f"{path}.weight", layer, kind, packing, layer.weight, source, put)
        if isinstance(layer, Quantized) and not exported:
            layer.source = None


def quantize_on_load(
    put: PlaceParameter,
    kind: QuantizationKind,
    packing: QuantizedWeights,
    device: torch.device,
    *,
    sharded: bool = False,
) -> PlaceParameter:
    """Return a `PlaceParameter` that packs linear layers on `device` as they are read; `put` places all others.

    If `put` shards parameters (`sharded`), it places packed weights too, and no rank has more than one of them whole.
    """
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
        _convert_layer(name, module, kind, packing, weight, source, put if sharded else None)
        return None

    return quantizing_put


def find_quantized_layers(model: nn.Module) -> dict[str, Quantized]:
    """Return quantized layers by their paths."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, Quantized)}


def compute_export_weight(model: Any, path: str, dtype: torch.dtype) -> Tensor:
    """Return the weight of the quantized layer at `path` for an export: unpacked, plus its adapters, in `dtype`.

    They are added in float32, some rows at a time.
    """
    layer = model.get_submodule(path)
    assert layer.source is not None, f"{path} was packed for a model that is not exported"
    source, width = layer.source, layer.weight.shape[1]
    if isinstance(source, lazy_tensors.Computed):  # once, not for each part
        source = InMemory(source.read())
    parent = model.get_submodule(path.rpartition(".")[0])

    def compute_rows(rows: slice) -> Tensor:
        weight = torch.empty(rows.stop - rows.start, width)
        lazy_tensors.copy_source(source, weight, rows.start * width)
        if is_adapted(parent):
            weight += compute_adapter_update(parent, rows).detach().to(weight.device)
        return weight

    return compute_in_parts(compute_rows, layer.weight.shape, dtype)


def unpack_weight(layer: Quantized) -> Tensor:
    """Return the weight of a quantized layer as numbers, in float32 and in the order of the unpacked layer.

    At ZeRO-3 it must be gathered.
    """
    joined: Any = layer._parameters.get("packed")
    packed: Any = layer._buffers if layer.layout is None else layer.layout.split(joined)
    weight = layer.packing.unpack(packed)
    return weight.T if isinstance(layer, Conv1D) else weight


def count_quantized(model: nn.Module) -> int:
    """Return how many numbers are quantized; no module has them among its parameters."""
    unique = {id(_first_tensor(layer)): layer for layer in find_quantized_layers(model).values()}
    return sum(layer.weight.shape.numel() for layer in unique.values())


def count_buffer_bytes(model: nn.Module) -> int:
    """Return the bytes of the packed weights that are no parameters; 0 at ZeRO-3."""
    layers = [layer for layer in find_quantized_layers(model).values() if not layer.layout]
    tensors = {id(tensor): tensor for layer in layers for tensor in layer._buffers.values() if tensor is not None}
    return sum(tensor.nbytes for tensor in tensors.values())


def list_packed_parameters(model: nn.Module) -> list[Any]:
    """Return the parameters that are packed weights; none below ZeRO-3."""
    layers = [layer for layer in find_quantized_layers(model).values() if layer.layout]
    return list({id(layer._parameters["packed"]): layer._parameters["packed"] for layer in layers}.values())


def _should_pack(path: str, layer: nn.Module) -> bool:
    """Return True if a layer is to be packed: a linear layer of the transformer, which heads are not part of.

    Subclasses are excluded except one, since they do more than multiply (routers of experts).
    """
    linear = type(layer) in (nn.Linear, Conv1D) or type(layer).__name__ == "FalconLinear"
    return linear and "." in path and ".lora_" not in path


def _keep_whole(name: str, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
    return parameter


def _convert_layer(
    name: str,
    layer: Any,
    kind: QuantizationKind,
    packing: QuantizedWeights,
    weight: Tensor,
    source: Source,
    put: PlaceParameter | None,
) -> None:
    """Turn a layer into a quantized one; it stays the same object, so that references to it stay valid.

    `put` places the packed weight, as one parameter, `name` being that of the layer's weight; None: as buffers.
    """
    transposed, parameter = isinstance(layer, Conv1D), layer._parameters.pop("weight")
    packed: Any = getattr(parameter, "packed", None)  # by another layer that shares the weight
    if packed is None:
        packed = packing.pack(weight.detach().T if transposed else weight.detach(), kind)
        if put:
            packed = _place_joined(name, layer, packed, put)
        parameter.packed = packed
    layer.__class__ = QuantizedConv1D if transposed else QuantizedLinear
    layer.packing, layer.source, layer.layout = packing, source, None
    if put:
        layer.packed, layer.layout = packed
        return
    for key, tensor in packed.items():
        layer.register_buffer(key, tensor, persistent=False)


def _place_joined(
    name: str, layer: nn.Module, packed: Mapping[str, Tensor], put: PlaceParameter
) -> tuple[nn.Parameter, PackedLayout]:
    """Return the parameter in which `put` places the tensors of a packed weight, and their layout."""
    joined, layout = PackedLayout.join(packed)
    unplaced = nn.Parameter(joined, requires_grad=False)
    set_source(unplaced, InMemory(joined))
    parameter = put(name, layer, unplaced)
    assert parameter is not None
    set_source(parameter, None)  # the whole bytes, which would stay in memory
    return parameter, layout
