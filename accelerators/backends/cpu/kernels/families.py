"""Decoder layers of transformers' families as data: which parts `decode.c` multiplies, normalizes and adds.

A family is added by a row of `FAMILIES`, if its layers consist of the parts that `decode.c` knows: attention with
rotary positions, alibi or none, whose key heads may be shared; an MLP with or without a gate, or experts with a router;
norms before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from accelerators.backends.cpu.attention import ATTENTION
from accelerators.backends.cpu.kernels import packed
from accelerators.backends.cpu.kernels.layers import replaced

ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu_new": 1,
    "gelu_fast": 1,
    "gelu_pytorch_tanh": 1,
    "gelu": 2,
    "gelu_python": 2,
    "relu": 3,
}
"""Activations by transformers' names, with the numbers of decode.c."""

STANDARD_ATTENTION = (ATTENTION, "sdpa", "eager")
"""Implementations that compute what decode.c computes."""

_OTHERS = ("torch.nn.", "transformers.activations", "transformers.pytorch_utils")
"""Modules of parts that families share."""

_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"query": "self_attn.q_norm", "key": "self_attn.k_norm"}


@dataclass(frozen=True)
class Family:
    """A decoder layer of a family; parts are paths from the layer.

    Attributes:
        layer: its class in transformers.
        attention: the attention.
        qkv: linear layers of queries, keys and values: three, or one with all.
        by_head: one layer has query, key and value of each head in turn.
        out: linear layer after attention.
        up: linear layers of the MLP's gate and its factor: two, or one with both; or the one before the activation.
        gated: the MLP has a gate.
        down: the MLP's last linear layer.
        norms: norms by their names in decode.c; those that a layer lacks are skipped.
        shift: added to the weights of RMSNorms.
        activation: the activation's name: a key of the configuration, or "=" and the name itself.
        parallel: the attribute that says if the MLP reads the layer's input; "=" if it always does.
        needs: values that attributes must have, by path.
        experts: the module with the weights of experts, `gate_up_proj` and `down_proj`; layers without it have one MLP.
        router: the router.
        returns_tuple: its forward pass returns (hidden states, attention's weights).
    """

    layer: str
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_head: bool = False
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    gated: bool = True
    down: str = "mlp.down_proj"
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    shift: float = 0
    activation: str = "hidden_act"
    parallel: str = ""
    needs: Mapping[str, Any] = field(default_factory=dict)
    experts: str = ""
    router: str = ""
    returns_tuple: bool = False


_BY_HEAD: dict[str, Any] = {"by_head": True, "up": ("mlp.dense_h_to_4h",), "gated": False, "down": "mlp.dense_4h_to_h"}

