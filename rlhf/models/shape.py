"""Shapes of models, read from transformers' model on torch's meta device, and the arithmetic of passes over texts.

`shape_of` takes a folder or a known name (`known.yaml`), `shape_from` the values of a config.json; both return a
`Shape`, from which memory and time are computed. Only the configuration is read: a model on the meta device has no
weights.

FLOPs are counted as for the model FLOPs utilization of arXiv:2204.02311, appendix B: a product takes two for each
number of its matrix and token (arXiv:2001.08361, section 2.1), attention 4 x T x S x width for T queries that each meet
S keys, backward twice the FLOPs of forward. Work of an implementation beyond that is not counted: padding, layers
that gradient checkpointing recomputes, norms and activations, sampling, the optimizer. The half of T x T pairs that a
causal mask hides is counted, as in the published figures.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.config.loader import parse_yaml
from rlhf.errors import ConfigError
from rlhf.models.compatibility import check_layers
from rlhf.models.hub import summarize_error

_KNOWN = Path(__file__).parent / "known.yaml"

EMBEDDED = {
    "model_type": "llama",
    "vocab_size": 784,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "tie_word_embeddings": True,
}
"""The embedded Llama (`rlhf.models.loading`), with the vocabulary of the embedded world's tokenizer."""


class LinearShape(NamedTuple):
    """The shape of a linear layer: `inputs` to `outputs` numbers a token."""

    inputs: int
    outputs: int
    bias: bool = False

    @property
    def numbers(self) -> int:
        """The number of elements in its matrix and its bias."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only language model whose layers are alike.

    Attributes:
        intermediate: width of the feed-forward part.
        embedding: width of the token embeddings.
        tied: the token embedding is the output embedding too.
        head: numbers of the output layer that are not the token embedding's.
        linears: linear layers of one decoder layer.
        norms: all other numbers of one decoder layer.
        outside: numbers outside of decoder layers and embeddings: final norm, learned positions, projections.
        gated: the feed-forward part multiplies its first matrix's result with a gate.
        rms: norms have gains only, and compute in float32.
        saved_ffn: tensors of the feed-forward part's width that a layer keeps for the backward pass.
        norm_gains: numbers of all norms that are no biases.
        norm_biases: biases of all norms.
        biases: biases of other modules, except the output layer's.
        head_bias: bias of the output layer.
        plain_logits: logits are exactly the output embedding's product, neither scaled nor capped.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    embedding: int
    tied: bool
    head: int
    linears: tuple[LinearShape, ...]
    norms: int
    outside: int
    gated: bool
    rms: bool
    saved_ffn: int
    norm_gains: int
    norm_biases: int
    biases: int
    head_bias: int
    plain_logits: bool

    @property
    def layer(self) -> int:
        """Numbers in one layer."""
        return sum(linear.numbers for linear in self.linears) + self.norms

    @property
    def tokens(self) -> int:
        """Numbers in the token embeddings."""
        return self.vocabulary * self.embedding

    def parameters(self, *, scalar_head: bool = False) -> int:
        """Return all numbers, of the language model or with a scalar head in place of the output embedding."""
        return self.tokens + self.outside + self.layers * self.layer + (self.embedding if scalar_head else self.head)

    @property
    def in_linears(self) -> int:
        """Numbers in the matrices of all layers: those that may be quantized, and that adapters are merged into."""
        return self.layers * sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def largest(self) -> int:
        """Numbers in the largest parameter."""
        return max(self.tokens, *(linear.inputs * linear.outputs for linear in self.linears))

    def adapters(self, rank: int) -> int:
        """Return the numbers in LoRA adapters of `rank` on every linear layer but the output embedding."""
        per_layer = rank * sum(linear.inputs + linear.outputs for linear in self.linears)
        projections = 2 * rank * (self.hidden + self.embedding) if self.embedding != self.hidden else 0
        return self.layers * per_layer + projections

    def parts(self, names: Collection[str], *, scalar_head: bool = False) -> int:
        """Return the numbers in the parts that `lora.also_train` names, of a model as in `parameters`."""
        head, head_bias = (0, 0) if scalar_head else (self.head, self.head_bias)
        size = self.tokens + head if "embeddings" in names else 0
        size += self.norm_gains + self.norm_biases if "norms" in names else 0
        if "biases" in names:
            size += self.biases + (0 if "norms" in names else self.norm_biases)
            size += 0 if "embeddings" in names else head_bias
        return size

    def rounded(self, multiple: int) -> Shape:
        """Return the shape with the rows of its embeddings rounded up to a multiple (`model.vocabulary_multiple`)."""
        rows = round_up(self.vocabulary, multiple)
        head, bias = (numbers // self.vocabulary * rows for numbers in (self.head, self.head_bias))
        return replace(self, vocabulary=rows, head=head, head_bias=bias)

    @property
    def cached(self) -> int:
        """Elements of the key-value cache per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def round_up(rows: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `rows`."""
    return -(-rows // multiple) * multiple


def shape_of(model: str) -> Shape:
    """Return the shape of the model in a folder, or of a known name.

    Raises:
        ConfigError: the folder's config.json cannot be read, `shape_from` does not understand it, or there is neither a
            folder nor a known model of this name.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        try:
            values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{model}: its config.json cannot be read ({reason}); name a folder that holds a model, or a known name"
            ) from error
        return shape_from(values, model)
    known = _known_models()
    name = model.rpartition("/")[2].lower()
    for ending in ("-hf", "-v0.1", "-v0.3"):
        name = name.removesuffix(ending)
    if name in known:
        return shape_from(known[name], name)
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"name a folder with a config.json, or one of {', '.join(known)}"
    raise ConfigError(f"{model}: not a folder, and no known model has this name; {remedy}")


