"""Decoder layers on a CPU as one call of C code: a step of generation, and the prompts before it.

Generation reads all weights for one token of each row. oneDNN's products then use half of the memory's bandwidth, and
the 25 small operators of a layer take as long as its products. `decode.c` computes both, in float32 and bf16, for the
families of `families.py`. Everything else (other models, other dtypes, gradients, calls without a cache) is packed for
oneDNN (`packed.py`) or computed as before.

`decode.c` also writes keys and values into caches that say where. Such a cache has a method
    decode_buffers(groups, size, dtype) -> (states, column) or None
`states` is the list of keys and values of each layer in turn, [rows, groups, columns, size] with equal strides; it is
the same list as long as it contains the same tensors. `column` is the column of the first of the current tokens.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from accelerators.backends.cpu.kernels import compiler, families, invariant, packed
from accelerators.backends.cpu.kernels.dtypes import DTYPES
from accelerators.backends.cpu.kernels.families import Family, Parts
from accelerators.types import KernelImpl, Support

MOST = 512
"""Largest number of rows for an output layer. Prompts with more tokens together are computed in parts of this size, but
no prompt is divided. With AMX they are not computed by `decode.c`, because oneDNN is faster for many rows: on an Intel
Xeon, a weight [3072, 576] takes (decode.c, oneDNN), in us, 136 and 281 for 16 rows, 229 and 395 for 64, 884 and 669 for
512."""

_CACHES = ("cache", "past_key_values", "layer_past")
"""Names of a layer's cache: since transformers 5.24, before, and in some families."""

_UNUSUAL = ("encoder_hidden_states", "output_attentions")
"""Arguments of layers that decode.c knows nothing of, if they are given."""

_NEEDED = ("position_embeddings", "alibi")
"""If the forward pass of a layer takes one of these arguments, decode.c computes the layer only if a call passes it."""

logger = logging.getLogger(__name__)

Restore = Callable[[], None]
_pointer, _long, _float = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class _Norm(ctypes.Structure):
    """`Norm` of decode.c."""

    _fields_ = [("weight", _pointer), ("bias", _pointer), ("epsilon", _float), ("shift", _float), ("centered", _long)]


class _Linear(ctypes.Structure):
    """`Linear` of decode.c."""

    _fields_ = [("packed", _pointer), ("bias", _pointer), ("inputs", _long), ("outputs", _long)]


_NORMS = ("before_attention", "query", "key", "after_attention", "before_mlp", "after_mlp")
_PRODUCTS = ("qkv", "out", "up", "down")


class _Router(ctypes.Structure):
    """`Router` of decode.c."""

    _fields_ = [("weight", _pointer), ("experts", _long), ("chosen", _long), ("scaled", _long)]


class _Layer(ctypes.Structure):
    """`Layer` of decode.c."""

    _fields_: ClassVar[Any] = (
        [(name, _long) for name in ("heads", "groups", "size", "rotary", "activation", "gated", "parallel")]
        + [(name, _float) for name in ("scale", "cap")]
        + [(name, _Norm) for name in _NORMS]
        + [(name, _Linear) for name in _PRODUCTS]
        + [("router", _Router)]
    )


class _Step(ctypes.Structure):
    """`Step` of decode.c."""

    _fields_: ClassVar[Any] = (
        [("layers", _pointer), ("count", _long), ("rows", _long), ("tokens", _long)]
        + [(name, _pointer) for name in ("hidden", "cosine", "sine", "mask")]
        + [("mask_heads", _long), ("kept", _pointer)]
        + [(name, _long) for name in ("first", "row_stride", "group_stride", "place", "columns")]
        + [(name, _pointer) for name in ("to", "qkv", "sum", "heads", "inner", "inputs", "scores", "shares", "order")]
    )


@functools.cache
def _functions(dtype: torch.dtype = torch.bfloat16) -> ctypes.CDLL:
    functions = compiler.compiled("decode.c", *DTYPES[dtype])
    if functions.amx() < 0:
        raise compiler.NotCompiled("the system does not let this process use AMX")
    functions.pack.argtypes = [_pointer, _long, _long, _pointer, _long, _long, _long]
    functions.linear.argtypes = [_pointer, _pointer, _long, _pointer, _pointer]
    functions.decode.argtypes = [_pointer]
    return functions


