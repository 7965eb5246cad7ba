"""A step of generation on a CPU: the decoder layers of models like Llama, as one call of C code.

Generation reads all weights for one token of each row. oneDNN's products then use half of the memory's bandwidth, and
the 25 small operators of a layer take as long as its products. `decode.c` computes both; everything else (prompts,
other models, other dtypes, gradients) is packed for oneDNN (`packed.py`) or computed as before.

`decode.c` also writes keys and values into caches that say where. Such a cache has a method
    decode_buffers() -> (states, column) or None
`states` is the list of keys and values of each layer in turn, [rows, groups, columns, head size] with equal strides; it
is the same list as long as it contains the same tensors. `column` is the column of the current token.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelerators.backends.cpu.attention import ATTENTION
from accelerators.backends.cpu.kernels import compiler, packed
from accelerators.backends.cpu.kernels.layers import SILU, part, replaced
from accelerators.types import KernelImpl, Support

NUMBERS = 32
"""Sizes are multiples of this number of bf16 numbers in a register."""

ROWS, LANES, TOGETHER = 16, 16, 4
"""Rows multiplied at a time, float32 numbers of a register, and heads computed at a time; as in decode.c."""

MOST = 512
"""Largest number of rows for products of `decode.c`. Time of a weight [3072, 576] that is in no cache, on two cores of
an AMD EPYC, in us (decode.c, oneDNN with packed weights, oneDNN): 81, 143 and 199 for 16 rows, 266, 316 and 382 for 64,
1,050, 1,030 and 1,112 for 256, 8,600, 7,670 and 8,210 for 2,048. On an Intel Xeon with AMX: 136, 175 and 281 for 16,
229, 241 and 395 for 64, 511, 382 and 594 for 256, 884, 669 and 891 for 512."""

logger = logging.getLogger(__name__)

Restore = Callable[[], None]
_pointer, _long = ctypes.c_void_p, ctypes.c_long


class _Layer(ctypes.Structure):
    """`Layer` of decode.c."""

    _fields_ = (
        [(name, _long) for name in ("hidden", "heads", "groups", "size", "inner")]
        + [(name, ctypes.c_float) for name in ("epsilon", "scale")]
        + [(name, _pointer) for name in ("norm", "qkv", "qkv_bias", "query_norm", "key_norm", "out", "out_bias")]
        + [(name, _pointer) for name in ("mlp_norm", "gate", "up", "down")]
    )


@functools.cache
def _functions() -> ctypes.CDLL:
    functions = compiler.compiled("decode.c")
    if functions.amx() < 0:
        raise compiler.NotCompiled("the system does not let this process use AMX")
    functions.pack.argtypes = [_pointer, _long, _long, _pointer]
    functions.linear.argtypes = [_pointer, _long, _long, _pointer, _long, *[_pointer] * 3]
    functions.decode.argtypes = [_pointer, _long, _pointer, _long, *[_pointer] * 4, *[_long] * 4, *[_pointer] * 4]
    return functions


def prepare(module: nn.Module, keep: bool) -> Restore:
    """Prepare a module like `packed.prepare`; if weights are kept, `decode.c` computes decoder and output layers."""
    layers = [layer for layer in module.modules() if part(layer) == "DecoderLayer"] if keep else []
    reason = _obstacle(layers)
    prepared: list[nn.Module] = []
    with ExitStack() as undo, torch.no_grad():
        if layers and not reason:
            stack = _Stack(layers)
            for number, layer in enumerate(layers):
                packed.put(layer, partial(stack.forward, number), undo)
            for linear, weight in stack.weights:
                packed.put(linear, _Linear(linear, weight), undo)
            prepared += layers
            output = getattr(module, "lm_head", None)
            if output is not None and not _linear_obstacle(output):
                packed.put(output, _Linear(output, _packed(output)), undo)
                prepared.append(output)
        undo.callback(packed.prepare(module, keep, apart=prepared))
        restore = undo.pop_all().close
    if layers:
        state = f"not computed by decode.c: {reason}" if reason else "computed by decode.c"
        logger.debug("%s: %d layers are %s", type(module).__name__, len(layers), state)
    return restore


def _obstacle(layers: Sequence[Any]) -> str:
    """Return why `decode.c` cannot compute these decoder layers; "" if it can."""
    if reason := next(filter(None, map(_layer_obstacle, layers)), ""):
        return reason
    if [layer.self_attn.layer_idx for layer in layers] != list(range(len(layers))):
        return "they are not the layers of one model in order"
    if layers and layers[0].self_attn.config.num_hidden_layers < len(layers):
        return "the model skips some of them"
    sizes = [
        (attention.head_dim, attention.q_proj.out_features, attention.k_proj.out_features)
        for attention in (layer.self_attn for layer in layers)
    ]
    if len(set(sizes)) > 1:
        return "their heads differ"
    windows = {getattr(layer.self_attn, "sliding_window", None) for layer in layers}
    return "their attention windows differ" if len(windows) > 1 else ""


def _layer_obstacle(layer: Any) -> str:
    attention, mlp = layer.self_attn, layer.mlp
    if (part(attention), part(mlp)) != ("Attention", "MLP") or any(map(replaced, layer.modules())):
        return "a part is not that of its family"
    config = attention.config
    if config._attn_implementation != ATTENTION:
        return f"attention is {config._attn_implementation}, not {ATTENTION}"
    if config.hidden_act not in SILU:
        return f"its gate is {config.hidden_act}, not silu"
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules() if module is not layer):
        return "its parts have hooks"
    linear = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if reason := next(filter(None, map(_linear_obstacle, linear)), ""):
        return reason
    if len({module.bias is None for module in linear[:3]}) > 1 or any(module.bias is not None for module in linear[4:]):
        return "a layer has a bias that its family does not have"
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
    if any(part(norm) != "RMSNorm" or norm.weight.dtype != torch.bfloat16 for norm in norms):
        return "its norms are not those of its family in bf16"
    if any(size % NUMBERS for size in (attention.head_dim, *(module.in_features for module in linear))):
        return f"a size is no multiple of {NUMBERS}"
    return ""


def _linear_obstacle(layer: nn.Module) -> str:
    """Return why the weight of a linear layer cannot be packed here; "" if it can."""
    if not isinstance(layer, nn.Linear):
        return f"a {type(layer).__name__} has its own product"
    if reason := packed.obstacle(layer):
        return f"a layer is {reason}"
    if layer.weight.dtype != torch.bfloat16:
        return f"its numbers are {str(layer.weight.dtype).removeprefix('torch.')}"
    return "" if layer.in_features % NUMBERS == layer.out_features % ROWS == 0 else f"a size is no multiple of {ROWS}"


def _packed(*layers: nn.Linear) -> Tensor:
    """Return the weights of layers that read the same input, in the order of decode.c."""
    inputs = layers[0].in_features
    weights = torch.empty(sum(layer.out_features for layer in layers), inputs, dtype=torch.bfloat16)
    for layer, block in zip(layers, weights.split([layer.out_features for layer in layers])):
        weight = layer.weight.detach().contiguous()
        _functions().pack(weight.data_ptr(), layer.out_features, inputs, block.data_ptr())
    return weights


def _spread(rows: int, inputs: int) -> Tensor:
    """Return memory for the rows of a product, in the order of decode.c."""
    return torch.empty(-(-rows // ROWS) * ROWS * inputs, dtype=torch.bfloat16)


def _is_read(hidden: Tensor) -> bool:
    """Return whether numbers are bf16 and need no gradient."""
    return hidden.dtype == torch.bfloat16 and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


class _Stack:
    """The forward passes of decoder layers with packed weights: the first computes all, the others return its result.

    Attributes:
        weights: the linear layers, each with its part of the packed weights.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.weights: list[tuple[nn.Linear, Tensor]] = []
        self._modules, self._plain = layers, [layer.forward for layer in layers]
        self._tensors: list[Tensor] = []
        self._layers = (_Layer * len(layers))(*map(self._read, layers))
        first = self._layers[0]
        self._size, self._heads, self._groups = first.size, first.heads, first.groups
        self._widest = max(max(layer.heads * layer.size, layer.hidden + layer.inner) for layer in self._layers)
        self._functions = _functions()
        self._kept: list[Tensor] = []
        self._known = False
        self._passed: Tensor | None = None

    def _read(self, layer: Any) -> _Layer:
        """Return a layer in the form of decode.c, with packed weights."""
        attention, mlp = layer.self_attn, layer.mlp
        siblings = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv, others = _packed(*siblings), (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        packed_weights = {linear: _packed(linear) for linear in others}
        sizes = [linear.out_features for linear in siblings]
        self.weights += [*zip(siblings, qkv.split(sizes)), *packed_weights.items()]
        biases = [linear.bias for linear in siblings if linear.bias is not None]
        tensors: dict[str, Tensor | None] = {
            "norm": layer.input_layernorm.weight,
            "qkv": qkv,
            "qkv_bias": torch.cat(biases) if biases else None,
            "query_norm": attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            "key_norm": attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            "out": packed_weights[attention.o_proj],
            "out_bias": attention.o_proj.bias,
            "mlp_norm": layer.post_attention_layernorm.weight,
            "gate": packed_weights[mlp.gate_proj],
            "up": packed_weights[mlp.up_proj],
            "down": packed_weights[mlp.down_proj],
        }
        self._tensors += [tensor for tensor in tensors.values() if tensor is not None]  # decode.c has pointers only
        return _Layer(
            hidden=mlp.gate_proj.in_features,
            heads=attention.q_proj.out_features // attention.head_dim,
            groups=attention.k_proj.out_features // attention.head_dim,
            size=attention.head_dim,
            inner=mlp.down_proj.in_features,
            epsilon=layer.input_layernorm.variance_epsilon,
            scale=attention.scaling,
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        )

    def forward(self, number: int, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return the output of layer `number`: hidden states [B, T, hidden] -> [B, T, hidden]."""
        passed, self._passed = self._passed, None
        if number == 0:
            output = None if others else self._computed(hidden_states, **named)
        else:
            output = passed if hidden_states is passed else None
        if output is None:
            plain: Tensor = self._plain[number](hidden_states, *others, **named)
            return plain
        if number + 1 < len(self._plain):
            self._passed = output
        return output

    def _computed(
        self,
        hidden: Tensor,
        *,
        cache: Any = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor | None:
        """Return the output of the last layer; None if this is no decoding step, or if a layer has hooks.

        The cache is `past_key_values` before transformers 5.24.
        """
        given = past_key_values if cache is None else cache
        mask, decode_buffers = attention_mask, getattr(given, "decode_buffers", None)
        if (
            decode_buffers is None
            or hidden.shape[1] != 1
            or position_embeddings is None
            or position_embeddings[0].shape[-1] != self._size
            or position_embeddings[0].dtype != torch.bfloat16
            or (mask is not None and (mask.dtype != torch.bfloat16 or mask.shape[1] != 1))
            or not _is_read(hidden)
            or any(module._forward_hooks or module._forward_pre_hooks for module in self._modules)
        ):
            return None
        rows, (kept, place) = len(hidden), decode_buffers() or ([], 0)
        if not kept or not self._fits(kept, rows) or not 0 <= place < kept[0].shape[2]:
            return None
        first, columns = kept[0], kept[0].shape[2]
        cosine, sine = (module.expand(rows, 1, self._size).contiguous() for module in position_embeddings)
        if mask is not None:
            mask = mask.expand(rows, 1, 1, columns).contiguous()
        hidden, output = hidden.contiguous(), torch.empty_like(hidden)
        qkv = hidden.new_empty(rows, self._heads + 2 * self._groups, self._size)
        spread = _spread(rows, self._widest)
        rooms = torch.empty(torch.get_num_threads(), TOGETHER, columns + LANES, dtype=torch.float32)
        self._functions.decode(
            *(self._layers, len(self._layers), hidden.data_ptr(), rows, cosine.data_ptr(), sine.data_ptr()),
            *(None if mask is None else mask.data_ptr(), self._pointers, first.stride(0), first.stride(1)),
            *(place, columns, output.data_ptr(), qkv.data_ptr(), spread.data_ptr(), rooms.data_ptr()),
        )
        return output

    def _fits(self, kept: list[Tensor], rows: int) -> bool:
        """Return whether `decode.c` can write to the tensors of a cache."""
        if kept is not self._kept:
            first = kept[0]
            shape = first.shape[0], self._groups, first.shape[2], self._size
            self._known = len(kept) == 2 * len(self._layers) and all(
                (tensor.dtype, tensor.shape, tensor.stride()) == (torch.bfloat16, shape, first.stride())
                for tensor in kept
            )
            self._known &= first.stride()[2:] == (self._size, 1)
            self._kept, self._pointers = kept, (_pointer * len(kept))(*(tensor.data_ptr() for tensor in kept))
        return self._known and len(kept[0]) == rows


class _Linear:
    """The forward pass of a linear layer with packed weights."""

    def __init__(self, layer: nn.Linear, weight: Tensor) -> None:
        self.plain, self.bias = layer.forward, layer.bias
        self.outputs, self.inputs = layer.weight.shape
        self.weight = weight

    def __call__(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.inputs
        if rows > MOST or not _is_read(input):
            return self.plain(input)
        input = input.contiguous()
        output, spread = input.new_empty(*input.shape[:-1], self.outputs), _spread(rows, self.inputs)
        _functions().linear(
            *(input.data_ptr(), rows, self.inputs, self.weight.data_ptr(), self.outputs),
            None if self.bias is None else self.bias.data_ptr(),
            *(output.data_ptr(), spread.data_ptr()),
        )
        return output


@functools.cache
def supported(accelerator: object) -> Support:
    """Test that the processor multiplies bf16, that a compiler is installed, and that a product is right."""
    if reason := compiler.why_not(_functions, "generation takes about twice as long"):
        return Support(False, reason)
    weight = torch.linspace(-1, 1, 48 * 64).sin().view(48, 64).bfloat16()
    layer = nn.utils.skip_init(nn.Linear, 64, 48, bias=False, dtype=torch.bfloat16)  # draws no random numbers
    inputs = torch.linspace(1, -1, 21 * 64).cos().view(21, 64).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(weight)
        product = _Linear(layer, _packed(layer))(inputs)
    exact = inputs.double() @ weight.double().T
    if not torch.allclose(product.double(), exact, rtol=0, atol=0.01 * exact.abs().max().item()):
        return Support(False, "the compiled products are wrong here")
    if not (onednn := packed.supported(accelerator)):
        return onednn
    features = f"{compiler.NEEDED} and amx_bf16" if _functions().amx() else compiler.NEEDED
    return Support(True, f"all decoder layers in one call, compiled for {features}; the rest packed for oneDNN")


DECODE = KernelImpl(
    operation="inference_weights",
    name="native",
    factory=lambda accelerator: prepare,
    supported=supported,
    priority=20,
)