@cache
def _known_models() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = parse_yaml(_KNOWN.read_text(encoding="utf-8"))
    return known


def shape_from(values: Mapping[str, Any], name: str) -> Shape:
    """Return the shape of the model that the values of a config.json describe.

    Args:
        name: names the model in messages.

    Raises:
        ConfigError: transformers has no such language model, or it is not a plain decoder, but has layers that differ,
            experts or recurrent layers.
    """
    return _shape(json.dumps(dict(values), sort_keys=True, default=str), name)


@cache
def _shape(values: str, name: str) -> Shape:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from rlhf.models.forward import can_be_fused

    model, config = _build_on_meta(json.loads(values), name)
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    layers: Any = next((part for part in lists if len(part) == config.num_hidden_layers), None)
    if layers is None or len({tuple(weight.shape for weight in layer.parameters()) for layer in layers}) > 1:
        raise ConfigError(f"{name}: layers of {config.model_type} differ from each other; no plan can be made for it")
    modules = list(layers[0].named_modules())
    matrices = {path: part for path, part in modules if isinstance(part, nn.Linear | Conv1D)}
    linears = {path: _linear_shape(part, isinstance(part, Conv1D)) for path, part in matrices.items()}
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    # Queries, keys and values are one matrix or three; the projection behind attention has `hidden` outputs.
    attention = sum(shape.outputs for path, shape in linears.items() if "att" in path) - hidden
    kv_heads, odd_keys = divmod(attention - heads * head_dim, 2 * head_dim)
    *widening, narrowing = [shape for path, shape in linears.items() if "att" not in path] or [LinearShape(0, 0)]
    width = narrowing.inputs
    widenings, odd_width = divmod(sum(shape.outputs for shape in widening), width or 1)  # two with a gate
    other = [weight for path, part in modules if path not in matrices for weight in part.parameters(recurse=False)]
    if kv_heads < 1 or odd_keys or odd_width or widenings not in (1, 2) or any(weight.dim() > 1 for weight in other):
        raise ConfigError(
            f"{name}: layers of {config.model_type} have other parts than attention and one feed-forward part; "
            "no plan can be made for it"
        )
    tokens, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = sum(weight.numel() for weight in output.parameters() if weight is not tokens)
    in_layer = sum(weight.numel() for weight in layers[0].parameters())
    everything = sum(weight.numel() for weight in model.parameters())
    kinds = {type(part).__name__ for _, part in modules}
    norms = [part for part in model.modules() if "Norm" in type(part).__name__]
    in_norms = sum(weight.numel() for norm in norms for weight in norm.parameters(recurse=False))
    norm_biases = sum(norm.bias.numel() for norm in norms if getattr(norm, "bias", None) is not None)
    named = [weight for name, weight in model.named_parameters() if name.rpartition(".")[2] == "bias"]
    head_bias = output.bias.numel() if getattr(output, "bias", None) is not None else 0
    return Shape(
        name=name,
        hidden=hidden,
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=width,
        vocabulary=tokens.shape[0],
        embedding=tokens.shape[1],
        tied=output.weight is tokens,
        head=head,
        linears=tuple(linears.values()),
        norms=in_layer - sum(shape.numbers for shape in linears.values()),
        outside=everything - head - tokens.numel() - len(layers) * in_layer,
        gated=widenings == 2,
        rms="LayerNorm" not in kinds,
        # ReLU keeps only its result, GELU also its input, and GELU in Python the inputs of each operation.
        saved_ffn=(1 if "ReLU" in kinds else 6 if "NewGELUActivation" in kinds else 2) + (2 if widenings == 2 else 0),
        norm_gains=in_norms - norm_biases,
        norm_biases=norm_biases,
        biases=sum(weight.numel() for weight in named) - norm_biases - head_bias,
        head_bias=head_bias,
        plain_logits=can_be_fused(model),
    )