def prepare(module: nn.Module, keep: bool) -> Restore:
    """Prepare a module like `packed.prepare`; if weights are kept, `decode.c` computes decoder and output layers.

    Adapters that are off, because they are merged into the weights, must stay off until the module is restored. Hidden
    states between layers (`output_hidden_states`) are not computed.
    """
    family, layers = families.find_layers(module) if keep else (None, [])
    prepared: list[nn.Module] = []
    with ExitStack() as undo, torch.no_grad():
        if family:
            parts = _read_all(family, layers)
            if isinstance(parts, str):
                _report(type(module).__name__, parts)
            else:
                stack = _Stack(family, layers, parts)
                for number, layer in enumerate(layers):
                    packed.put(layer, partial(stack.forward, number), undo)
                prepared += layers
                if (output := _output_of(module)) is not None:
                    packed.put(output, _Output(output), undo)
                    prepared.append(output)
                logger.debug("%s: decode.c computes its %d layers", type(module).__name__, len(layers))
        elif keep and hasattr(module, "generate"):
            _report(type(module).__name__, "`rlhf accelerators explain cpu` does not list its architecture")
        undo.callback(packed.prepare(module, keep, apart=prepared))
        return undo.pop_all().close


@functools.cache
def _report(model: str, obstacle: str) -> None:
    """Say, once for each model and reason, that rollouts do not use `decode.c`."""
    logger.warning("%s: rollouts take longer, since decoder layers are not computed in C: %s", model, obstacle)


def _read_all(family: Family, layers: Sequence[Any]) -> list[Parts] | str:
    """Return the parts of decoder layers, or why `decode.c` cannot compute them."""
    read: list[Parts] = []
    for layer in layers:
        parts = families.read(family, layer)
        reason = parts if isinstance(parts, str) else _size_obstacle(parts)
        if reason or isinstance(parts, str):
            return reason
        read.append(parts)
    attentions = [layer.get_submodule(family.attention) for layer in layers]
    if [attention.layer_idx for attention in attentions] != list(range(len(layers))):
        return "they are not the layers of one model in order"
    configured = getattr(attentions[0], "config", None)
    if configured is not None and configured.num_hidden_layers < len(layers):
        return "the model skips some of them"
    if len({(parts.size, *map(len, parts.weights["qkv"])) for parts in read}) > 1:
        return "their heads differ"
    return read


def _size_obstacle(parts: Parts) -> str:
    """Return why numbers or sizes do not suit `decode.c`; "" if they do."""
    weights = [weight for product in parts.weights.values() for weight in product]
    tensors = [*weights, *(bias for product in parts.biases.values() for bias in product)]
    tensors += [] if parts.router is None else [parts.router.weight]
    tensors += [weight for norm in parts.norms.values() for weight in norm.parameters()]
    dtype = weights[0].dtype
    if dtype not in DTYPES:
        return f"its numbers are {str(dtype).removeprefix('torch.')}"
    if any(tensor.dtype != dtype for tensor in tensors):
        return "its numbers are of several dtypes"
    if parts.size % _numbers_at_once(dtype) or not all(map(_fits_panels, weights)):
        return f"a size is no multiple of {_numbers_at_once(dtype)}"
    return ""


