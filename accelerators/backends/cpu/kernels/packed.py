"""Weights of linear layers for inference on a CPU: in oneDNN's order, siblings as one product.

`prepare` gives the linear layers of a module another `forward`, which multiplies with packed weights, and returns a
function that restores everything. The modules stay the same objects.

On two cores of an AMD EPYC with avx512_bf16, weights [576, 1536] and [49152, 576] take 79 and 3,630 us for 16 rows in
bf16, packed 49 and 1,590; q, k and v of 576 columns take 77 us, as one packed product 35 (for 768 rows 1,649
and 1,430).
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

from accelerators import host
from accelerators.types import KernelImpl, Support

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same tensor, in the families of transformers that do not fuse them."""

SMALLEST = 2**16
"""Smallest weight of a product for which packing pays; for smaller ones the call itself dominates."""

ROWS = 16
"""Rows of inputs, a hint for oneDNN. With 1, 16, 64 or 768 it was equally fast for 1 to 4,096 rows."""

GAPS = 2**26
"""Numbers of replaced weights whose memory is not returned to the system, which takes a millisecond or more."""

Product = Callable[[Tensor], Tensor]
Restore = Callable[[], None]

logger = logging.getLogger(__name__)


def prepare(module: nn.Module, keep: bool, apart: Iterable[nn.Module] = ()) -> Restore:
    """Let the linear layers of a module multiply with packed weights; see operation `inference_weights`.

    With gradients, under autocast, and for inputs of another dtype, a layer computes as before.

    Args:
        module: the module.
        keep: keep the weights too, and fuse siblings, which pays for few rows. Otherwise the packed weight, a tensor of
            oneDNN without a storage, replaces the layer's weight, one layer after the other, so that there is no second
            copy of the model. Weights that another layer shares, or that are parts of a larger buffer, stay plain.
        apart: parts of the module to skip.
    """
    plain: Counter[str] = Counter()
    skipped_ids = {id(part) for module_apart in apart for part in module_apart.modules()}
    layers = products = freed = 0
    with ExitStack() as undo, torch.no_grad():
        for product in _products(module, keep, plain, skipped_ids):
            _pack(product, keep, undo)
            layers, products = layers + len(product), products + 1
            freed += 0 if keep else sum(layer.in_features * layer.out_features for layer in product)
            if freed > GAPS:  # the next packed weight does not fit into the gap that a plain one of its size leaves
                freed = 0
                host.return_freed_memory()
                undo.callback(host.return_freed_memory)
        restore = undo.pop_all().close
    skipped = ", ".join(f"{count} {why}" for why, count in plain.items()) or "none"
    name = type(module).__name__
    logger.debug("%s: %d linear layers packed as %d products; unchanged: %s", name, layers, products, skipped)
    return restore


def _products(module: nn.Module, keep: bool, plain: Counter[str], seen: set[int]) -> Iterator[list[nn.Linear]]:
    """Yield the linear layers to pack, in lists that form one product.

    `plain` counts other layers by reason; modules whose ids are in `seen` are skipped.
    """
    uses = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    for path, parent in module.named_modules():
        children = {name: getattr(child, "base_layer", child) for name, child in parent.named_children()}  # peft's
        linears = {name: child for name, child in children.items() if isinstance(child, nn.Linear)}
        layers: dict[str, nn.Linear] = {}
        for name, layer in linears.items():
            if id(layer) in seen or ".lora_" in path:
                continue
            seen.add(id(layer))
            weight = layer._parameters.get("weight")
            reason = obstacle(layer)
            if not reason and not keep and weight is not None:
                reason = _replacement_obstacle(weight, uses[id(weight)])
            if reason:
                plain[reason] += 1
            else:
                layers[name] = layer
        fused = [[layers.pop(name) for name in names] for names in SIBLINGS if keep and _are_alike(layers, names)]
        for product in [*fused, *([layer] for layer in layers.values())]:
            if sum(layer.weight.numel() for layer in product) >= SMALLEST:
                yield product
            else:
                plain["small"] += len(product)


