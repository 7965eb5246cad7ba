"""Shapes of models: how many numbers they hold and where, from a folder's config.json or from a name that people know.

The values of a configuration flow in; a `Shape` flows out, which memory and time are computed from. Needs no torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf.errors import ConfigError
from rlhf.models.architectures import FAMILIES, Family

_KNOWN = Path(__file__).parent / "known.yaml"


class Linear(NamedTuple):
    """A linear layer: `inputs` to `outputs` numbers a token."""

    inputs: int
    outputs: int
    bias: bool = False

    @property
    def numbers(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Shape:
    """A decoder-only language model.

    `linears` are those of one layer; `norms` the numbers of one layer beside them; `outside` those that are in no
    layer: final norm, learned positions, projections. `embedding` is the width of the token embeddings.
    """

    name: str
    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    embedding: int
    tied: bool
    linears: tuple[Linear, ...]
    norms: int
    outside: int

    @cached_property
    def layer(self) -> int:
        """Numbers in one layer."""
        return sum(linear.numbers for linear in self.linears) + self.norms

    @property
    def tokens(self) -> int:
        """Numbers in the token embeddings."""
        return self.vocabulary * self.embedding

    @property
    def output(self) -> int:
        """Numbers in an output embedding of its own."""
        return 0 if self.tied else self.tokens + (self.vocabulary if self.family.output_bias else 0)

    def parameters(self, *, scalar_head: bool = False) -> int:
        """All numbers: of the language model, or of the same with a scalar head in place of the output embedding."""
        return self.tokens + self.outside + self.layers * self.layer + (self.embedding if scalar_head else self.output)

    @property
    def in_linears(self) -> int:
        """Numbers in the matrices of the layers: what may be quantized, and what adapters are merged into."""
        return self.layers * sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def largest(self) -> int:
        """Numbers in the largest parameter."""
        return max(self.tokens, *(linear.inputs * linear.outputs for linear in self.linears))

    def adapters(self, rank: int) -> int:
        """Numbers in LoRA adapters of `rank` on every linear layer but the output embedding."""
        per_layer = rank * sum(linear.inputs + linear.outputs for linear in self.linears)
        beside = 2 * rank * (self.hidden + self.embedding) if self.embedding != self.hidden else 0
        return self.layers * per_layer + beside

    @property
    def cached(self) -> int:
        """Numbers that the key-value cache holds of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def shape_of(model: str) -> Shape:
    """The shape of the model in a folder, or of one of the known names.

    Raises:
        ConfigError: the folder has no config.json that can be read, its architecture is not in `FAMILIES`, or there is
            neither a folder nor a shape of this name.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        try:
            values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{model}: its config.json cannot be read ({why}); name a folder that holds a model, or a known shape"
            ) from error
        return shape_from(values, model)
    known = _known()
    name = model.rpartition("/")[2].lower()
    for ending in ("-hf", "-v0.1", "-v0.3"):
        name = name.removesuffix(ending)
    if name in known:
        return shape_from(known[name], name)
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"name a folder with a config.json, or one of {', '.join(known)}"
    raise ConfigError(f"{model}: is no folder, and no known shape has this name; {advice}")


@cache
def _known() -> dict[str, dict[str, Any]]:
    """The configurations that are known by name."""
    known: dict[str, dict[str, Any]] = yaml.safe_load(_KNOWN.read_text(encoding="utf-8"))
    return known


def shape_from(values: Mapping[str, Any], name: str) -> Shape:
    """The shape that the values of a config.json describe; see `shape_of`."""
    values = values.get("text_config") or values
    kind = str(values.get("model_type"))
    if kind not in FAMILIES:
        raise ConfigError(
            f"{name}: the plan does not know the shapes of model type {kind!r}; it knows {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]

    def number(*keys: str, default: int | None = None) -> int:
        found = next((values[key] for key in keys if values.get(key) is not None), default)
        if not isinstance(found, int):
            raise ConfigError(f"{name}: its config.json says nothing of {keys[0]}; complete it")
        return found

    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "num_heads", "n_heads")
    kv_heads = family.kv_heads(values, heads)
    head_dim = number("head_dim", default=family.head_dim or hidden // heads)
    intermediate = number(family.wide, default=4 * hidden)
    embedding = number("word_embed_proj_dim", default=hidden)
    queries, keys = heads * head_dim, kv_heads * head_dim
    qkv, out, mlp = family.biases(values)
    attention = (
        [Linear(hidden, queries + 2 * keys, qkv)]
        if family.fused_attention
        else [Linear(hidden, queries, qkv), Linear(hidden, keys, qkv), Linear(hidden, keys, qkv)]
    )
    into = (2 if family.gated else 1) * [Linear(hidden, intermediate, mlp)]
    if family.gated and family.fused_mlp:
        into = [Linear(hidden, 2 * intermediate, mlp)]
    linears = (*attention, Linear(queries, hidden, out), *into, Linear(intermediate, hidden, mlp))
    norm = (1 if family.rms else 2) * hidden
    final = 0 if family.without_final_norm(values) else norm
    outside = final + (norm if family.embedding_norm else 0)
    if family.positions is not None:
        outside += hidden * (number("max_position_embeddings", "n_positions") + family.positions)
    if embedding != hidden:  # projections in and out, of OPT-350m
        outside += 2 * hidden * embedding
    return Shape(
        name,
        family,
        hidden,
        number("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        heads,
        kv_heads,
        head_dim,
        intermediate,
        number("vocab_size"),
        embedding,
        bool(values.get("tie_word_embeddings", family.tied)),
        linears,
        family.norms(values) * norm + family.query_key_norms(values, queries, keys, head_dim),
        outside,
    )