def _build_on_meta(values: dict[str, Any], name: str) -> tuple[Any, Any]:
    """Return the language model that a config.json describes, without weights, and its configuration."""
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    values = values.get("text_config") or values
    kind = str(values.get("model_type"))
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{name}: transformers has no language model of type {kind!r}; no plan can be made for it")
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
        check_layers(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config), config
    except Exception as error:
        raise ConfigError(
            f"{name}: its config.json describes no model ({summarize_error(error)}); correct it"
        ) from error


def _linear_shape(part: Any, transposed: bool) -> LinearShape:
    inputs, outputs = part.weight.shape if transposed else reversed(part.weight.shape)
    return LinearShape(inputs, outputs, part.bias is not None)


class TextLengths(NamedTuple):
    """Sums over the lengths T of a set of texts, real tokens only.

    `tokens` is the sum of T, `pairs` of T x S queries and keys that meet in attention, `outputs` of positions that an
    output is computed at.
    """

    tokens: float
    pairs: float
    outputs: float

    @classmethod
    def of(cls, lengths: Iterable[int], outputs: float) -> TextLengths:
        """Return the sums of whole texts of these lengths."""
        known = list(lengths)
        return cls(sum(known), sum(length**2 for length in known), outputs)


@dataclass(frozen=True)
class ModelFlops:
    """Counter of a model's FLOPs.

    Attributes:
        matrices: numbers in the matrices of all layers.
        width: layers x heads x the width of a head.
        output: numbers in the output embedding, or in the scalar head.
        adapters: numbers in LoRA adapters; 0: all weights are trained, if any are.
        head_trained: a scalar head is trained, with adapters too.
    """

    matrices: int
    width: int
    output: int
    adapters: int = 0
    head_trained: bool = False

    @classmethod
    def of(cls, shape: Shape, *, scalar_head: bool = False, rank: int = 0) -> ModelFlops:
        """Return the counter of a model of this shape, with adapters of this rank."""
        projections = 0 if shape.embedding == shape.hidden else 2 * shape.hidden * shape.embedding
        return cls(
            shape.in_linears + projections,
            shape.layers * shape.heads * shape.head_dim,
            shape.embedding if scalar_head else shape.tokens,
            shape.adapters(rank) if rank else 0,
            scalar_head,
        )

    def forward(self, texts: TextLengths) -> float:
        """Return the FLOPs of a forward pass."""
        return self._layers(texts) + 2 * self.adapters * texts.tokens + 4 * self.width * texts.pairs + self._head(texts)

    def update(self, texts: TextLengths) -> float:
        """Return the FLOPs of a forward and a backward pass, with gradients of inputs and of trained weights."""
        if not self.adapters:
            return 3 * self.forward(texts)
        frozen = self._layers(texts) + (0 if self.head_trained else self._head(texts))
        return 3 * self.forward(texts) - frozen

    def _layers(self, texts: TextLengths) -> float:
        return 2 * self.matrices * texts.tokens

    def _head(self, texts: TextLengths) -> float:
        return 2 * self.output * texts.outputs


def generation_lengths(rows: float, prompts: TextLengths, whole: TextLengths, copies: int = 1) -> TextLengths:
    """Return the sums of generating `rows` texts with a key-value cache, from their prompts until they are `whole`.

    A prompt is read in one pass, then each sampled token except a text's last, which attends to itself and all tokens
    before it: queries p + 1 ... t - 1 of a text of t tokens with a prompt of p. Each sampled token needs one output.
    A prompt is read once for its `copies` texts, and so is the output before their first token.
    """
    drawn, again = whole.tokens - prompts.tokens, 1 - 1 / copies
    pairs = prompts.pairs + (whole.pairs - whole.tokens - prompts.pairs - prompts.tokens) / 2
    return TextLengths(
        whole.tokens - rows - again * prompts.tokens, pairs - again * prompts.pairs, drawn - again * rows
    )