FAMILIES = {
    "llama": Family("LlamaDecoderLayer"),
    "mistral": Family("MistralDecoderLayer"),
    "qwen2": Family("Qwen2DecoderLayer"),
    "qwen3": Family("Qwen3DecoderLayer", norms=_NORMS | _HEAD_NORMS),
    "mixtral": Family("MixtralDecoderLayer", experts="mlp.experts", router="mlp.gate"),
    "qwen3_moe": Family("Qwen3MoeDecoderLayer", norms=_NORMS | _HEAD_NORMS, experts="mlp.experts", router="mlp.gate"),
    "smollm3": Family("SmolLM3DecoderLayer"),
    "phi3": Family("Phi3DecoderLayer", qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "gemma": Family("GemmaDecoderLayer", shift=1),
    "gemma2": Family("Gemma2DecoderLayer", shift=1, norms=_GEMMA_NORMS, activation="hidden_activation"),
    "gemma3": Family("Gemma3DecoderLayer", shift=1, norms=_GEMMA_NORMS | _HEAD_NORMS, activation="hidden_activation"),
    "stablelm": Family(
        "StableLmDecoderLayer",
        parallel="use_parallel_residual",
        needs={"self_attn.qk_layernorm": False},
    ),
    "starcoder2": Family("Starcoder2DecoderLayer", up=("mlp.c_fc",), gated=False, down="mlp.c_proj"),
    "phi": Family(
        "PhiDecoderLayer",
        out="self_attn.dense",
        up=("mlp.fc1",),
        gated=False,
        down="mlp.fc2",
        norms={"before_attention": "input_layernorm", "before_mlp": "input_layernorm"},
        parallel="=",
        needs={"self_attn.qk_layernorm": False},
    ),
    "gpt2": Family(
        "GPT2Block",
        attention="attn",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        up=("mlp.c_fc",),
        gated=False,
        down="mlp.c_proj",
        norms={"before_attention": "ln_1", "before_mlp": "ln_2"},
        activation="activation_function",
    ),
    "opt": Family(
        "OPTDecoderLayer",
        out="self_attn.out_proj",
        up=("fc1",),
        gated=False,
        down="fc2",
        norms={"before_attention": "self_attn_layer_norm", "before_mlp": "final_layer_norm"},
        activation="activation_function",
        needs={"do_layer_norm_before": True},
    ),
    "gpt_neox": Family(
        "GPTNeoXLayer",
        attention="attention",
        qkv=("attention.query_key_value",),
        out="attention.dense",
        parallel="use_parallel_residual",
        **_BY_HEAD,
    ),
    "bloom": Family(
        "BloomBlock",
        attention="self_attention",
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        activation="=gelu_new",
        needs={"apply_residual_connection_post_layernorm": False},
        returns_tuple=True,
        **_BY_HEAD,
    ),
}
"""Families by transformers' names of their packages."""


def find_layers(module: nn.Module) -> tuple[Family | None, list[Any]]:
    """Return a model's family, and its decoder layers in order; (None, []) if no family is known."""
    for name, family in FAMILIES.items():
        kind = f"transformers.models.{name}.modeling_{name}"
        layers = [
            part for part in module.modules() if type(part).__module__ == kind and type(part).__name__ == family.layer
        ]
        if layers:
            return family, layers
    return None, []


@dataclass(frozen=True)
class Parts:
    """The parts of one layer, as `decode.c` reads them; see `Layer` there.

    Attributes:
        weights: of the products "qkv", "out", "up" and "down", each a matrix [outputs, inputs] or several with the same
            inputs: of queries, keys and values; of the MLP's gate and its factor. Experts have as many matrices each,
            one expert after the other.
        biases: those of each product, as many as its weights or none.
        norms: by their names in decode.c.
        size: numbers in a head.
        scale: of scores.
        cap: the bound of scores; 0 for none.
        rotates: queries and keys are rotated, if the model has rotary positions.
        activation: the number of the MLP's activation in decode.c.
        parallel: the MLP reads the layer's input.
        router: the module that chooses experts; None for one MLP.
        window: what layers with the same masks and positions have in common.
    """

    weights: Mapping[str, tuple[Tensor, ...]]
    biases: Mapping[str, tuple[Tensor, ...]]
    norms: Mapping[str, nn.Module]
    size: int
    scale: float
    cap: float
    rotates: bool
    activation: int
    parallel: bool
    router: Any
    window: Any


def read(family: Family, layer: Any) -> Parts | str:
    """Return the parts of a layer, or why `decode.c` cannot compute it."""
    if reason := _obstacle(family, layer):
        return reason
    attention = layer.get_submodule(family.attention)
    config = getattr(attention, "config", None)
    size: int = getattr(attention, "head_dim", None) or attention.head_size
    weights, biases = {}, {}
    experts = _get(layer, family.experts) if family.experts else None
    for product in ("qkv", "out", "up", "down"):
        if experts is not None and product in ("up", "down"):
            continue
        paths = getattr(family, product)
        linear = [computing(layer.get_submodule(path)) for path in ([paths] if isinstance(paths, str) else paths)]
        if reason := next(filter(None, map(linear_obstacle, linear)), ""):
            return f"a layer is {reason}"
        weights[product] = tuple(map(weight_of, linear))
        biases[product] = tuple(part.bias.detach() for part in linear if part.bias is not None)
        if len(biases[product]) not in (0, len(linear)):
            return "some parts of a product have a bias and others have none"
    if experts is not None:
        up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        weights |= {"up": tuple(half for matrix in up for half in matrix.chunk(2)), "down": tuple(down)}
        biases |= {"up": (), "down": ()}
    for tensors in (weights, biases):
        if len(tensors["qkv"]) == 1:
            tensors["qkv"] = _split(tensors["qkv"][0], family, attention, size)
        if family.gated and len(tensors["up"]) == 1:
            tensors["up"] = tensors["up"][0].chunk(2)
    activation = family.activation.removeprefix("=")
    if activation == family.activation:
        activation = getattr(layer.config if config is None else config, activation)
    if activation not in ACTIVATIONS:
        return f"its activation is {activation}"
    norms = {name: norm for name, path in family.norms.items() if (norm := _get(layer, path)) is not None}
    norms.setdefault("before_mlp", norms["before_attention"])  # StableLM's parallel layers have one norm for both
    return Parts(
        weights=weights,
        biases=biases,
        norms=norms,
        size=size,
        scale=attention.scaling if hasattr(attention, "scaling") else attention.inv_norm_factor,
        cap=getattr(attention, "attn_logit_softcapping", None) or 0,
        rotates=bool(getattr(attention, "use_rope", True)),
        activation=ACTIVATIONS[activation],
        parallel=family.parallel == "=" or bool(family.parallel and getattr(layer, family.parallel)),
        router=None if experts is None else layer.get_submodule(family.router),
        window=(getattr(attention, "sliding_window", None), getattr(attention, "layer_type", None)),
    )


def _obstacle(family: Family, layer: Any) -> str:
    """Return why a layer is not what its family's name says; "" if it is."""
    code = type(layer).__module__
    if any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules()):
        return "a layer or a part of it has hooks"
    for part in _computing_parts(layer):
        kind = type(part).__module__
        if kind != code and not kind.startswith(_OTHERS):
            return f"it has a {type(part).__name__} of another library or class"
        if replaced(part):
            return f"its {type(part).__name__} has another forward pass"
    attention = layer.get_submodule(family.attention)
    if not getattr(attention, "is_causal", True):
        return "its attention looks at later tokens"
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", ATTENTION)
    if implementation not in STANDARD_ATTENTION:
        return f"attention is {implementation}"
    for path, value in family.needs.items():
        if _get(layer, path) != value:
            return f"its {path} is {_get(layer, path)}"
    norms = [norm for path in family.norms.values() if (norm := _get(layer, path)) is not None]
    if any(norm.weight is None for norm in norms):
        return "its norms have no weights"
    return ""


