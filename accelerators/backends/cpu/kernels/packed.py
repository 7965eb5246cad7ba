"""Weights of linear layers for a phase of reading on a CPU: in oneDNN's own order, siblings as one product.

A module whose weights will not change for a while flows in; its linear layers get another `forward`, which multiplies
with packed weights, and a function comes out that puts everything back. The modules stay the same objects.

On two cores of an AMD EPYC with avx512_bf16, weights [576, 1536] and [49152, 576] take 79 and 3,630 us for 16 rows in
bf16, packed 49 and 1,590; q, k and v of 576 columns 77 us, as one packed product 35; 1,649 and 1,430 us for 768 rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from accelerators.types import KernelImpl, Support

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers side by side that read one tensor, in the families of transformers that do not fuse them."""

SMALLEST = 2**16
"""Numbers of a product's weight from which packing pays: with fewer, the call itself takes the time."""

ROWS = 16
"""What oneDNN is told of the inputs. Told 1, 16, 64 or 768 it was equally quick with 1 to 4,096 of them."""

Product = Callable[[Tensor], Tensor]
Restore = Callable[[], None]

logger = logging.getLogger(__name__)


def prepare(module: nn.Module, keep: bool, apart: Iterable[nn.Module] = ()) -> Restore:
    """Have the linear layers of a module multiply with packed weights; see `Accelerator.kernel`.

    Where gradients are wanted, under autocast, and for inputs of another type, a layer computes what it did before.

    Args:
        keep: weights stay where they are too, and siblings are fused: that pays for few rows. Else the packed weight, a
            tensor of oneDNN's without a storage, takes the place of a layer's own, unless another layer has that too.
        apart: parts of the module that are left alone.
    """
    plain: Counter[str] = Counter()
    met = {id(part) for each in apart for part in each.modules()}
    layers = products = 0
    with ExitStack() as undo, torch.no_grad():
        for product in _products(module, keep, plain, met):
            _pack(product, keep, undo)
            layers, products = layers + len(product), products + 1
        restore = undo.pop_all().close
    left = ", ".join(f"{count} {why}" for why, count in plain.items()) or "none"
    name = type(module).__name__
    logger.debug("%s: %d linear layers packed as %d products; left as they are: %s", name, layers, products, left)
    return restore


def _products(module: nn.Module, keep: bool, plain: Counter[str], met: set[int]) -> Iterator[list[nn.Linear]]:
    """The linear layers that are packed, in lists of those that are one product; others are counted as `plain`, and
    those whose ids are `met` already are passed over."""
    uses = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    for path, parent in module.named_modules():
        children = {name: getattr(child, "base_layer", child) for name, child in parent.named_children()}  # peft's
        found = {name: child for name, child in children.items() if isinstance(child, nn.Linear)}
        layers: dict[str, nn.Linear] = {}
        for name, layer in found.items():
            if id(layer) in met or ".lora_" in path:
                continue
            met.add(id(layer))
            shared = not keep and uses[id(layer._parameters.get("weight"))] > 1
            if why := "with weights of others" if shared else obstacle(layer):
                plain[why] += 1
            else:
                layers[name] = layer
        fused = [[layers.pop(name) for name in names] for names in SIBLINGS if keep and _are_alike(layers, names)]
        for product in [*fused, *([layer] for layer in layers.values())]:
            if sum(layer.weight.numel() for layer in product) >= SMALLEST:
                yield product
            else:
                plain["small"] += len(product)