def obstacle(layer: nn.Linear) -> str:
    """Return why a layer cannot be packed; "" if it can."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return "with another forward pass"
    weight = layer._parameters.get("weight")
    if weight is None or type(weight.data) is not Tensor or weight.shape != (layer.out_features, layer.in_features):
        return "without a whole weight"  # sharded, or not plain numbers
    if weight.dtype not in _dtypes() or weight.device.type != "cpu":
        return f"in {weight.dtype} on {weight.device}"
    return ""


def _replacement_obstacle(weight: Tensor, uses: int) -> str:
    """Return why the packed weight cannot replace `weight`, so that no memory would be freed; "" if it can."""
    if uses > 1:
        return "with shared weights"
    in_buffer = weight.untyped_storage().nbytes() > weight.nbytes  # DeepSpeed's, from ZeRO 1 on
    return "in a buffer with others" if in_buffer else ""


def _are_alike(layers: Mapping[str, nn.Linear], names: Sequence[str]) -> bool:
    """Return whether all the layers exist and can be one product."""
    kinds = {(layers[name].in_features, layers[name].weight.dtype) for name in names if name in layers}
    return len(kinds) == 1 and all(name in layers for name in names)


def _pack(layers: Sequence[nn.Linear], keep: bool, undo: ExitStack) -> None:
    """Let `layers` multiply with packed weights as one product; `undo` receives the callbacks that restore them."""
    if len(layers) > 1:
        siblings = _Siblings(layers)
        for number, layer in enumerate(layers):
            _put(layer, partial(siblings.part, number), layer.forward, undo)
        return
    (layer,) = layers
    parameter: Any = layer.weight
    packed, bias = _reordered(layer.weight), layer.bias
    plain = layer.forward
    if not keep:

        def plain(input: Tensor) -> Tensor:
            return linear(input, packed.to_dense(), bias)

        def restore_weight() -> None:
            parameter.data = packed.to_dense()
            layer._parameters["weight"] = parameter

        undo.callback(restore_weight)
        layer._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
        parameter.data = parameter.new_empty(0)
    _put(layer, lambda input: _multiplied(input, packed, bias), plain, undo)


def _put(layer: nn.Linear, product: Product, plain: Product, undo: ExitStack) -> None:
    """Let a layer compute `product` in inference, and `plain` otherwise."""
    dtype = layer.weight.dtype

    def forward(input: Tensor) -> Tensor:
        if input.dtype != dtype or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return plain(input)
        return product(input)

    put(layer, forward, undo)


def put(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    """Replace a module's forward pass until `undo` runs."""
    vars(module)["forward"] = forward
    undo.callback(vars(module).__delitem__, "forward")


class _Siblings:
    """Layers that read the same tensor: the first call with it computes for all, the others return their parts.

    A part is only valid for the same, unchanged tensor object. If another tensor comes before all parts are taken, the
    layers read different tensors, and each multiplies separately from then on.
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
        """Return the output of the layer of this number; a view of the common product."""
        if self._apart or input.is_inference():  # it has no version counter
            return self._plain[number](input)
        known = input is self._input and input._version == self._version
        if not known or number not in self._parts:
            if self._parts and not known:
                logger.debug("layers of one input got several: each multiplies its plain weight from now on")
                self._apart, self._input, self._parts = True, None, {}
                return self._plain[number](input)
            parts = _multiplied(input, self._packed, self._bias).split(self._sizes, dim=-1)
            self._input, self._version, self._parts = input, input._version, dict(enumerate(parts))
        part = self._parts.pop(number)
        if not self._parts:
            self._input = None
        return part


def _reordered(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in oneDNN's order, by the operator that torch 2.13 uses in `_inductor`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
    return packed


def _multiplied(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, packed, bias, "none", [], "")
    return product


@cache
def _dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that oneDNN multiplies on this processor."""
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)


def supported(accelerator: object) -> Support:
    """Test that torch has these private operators here, and that they are right."""
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
        return Support(False, f"torch {torch.__version__} packs weights in an unknown way ({error})")
    numbers = " and ".join("bf16" if dtype is torch.bfloat16 else "fp32" for dtype in _dtypes())
    return Support(True, f"{numbers} in the order that oneDNN multiplies fastest; q-k-v and gate-up as one product")


PACKED = KernelImpl(
    operation="inference_weights",
    name="onednn",
    factory=lambda accelerator: prepare,
    supported=supported,
    priority=10,
)