def computing(part: Any) -> Any:
    """Return the module that computes for a part: of one whose adapters of peft are off, its own layer."""
    while getattr(part, "disable_adapters", None) is True:
        part = part.base_layer
    return part


def _computing_parts(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer and the modules below it that compute something."""
    layer = computing(layer)
    yield layer
    for part in layer.children():
        yield from _computing_parts(part)


def weight_of(layer: Any) -> Tensor:
    """Return a weight as [outputs, inputs]."""
    weight: Tensor = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.t()  # GPT-2's Conv1D


def _split(rows: Tensor, family: Family, attention: Any, size: int) -> tuple[Tensor, ...]:
    """Return the rows of queries, keys and values."""
    if family.by_head:
        return tuple(part.flatten(0, 1) for part in rows.unflatten(0, (-1, 3, size)).unbind(1))
    heads = len(rows) // size
    groups = getattr(attention, "num_key_value_heads", heads // 3)
    return tuple(rows.split([(heads - 2 * groups) * size, groups * size, groups * size]))


def _get(layer: Any, path: str) -> Any:
    """Return the attribute at a path; None if there is none."""
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


def linear_obstacle(layer: nn.Module) -> str:
    """Return why the weight of a linear layer cannot be packed; "" if it can."""
    if type(layer).__name__ == "Conv1D":  # of GPT-2
        weight = layer._parameters.get("weight")
        plain = weight is not None and type(weight.data) is Tensor and weight.dim() == 2
        return "" if plain else "without a whole weight"
    return packed.obstacle(layer) if isinstance(layer, nn.Linear) else f"a {type(layer).__name__}"