def _numbers_at_once(dtype: torch.dtype) -> int:
    """Return how many numbers a register has."""
    return int(_functions(dtype).lanes() * torch.float32.itemsize // dtype.itemsize)


def _fits_panels(weight: Tensor) -> bool:
    outputs, inputs = weight.shape
    return bool(outputs % _functions(weight.dtype).lanes() == inputs % _numbers_at_once(weight.dtype) == 0)


def _output_of(module: Any) -> nn.Module | None:
    """Return the output layer if `decode.c` can compute it."""
    layer = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    layer = families.computing(layer)
    if layer is None or families.linear_obstacle(layer) or layer.weight.dtype not in DTYPES:
        return None
    return cast(nn.Module, layer) if _fits_panels(families.weight_of(layer)) else None


def _is_computed_in_c(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Return whether numbers have this dtype and need no gradient, and the order of sums does not matter."""
    return hidden.dtype == dtype and not (
        torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or invariant.is_active()
    )


def _in_blocks(rows: int, functions: ctypes.CDLL) -> int:
    """Return rows, rounded up to those of whole blocks."""
    block: int = functions.rows_at_once()
    return -(-rows // block) * block


class _Packed:
    """Weights of layers that read the same input, in the order of decode.c, and their bias.

    Args:
        weights: matrices [outputs, inputs]; those of experts follow each other.
        biases: as many, or none.
        experts: number of experts.
        interleaved: panels of an expert's matrices alternate.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor], experts: int = 1, interleaved: bool = False
    ) -> None:
        dtype, inputs, count = weights[0].dtype, weights[0].shape[1], len(weights) // experts
        functions, self.outputs, self.inputs = _functions(dtype), sum(map(len, weights[:count])), inputs
        self.weight = torch.empty(experts, self.outputs, inputs, dtype=dtype)
        lanes, panel = functions.lanes(), 0
        for number, weight in enumerate(weights):
            expert, number = divmod(number, count)
            panel = 0 if number == 0 else panel
            first, step = (number, count) if interleaved else (panel, 1)
            weight, packed = weight.contiguous(), self.weight[expert]
            functions.pack(weight.data_ptr(), len(weight), inputs, packed.data_ptr(), self.outputs, first, step)
            panel += len(weight) // lanes
        self.bias: Tensor | None = None
        if biases:
            rows = [bias.detach().view(-1, lanes) for bias in biases]
            self.bias = (torch.stack(rows, 1) if interleaved else torch.cat(rows)).flatten()

    def structure(self) -> _Linear:
        """Return it in the form of decode.c, which has pointers only."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return _Linear(self.weight.data_ptr(), bias, self.inputs, self.outputs)


class _Stack:
    """The forward passes of decoder layers with packed weights.

    Layers that see the same columns at the same positions are one run: the first of a run computes all, the others
    return its result.
    """

    def __init__(self, family: Family, layers: Sequence[Any], parts: Sequence[Parts]) -> None:
        self._family, self._modules, self._plain = family, layers, [layer.forward for layer in layers]
        self._signature = inspect.signature(type(layers[0]).forward)
        self._needed = [name for name in _NEEDED if name in self._signature.parameters]
        self._dtype = parts[0].weights["out"][0].dtype
        self._functions = _functions(self._dtype)
        self._packed: list[_Packed] = []
        self._layers = (_Layer * len(layers))(*map(self._read, parts))
        windows = [part.window for part in parts]
        starts = [index for index in range(len(parts)) if index == 0 or windows[index] != windows[index - 1]]
        self._ends = dict(zip(starts, [*starts[1:], len(parts)]))
        self._rotates = [part.rotates for part in parts]
        first = self._layers[0]
        self._size, self._heads, self._groups, self._hidden = first.size, first.heads, first.groups, first.qkv.inputs
        self._inner = max(layer.down.inputs for layer in self._layers)
        self._experts = max(layer.router.experts for layer in self._layers)
        self._kept: list[Tensor] = []
        self._known = False
        self._passed: Tensor | None = None

    def _read(self, parts: Parts) -> _Layer:
        """Return a layer in the form of decode.c, with packed weights."""
        experts = 1 if parts.router is None else len(parts.router.weight)
        gated, (queries, keys, _) = len(parts.weights["up"]) > experts, parts.weights["qkv"]
        made = {}
        for product, weights in parts.weights.items():
            of_experts = experts if product in ("up", "down") else 1
            made[product] = _Packed(weights, parts.biases[product], of_experts, gated and product == "up")
        self._packed += made.values()
        return _Layer(
            heads=len(queries) // parts.size,
            groups=len(keys) // parts.size,
            size=parts.size,
            activation=parts.activation,
            gated=gated,
            parallel=parts.parallel,
            scale=parts.scale,
            cap=parts.cap,
            router=self._router(parts.router),
            **{name: self._norm(norm) for name, norm in parts.norms.items()},
            **{name: linear.structure() for name, linear in made.items()},
        )

    def _norm(self, norm: Any) -> _Norm:
        centered = isinstance(norm, nn.LayerNorm)
        bias = norm.bias if centered else None
        epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        shift = 0 if centered else self._family.shift
        return _Norm(norm.weight.data_ptr(), None if bias is None else bias.data_ptr(), epsilon, shift, centered)

    def _router(self, router: Any) -> _Router:
        if router is None:
            return _Router()
        scaled = getattr(router, "norm_topk_prob", True)  # Mixtral's always
        return _Router(router.weight.data_ptr(), len(router.weight), router.top_k, scaled)

    def forward(self, number: int, hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        """Return the output of layer `number`: hidden states [B, T, hidden] -> [B, T, hidden]."""
        passed, self._passed = self._passed, None
        if number in self._ends:
            output = self._computed(number, hidden_states, *others, **named)
        else:
            output = passed if hidden_states is passed else None
        if output is None:
            return self._plain[number](hidden_states, *others, **named)
        if number + 1 not in self._ends and number + 1 < len(self._plain):
            self._passed = output
        return (output, None) if self._family.returns_tuple else output

    def _computed(self, start: int, hidden: Tensor, *others: Any, **named: Any) -> Tensor | None:
        """Return the output of the last layer of a run; None if this is no step with a known cache and masks."""
        rows, tokens = hidden.shape[:2]
        if not _is_computed_in_c(hidden, self._dtype) or (
            tokens > 1 and tokens * rows > MOST and self._functions.amx()
        ):
            return None
        if others:
            named = dict(self._signature.bind(self._modules[start], hidden, *others, **named).arguments, **named)
        cache = next((named[name] for name in _CACHES if named.get(name) is not None), None)
        decode_buffers = getattr(cache, "decode_buffers", None)
        if (
            decode_buffers is None
            or any(named.get(name) is not None and named[name] is not False for name in _UNUSUAL)
            or any(named.get(name) is None for name in self._needed)
            or any(module._forward_hooks or module._forward_pre_hooks for module in self._modules)
        ):
            return None
        positions = self._positions(start, named.get("position_embeddings"), rows, tokens)
        kept, place = decode_buffers(self._groups, self._size, self._dtype) or ([], 0)
        if not kept:
            return None
        if not self._fits(kept, rows):
            _report(type(self._modules[0]).__name__, "its cache is of an unknown form")
            return None
        columns = kept[0].shape[2]
        if not 0 <= place <= columns - tokens:
            return None
        masks = self._masks(named.get("attention_mask"), named.get("alibi"), rows, tokens, columns)
        if positions is None or isinstance(masks, str):
            _report(type(self._modules[0]).__name__, "its masks or positions are of an unknown form")
            return None
        return self._run(start, hidden.contiguous(), positions, masks, place)

    def _positions(self, start: int, given: Any, rows: int, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Return cosine and sine [B, T, rotary], and write their size into the layers; None if they are unknown."""
        rotary = 0 if given is None else given[0].shape[-1]
        if rotary > self._size or rotary % 2 or (given is not None and given[0].dtype != self._dtype):
            return None
        for number in range(start, self._ends[start]):
            self._layers[number].rotary = rotary if self._rotates[number] else 0
        if given is None:
            given = (torch.empty(0, dtype=self._dtype),) * 2
        cosine, sine = (part.expand(rows, tokens, rotary).contiguous() if rotary else part for part in given)
        return cosine, sine

    def _masks(
        self, mask: Tensor | None, alibi: Tensor | None, rows: int, tokens: int, columns: int
    ) -> Tensor | str | None:
        """Return the mask to add, [B, T, 1 or H, columns]; None for all columns up to a token's own; "" if unknown."""
        if mask is not None:
            if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-1] != columns:
                return ""
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, -torch.inf)
            if mask.dtype != self._dtype:
                return ""
            mask = mask.expand(rows, 1, tokens, columns).transpose(1, 2)
        if alibi is not None:
            added = alibi.view(rows, self._heads, -1, columns).transpose(1, 2)
            mask = added.expand(rows, tokens, -1, -1) if mask is None else added + mask
            mask = mask.to(self._dtype)
        return None if mask is None else mask.contiguous()

    def _run(
        self, start: int, hidden: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None, place: int
    ) -> Tensor:
        """Compute the layers of a run, for as many prompts at a time as `MOST` admits; single tokens all together."""
        rows, tokens, _ = hidden.shape
        output, first, end = torch.empty_like(hidden), self._kept[0], self._ends[start]
        at_once = max(1, MOST // tokens if tokens > 1 else rows)
        most = _in_blocks(min(rows, at_once) * tokens, self._functions)
        width, columns = self._heads * self._size, first.shape[2]
        sizes = width + 2 * self._groups * self._size, self._hidden, max(width, self._hidden), self._inner, self._hidden
        qkv, sums, heads, inner, inputs = (hidden.new_empty(most * size) for size in sizes)
        threads = torch.get_num_threads()
        room = columns + self._functions.lanes()
        scores = torch.empty(threads, self._functions.heads_at_once(), room, dtype=torch.float32)
        shares = torch.empty(self._experts, most, dtype=torch.float32)
        order = torch.empty(threads, most if self._experts else 0, dtype=torch.int64)
        kept = ctypes.byref(self._pointers, 2 * start * ctypes.sizeof(_pointer))
        for row in range(0, rows, at_once):
            part = slice(row, row + at_once)
            step = _Step(
                layers=ctypes.addressof(self._layers[start]),
                count=end - start,
                rows=len(hidden[part]) * tokens,
                tokens=tokens,
                hidden=hidden[part].data_ptr(),
                cosine=positions[0][part].data_ptr(),
                sine=positions[1][part].data_ptr(),
                mask=None if mask is None else mask[part].data_ptr(),
                mask_heads=1 if mask is None else mask.shape[2],
                kept=ctypes.cast(kept, _pointer),
                first=row,
                row_stride=first.stride(0),
                group_stride=first.stride(1),
                place=place,
                columns=columns,
                to=output[part].data_ptr(),
                qkv=qkv.data_ptr(),
                sum=sums.data_ptr(),
                heads=heads.data_ptr(),
                inner=inner.data_ptr(),
                inputs=inputs.data_ptr(),
                scores=scores.data_ptr(),
                shares=shares.data_ptr(),
                order=order.data_ptr(),
            )
            self._functions.decode(ctypes.byref(step))
        return output

    def _fits(self, kept: list[Tensor], rows: int) -> bool:
        """Return whether `decode.c` can write to the tensors of a cache."""
        if kept is not self._kept:
            first = kept[0]
            shape = first.shape[0], self._groups, first.shape[2], self._size
            self._known = len(kept) == 2 * len(self._layers) and all(
                (tensor.dtype, tensor.shape, tensor.stride()) == (self._dtype, shape, first.stride()) for tensor in kept
            )
            self._known &= first.stride()[2:] == (self._size, 1)
            self._kept, self._pointers = kept, (_pointer * len(kept))(*(tensor.data_ptr() for tensor in kept))
        return self._known and len(kept[0]) == rows


class _Output:
    """The forward pass of an output layer with packed weights."""

    def __init__(self, layer: Any) -> None:
        self._plain = layer.forward
        self._packed = _Packed([families.weight_of(layer)], [] if layer.bias is None else [layer.bias])
        self._linear, self._dtype = self._packed.structure(), self._packed.weight.dtype

    def __call__(self, input: Tensor) -> Tensor:
        rows = input.numel() // self._packed.inputs
        if rows > MOST or not _is_computed_in_c(input, self._dtype):
            plain: Tensor = self._plain(input)
            return plain
        input = input.contiguous()
        output = input.new_empty(*input.shape[:-1], self._packed.outputs)
        functions = _functions(self._dtype)
        blocks = input.new_empty(_in_blocks(rows, functions) * self._packed.inputs)
        functions.linear(ctypes.byref(self._linear), input.data_ptr(), rows, output.data_ptr(), blocks.data_ptr())
        return output


@functools.cache
def supported(accelerator: object) -> Support:
    """Test that a compiler is installed, and that a product is right in each dtype."""
    if reason := compiler.why_not(_functions, "generation takes about twice as long", DTYPES):
        return Support(False, reason)
    for dtype in DTYPES:
        weight = torch.linspace(-1, 1, 48 * 64).sin().view(48, 64).to(dtype)
        layer = nn.utils.skip_init(nn.Linear, 64, 48, bias=False, dtype=dtype)  # draws no random numbers
        inputs = torch.linspace(1, -1, 21 * 64).cos().view(21, 64).to(dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
            product = _Output(layer)(inputs)
        exact = inputs.double() @ weight.double().T
        error = 0.01 if dtype == torch.bfloat16 else 1e-5
        if not torch.allclose(product.double(), exact, rtol=0, atol=error * exact.abs().max().item()):
            return Support(False, f"the compiled products of {dtype} are wrong here")
    if not (onednn := packed.supported(accelerator)):
        return onednn
    names = ", ".join(sorted(families.FAMILIES))
    return Support(True, f"decoder layers in one call, of {names}; all else packed for oneDNN")


DECODE = KernelImpl(
    operation="inference_weights",
    name="native",
    factory=lambda accelerator: prepare,
    supported=supported,
    priority=20,
)
