"""A step of generation on a CPU: the decoder layers of models like Llama, as one call of our own C code.

Generation reads all weights for a token of each row. oneDNN's products leave half of the memory's speed unused then,
and the 25 small operators of a layer take as long as its products. `decode.c` has both; everything else is packed for
oneDNN (`packed.py`), and computed as before: prompts, other models, other numbers, gradients.

Keys and values are written by `decode.c` too, into caches that say where. Such a cache has a method
    room() -> (kept, place) or None
with `kept` the keys and values of each layer in turn, [rows, groups, columns, head size] and alike in strides, the same
list as long as these are the same tensors; and `place`, the column of the token at hand, which is not written again.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from accelerators.backends.cpu.attention import ATTENTION
from accelerators.backends.cpu.kernels import compiler, packed
from accelerators.backends.cpu.kernels.layers import SILU, part, replaced
from accelerators.types import KernelImpl, Support

NUMBERS = 32
"""Sizes are multiples of this: as many bf16 numbers are in a register."""

ROWS, LANES, TOGETHER = 16, 16, 4
"""Rows that are multiplied at a time, numbers of a register, and heads that are computed at a time; as in decode.c."""

MOST = 512
"""Rows up to which a product of `decode.c` is the faster one. Two cores of an AMD EPYC, a weight [3072, 576] that is in
no cache, us of it, of oneDNN's with packed weights, and without: 81, 143 and 199 for 16 rows, 266, 316 and 382 for 64,
1,050, 1,030 and 1,112 for 256, 8,600, 7,670 and 8,210 for 2,048. Of an Intel Xeon with AMX: 136, 175 and 281 for 16,
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


@cache
def _functions() -> ctypes.CDLL:
    functions = compiler.compiled("decode.c")
    if functions.amx() < 0:
        raise compiler.NotCompiled("the system keeps this process from the processor's AMX")
    functions.pack.argtypes = [_pointer, _long, _long, _pointer]
    functions.linear.argtypes = [_pointer, _long, _long, _pointer, _long, *[_pointer] * 3]
    functions.decode.argtypes = [_pointer, _long, _pointer, _long, *[_pointer] * 4, *[_long] * 4, *[_pointer] * 4]
    return functions


def prepare(module: nn.Module, keep: bool) -> Restore:
    """As `packed.prepare`; where weights are kept, decoder layers and the output layer go through `decode.c`."""
    layers = [each for each in module.modules() if part(each) == "DecoderLayer"] if keep else []
    why = _obstacle(layers)
    own: list[nn.Module] = []
    with ExitStack() as undo, torch.no_grad():
        if layers and not why:
            stack = _Stack(layers)
            for number, layer in enumerate(layers):
                packed.put(layer, partial(stack.forward, number), undo)
            for linear, weight in stack.weights:
                packed.put(linear, _Linear(linear, weight), undo)
            own += layers
            output = getattr(module, "lm_head", None)
            if output is not None and not _linear_obstacle(output):
                packed.put(output, _Linear(output, _packed(output)), undo)
                own.append(output)
        undo.callback(packed.prepare(module, keep, apart=own))
        restore = undo.pop_all().close
    if layers:
        found = f"not computed by decode.c: {why}" if why else "computed by decode.c"
        logger.debug("%s: %d layers are %s", type(module).__name__, len(layers), found)
    return restore


def _obstacle(layers: Sequence[Any]) -> str:
    """Why decoder layers are computed as they were; empty where `decode.c` does it."""
    if why := next(filter(None, map(_layer_obstacle, layers)), ""):
        return why
    if [each.self_attn.layer_idx for each in layers] != list(range(len(layers))):
        return "they are not those of one model, from the first on"
    if layers and layers[0].self_attn.config.num_hidden_layers < len(layers):
        return "the model leaves some of them out"
    sizes = [
        (attention.head_dim, attention.q_proj.out_features, attention.k_proj.out_features)
        for attention in (each.self_attn for each in layers)
    ]
    if len(set(sizes)) > 1:
        return "they differ in their heads"
    windows = {getattr(each.self_attn, "sliding_window", None) for each in layers}
    return "they look at different columns" if len(windows) > 1 else ""


