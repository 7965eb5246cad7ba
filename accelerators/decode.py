"""A step of generation on a CPU: decoder layers of models like Llama, each as two calls of our own C code.

Generation reads all weights for a token of each row. oneDNN's products leave half of the memory's speed unused then,
and the 25 small operators of a layer take as long as its products. `decode.c` has both; everything else is packed for
oneDNN (`accelerators.packed`), and computed as before: prompts, other models, other numbers, gradients.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from accelerators import cpu_attention, native, packed
from accelerators.layers import SILU, part, replaced
from accelerators.types import KernelImpl, Support

NUMBERS = 32
"""Sizes are multiples of this: as many bf16 numbers are in a register."""

ROWS = 16
"""Rows that are multiplied at a time; as in decode.c."""

MOST = 512
"""Rows up to which a product of `decode.c` is the faster one. Two cores of an AMD EPYC, a weight [3072, 576] that is in
no cache, us of it, of oneDNN's with packed weights, and without: 81, 143 and 199 for 16 rows, 266, 316 and 382 for 64,
1,050, 1,030 and 1,112 for 256, 8,600, 7,670 and 8,210 for 2,048."""

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
    functions = native.compiled("decode.c")
    functions.pack.argtypes = [_pointer, _long, _long, _pointer]
    functions.linear.argtypes = [_pointer, _long, _long, _pointer, _long, *[_pointer] * 3]
    functions.before_cache.argtypes = [_pointer, _pointer, _long, *[_pointer] * 4]
    functions.after_cache.argtypes = [
        *(_pointer, _pointer, _long, _pointer, _pointer, _long, _long, _pointer, _long, _long, _long),
        *[_pointer] * 4,
    ]
    return functions


def prepare(module: nn.Module, keep: bool) -> Restore:
    """As `packed.prepare`; where weights are kept, decoder layers and the output layer go through `decode.c`."""
    own: list[nn.Module] = []
    reasons: Counter[str] = Counter()
    with ExitStack() as undo, torch.no_grad():
        for layer in module.modules() if keep else ():
            if part(layer) == "DecoderLayer" and not (why := _obstacle(layer)):
                whole = _DecoderLayer(layer)
                packed.put(layer, whole, undo)
                for linear, weight in whole.weights:
                    packed.put(linear, _Linear(linear, weight), undo)
                own.append(layer)
            elif part(layer) == "DecoderLayer":
                reasons[why] += 1
        output = getattr(module, "lm_head", None)
        if own and output is not None and not _linear_obstacle(output):
            packed.put(output, _Linear(output, _packed(output)), undo)
            own.append(output)
        undo.callback(packed.prepare(module, keep, apart=own))
        restore = undo.pop_all().close
    if keep:
        left = "; ".join(f"{count} are not: {why}" for why, count in reasons.items()) or "all that it knows"
        logger.debug("%s: %d layers computed by decode.c, %s", type(module).__name__, len(own), left)
    return restore


def _obstacle(layer: Any) -> str:
    """Why a decoder layer is computed as it was; empty where `decode.c` does it."""
    attention, mlp = layer.self_attn, layer.mlp
    if (part(attention), part(mlp)) != ("Attention", "MLP") or any(map(replaced, layer.modules())):
        return "a part is not that of its family"
    config = attention.config
    if config._attn_implementation != cpu_attention.ATTENTION:
        return f"attention is {config._attn_implementation}, not {cpu_attention.ATTENTION}"
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


class _DecoderLayer:
    """The forward pass of a decoder layer with packed weights."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.plain, self.number = layer.forward, attention.layer_idx
        self.size = attention.head_dim
        self.heads, self.groups = (each.out_features // self.size for each in (attention.q_proj, attention.k_proj))
        self.widest = max(attention.o_proj.in_features, mlp.gate_proj.in_features + mlp.down_proj.in_features)
        siblings = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv, others = _packed(*siblings), (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        packed = {each: _packed(each) for each in others}
        sizes = [each.out_features for each in siblings]
        self.weights = [*zip(siblings, qkv.split(sizes)), *packed.items()]
        biases = [each.bias for each in siblings if each.bias is not None]
        self._tensors: dict[str, Tensor | None] = {
            "norm": layer.input_layernorm.weight,
            "qkv": qkv,
            "qkv_bias": torch.cat(biases) if len(biases) == len(siblings) else None,
            "query_norm": attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            "key_norm": attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            "out": packed[attention.o_proj],
            "out_bias": attention.o_proj.bias,
            "mlp_norm": layer.post_attention_layernorm.weight,
            "gate": packed[mlp.gate_proj],
            "up": packed[mlp.up_proj],
            "down": packed[mlp.down_proj],
        }
        self._layer = _Layer(
            hidden=mlp.gate_proj.in_features,
            heads=self.heads,
            groups=self.groups,
            size=self.size,
            inner=mlp.down_proj.in_features,
            epsilon=layer.input_layernorm.variance_epsilon,
            scale=attention.scaling,
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in self._tensors.items()},
        )
        self._at, self._functions = ctypes.addressof(self._layer), _functions()

    def __call__(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        """hidden_states [B, T, hidden] -> [B, T, hidden]: by decode.c for T = 1 and a cache, else as before."""
        cache, mask, positions = (
            named.get(name) for name in ("past_key_values", "attention_mask", "position_embeddings")
        )
        if (
            others
            or hidden_states.shape[1] != 1
            or cache is None
            or positions is None
            or positions[0].shape[-1] != self.size
            or (mask is not None and (mask.dtype != torch.bfloat16 or mask.shape[1] != 1))
            or not _is_read(hidden_states)
        ):
            result: Tensor = self.plain(hidden_states, *others, **named)
            return result
        rows, hidden = len(hidden_states), hidden_states.contiguous()
        cosine, sine = (each.expand(rows, 1, self.size).contiguous() for each in positions)
        spread = _spread(rows, self.widest)
        qkv = hidden.new_empty(rows, self.heads + 2 * self.groups, 1, self.size)
        self._functions.before_cache(
            *(self._at, hidden.data_ptr(), rows, cosine.data_ptr(), sine.data_ptr()),
            *(qkv.data_ptr(), spread.data_ptr()),
        )
        _, key, value = qkv.split_with_sizes((self.heads, self.groups, self.groups), 1)
        keys, values = cache.update(key, value, self.number)
        if keys.stride()[2:] != (self.size, 1) or values.stride()[2:] != (self.size, 1):
            keys, values = keys.contiguous(), values.contiguous()
        columns = keys.shape[2]
        if mask is not None:
            mask = mask.expand(rows, 1, 1, columns).contiguous()
        threads = self._functions.omp_get_max_threads()
        output, rooms = torch.empty_like(hidden), hidden.new_empty(threads, columns, dtype=torch.float32)
        self._functions.after_cache(
            *(self._at, hidden.data_ptr(), rows, qkv.data_ptr()),
            *(keys.data_ptr(), keys.stride(0), keys.stride(1)),
            *(values.data_ptr(), values.stride(0), values.stride(1), columns),
            *(None if mask is None else mask.data_ptr(), output.data_ptr(), spread.data_ptr(), rooms.data_ptr()),
        )
        return output


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
    if why := native.why_not(_functions, "generation takes about twice as long"):
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
    return Support(True, f"a decoder layer in two calls, compiled for {native.NEEDED}; the rest packed for oneDNN")


DECODE = KernelImpl(
    operation="inference_weights",
    name="native",
    factory=lambda accelerator: prepare,
    supported=supported,
    priority=20,
)