def obstacle(layer: nn.Linear) -> str:
    """Why a layer is not packed; empty where it can be."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return "with a product of their own"
    weight = layer._parameters.get("weight")
    if weight is None or type(weight.data) is not Tensor or weight.shape != (layer.out_features, layer.in_features):
        return "without a whole weight"  # sharded, or none of plain numbers
    if weight.dtype not in _dtypes() or weight.device.type != "cpu":
        return f"in {weight.dtype} on {weight.device}"
    return ""


def _are_alike(layers: Mapping[str, nn.Linear], names: Sequence[str]) -> bool:
    """Whether all the layers are there, and can be one product."""
    kinds = {(layers[name].in_features, layers[name].weight.dtype) for name in names if name in layers}
    return len(kinds) == 1 and all(name in layers for name in names)


def _pack(layers: Sequence[nn.Linear], keep: bool, undo: ExitStack) -> None:
    """Have `layers` multiply with packed weights as one product; what takes that back is added to `undo`."""
    if len(layers) > 1:
        siblings = _Siblings(layers)
        for number, layer in enumerate(layers):
            _put(layer, partial(siblings.part, number), layer.forward, undo)
        return
    (layer,) = layers
    parameter, packed, bias = layer.weight, _reordered(layer.weight), layer.bias
    plain = layer.forward
    if not keep:

        def plain(input: Tensor) -> Tensor:
            return linear(input, packed.to_dense(), bias)

        def give_back() -> None:
            parameter.data = packed.to_dense()
            layer._parameters["weight"] = parameter

        undo.callback(give_back)
        layer._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
        parameter.data = parameter.new_empty(0)
    _put(layer, lambda input: _multiplied(input, packed, bias), plain, undo)


def _put(layer: nn.Linear, product: Product, plain: Product, undo: ExitStack) -> None:
    """Have a layer compute `product` where it is only read, and `plain` elsewhere."""
    dtype = layer.weight.dtype

    def forward(input: Tensor) -> Tensor:
        if input.dtype != dtype or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return plain(input)
        return product(input)

    put(layer, forward, undo)


def put(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    """Give a module a forward pass of its own, until it is taken back."""
    vars(module)["forward"] = forward
    undo.callback(vars(module).__delitem__, "forward")


class _Siblings:
    """Layers that read one tensor: the first that is called with it computes for all, the others take their parts.

    A part is only given for the same object, unchanged since. Where one has not taken its part when another tensor
    comes, they read different ones: each multiplies by itself from then on.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._plain = [layer.forward for layer in layers]
        self._sizes = [layer.out_features for layer in layers]
        self._packed, self._bias = _reordered(torch.cat([layer.weight for layer in layers])), None
        if any(layer.bias is not None for layer in layers):
            self._bias = torch.cat(
                [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
            )
        self._apart = False
        self._input: Any = None
        self._version = 0
        self._parts: dict[int, Tensor] = {}

    def part(self, number: int, input: Tensor) -> Tensor:
        """What the layer of this number gives; a view of what they all give."""
        if self._apart or input.is_inference():  # which counts no changes
            return self._plain[number](input)
        known = input is self._input and input._version == self._version
        if not known or number not in self._parts:
            if self._parts and not known:
                self._apart, self._input, self._parts = True, None, {}
                return self._plain[number](input)
            parts = _multiplied(input, self._packed, self._bias).split(self._sizes, dim=-1)
            self._input, self._version, self._parts = input, input._version, dict(enumerate(parts))
        part = self._parts.pop(number)
        if not self._parts:
            self._input = None
        return part


def _reordered(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's order; torch 2.13 calls it so for its own compiler (`_inductor`)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
    return packed


def _multiplied(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, packed, bias, "none", [], "")
    return product


@cache
def _dtypes() -> tuple[torch.dtype, ...]:
    """Numbers that oneDNN multiplies on this processor."""
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)


def supported(accelerator: object) -> Support:
    """Whether torch has these operators here, and they are right: they are no public ones, so both are tried."""
    if not torch.backends.mkldnn.is_available():
        return Support(False, f"torch {torch.__version__} is built without oneDNN")
    weight = torch.linspace(-1, 1, 48 * 40).sin().view(48, 40)
    inputs, bias = torch.linspace(1, -1, 3 * 40).cos().view(3, 40), weight[:, 0].clone()
    try:
        for dtype in _dtypes():
            packed = _reordered(weight.to(dtype))
            product = _multiplied(inputs.to(dtype), packed, bias.to(dtype))
            exact = linear(*(tensor.to(dtype).double() for tensor in (inputs, weight, bias)))
            close = torch.allclose(product.double(), exact, rtol=0, atol=0.01 * exact.abs().max().item())
            if not close or not torch.equal(packed.to_dense(), weight.to(dtype)):
                return Support(False, f"torch {torch.__version__} multiplies packed {dtype} weights wrongly here")
    except (AttributeError, RuntimeError, TypeError) as error:
        return Support(False, f"torch {torch.__version__} packs weights in another way than is known here ({error})")
    numbers = " and ".join("bf16" if dtype is torch.bfloat16 else "fp32" for dtype in _dtypes())
    return Support(True, f"{numbers} in the order that oneDNN multiplies fastest; q-k-v and gate-up as one product")


PACKED = KernelImpl(
    operation="inference_weights",
    name="onednn",
    factory=lambda accelerator: prepare,
    supported=supported,
    priority=10,
)