def _layer_obstacle(layer: Any) -> str:
    attention, mlp = layer.self_attn, layer.mlp
    if (part(attention), part(mlp)) != ("Attention", "MLP") or any(map(replaced, layer.modules())):
        return "a part is not that of its family"
    config = attention.config
    if config._attn_implementation != ATTENTION:
        return f"attention is {config._attn_implementation}, not {ATTENTION}"
    if config.hidden_act not in SILU:
        return f"its gate is {config.hidden_act}, not silu"
    if any(each._forward_hooks or each._forward_pre_hooks for each in layer.modules() if each is not layer):
        return "something listens to its parts"
    linear = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if why := next(filter(None, map(_linear_obstacle, linear)), ""):
        return why
    if len({each.bias is None for each in linear[:3]}) > 1 or any(each.bias is not None for each in linear[4:]):
        return "a layer has a bias where those of its family have none"
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
    if any(part(norm) != "RMSNorm" or norm.weight.dtype != torch.bfloat16 for norm in norms):
        return "its norms are not those of its family in bf16"
    if any(size % NUMBERS for size in (attention.head_dim, *(each.in_features for each in linear))):
        return f"a size is no multiple of {NUMBERS}"
    return ""


def _linear_obstacle(layer: nn.Module) -> str:
    """Why the weight of a linear layer cannot be packed here; empty where it can."""
    if not isinstance(layer, nn.Linear):
        return f"a {type(layer).__name__} multiplies by itself"
    if why := packed.obstacle(layer):
        return f"a layer is {why}"
    if layer.weight.dtype != torch.bfloat16:
        return f"its numbers are {str(layer.weight.dtype).removeprefix('torch.')}"
    return "" if layer.in_features % NUMBERS == layer.out_features % ROWS == 0 else f"a size is no multiple of {ROWS}"


def _packed(*layers: nn.Linear) -> Tensor:
    """The weights of layers that read one input, in the order of decode.c."""
    inputs = layers[0].in_features
    room = torch.empty(sum(layer.out_features for layer in layers), inputs, dtype=torch.bfloat16)
    for layer, own in zip(layers, room.split([layer.out_features for layer in layers])):
        weight = layer.weight.detach().contiguous()
        _functions().pack(weight.data_ptr(), layer.out_features, inputs, own.data_ptr())
    return room


def _spread(rows: int, inputs: int) -> Tensor:
    """Room for rows of a product, as decode.c wants them."""
    return torch.empty(-(-rows // ROWS) * ROWS * inputs, dtype=torch.bfloat16)


def _is_read(hidden: Tensor) -> bool:
    """Whether numbers are bf16 and nobody wants a gradient."""
    return hidden.dtype == torch.bfloat16 and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


class _Stack:
    """The forward passes of decoder layers with packed weights: the first computes all, the others pass that on.

    Attributes:
        weights: their linear layers, each with its part of the packed weights.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.weights: list[tuple[nn.Linear, Tensor]] = []
        self._modules, self._plain = layers, [layer.forward for layer in layers]
        self._tensors: list[Tensor] = []
        self._layers = (_Layer * len(layers))(*map(self._read, layers))
        first = self._layers[0]
        self._size, self._heads, self._groups = first.size, first.heads, first.groups
        self._widest = max(max(each.heads * each.size, each.hidden + each.inner) for each in self._layers)
        self._functions = _functions()
        self._kept: list[Tensor] = []
        self._known = False
        self._passed: Tensor | None = None

    def _read(self, layer: Any) -> _Layer:
        """Pack the weights of a layer."""
        attention, mlp = layer.self_attn, layer.mlp
        siblings = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv, others = _packed(*siblings), (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        own = {each: _packed(each) for each in others}
        sizes = [each.out_features for each in siblings]
        self.weights += [*zip(siblings, qkv.split(sizes)), *own.items()]
        biases = [each.bias for each in siblings if each.bias is not None]
        tensors: dict[str, Tensor | None] = {
            "norm": layer.input_layernorm.weight,
            "qkv": qkv,
            "qkv_bias": torch.cat(biases) if biases else None,
            "query_norm": attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            "key_norm": attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            "out": own[attention.o_proj],
            "out_bias": attention.o_proj.bias,
            "mlp_norm": layer.post_attention_layernorm.weight,
            "gate": own[mlp.gate_proj],
            "up": own[mlp.up_proj],
            "down": own[mlp.down_proj],
        }
        self._tensors += [tensor for tensor in tensors.values() if tensor is not None]  # C holds none of them
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
        """What layer `number` gives: hidden states [B, T, hidden] -> [B, T, hidden]."""
        passed, self._passed = self._passed, None
        if number == 0:
            found = None if others else self._computed(hidden_states, **named)
        else:
            found = passed if hidden_states is passed else None
        if found is None:
            plain: Tensor = self._plain[number](hidden_states, *others, **named)
            return plain
        if number + 1 < len(self._plain):
            self._passed = found
        return found

    def _computed(
        self,
        hidden: Tensor,
        *,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor | None:
        """What comes out of the last layer; None where that is no step of decoding, or somebody listens in between."""
        mask, room = attention_mask, getattr(past_key_values, "room", None)
        if (
            room is None
            or hidden.shape[1] != 1
            or position_embeddings is None
            or position_embeddings[0].shape[-1] != self._size
            or position_embeddings[0].dtype != torch.bfloat16
            or (mask is not None and (mask.dtype != torch.bfloat16 or mask.shape[1] != 1))
            or not _is_read(hidden)
            or any(each._forward_hooks or each._forward_pre_hooks for each in self._modules)
        ):
            return None
        rows, (kept, place) = len(hidden), room() or ([], 0)
        if not kept or not self._fits(kept, rows) or not 0 <= place < kept[0].shape[2]:
            return None
        first, columns = kept[0], kept[0].shape[2]
        cosine, sine = (each.expand(rows, 1, self._size).contiguous() for each in position_embeddings)
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
        """Whether `decode.c` can write to what a cache keeps."""
        if kept is not self._kept:
            first = kept[0]
            shape = first.shape[0], self._groups, first.shape[2], self._size
            self._known = len(kept) == 2 * len(self._layers) and all(
                (each.dtype, each.shape, each.stride()) == (torch.bfloat16, shape, first.stride()) for each in kept
            )
            self._known &= first.stride()[2:] == (self._size, 1)
            self._kept, self._pointers = kept, (_pointer * len(kept))(*(each.data_ptr() for each in kept))
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


@cache
def supported(accelerator: object) -> Support:
    """Whether the processor multiplies bf16, a compiler is there, and a product is right."""
    if why := compiler.why_not(_functions, "generation takes about twice as long"):
        return Support(False, why)
    weight = torch.linspace(-1, 1, 48 * 64).sin().view(48, 64).bfloat16()
    layer = nn.utils.skip_init(nn.Linear, 64, 48, bias=False, dtype=torch.bfloat16)  # which draws no random numbers
    inputs = torch.linspace(1, -1, 21 * 64).cos().view(21, 64).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(weight)
        found = _Linear(layer, _packed(layer))(inputs)
    exact = inputs.double() @ weight.double().T
    if not torch.allclose(found.double(), exact, rtol=0, atol=0.01 * exact.abs().max().item()):
        return Support(False, "the compiled products are wrong here")
    if not (onednn := packed.supported(accelerator)):
        return onednn
    needed = f"{compiler.NEEDED} and amx_bf16" if _functions().amx() else compiler.NEEDED
    return Support(True, f"all decoder layers in one call, compiled for {needed}; the rest packed for oneDNN")


DECODE = KernelImpl(
    operation="inference_weights",
    name="native",
    factory=lambda accelerator: prepare,
    supported=supported,
    priority=20,
)
