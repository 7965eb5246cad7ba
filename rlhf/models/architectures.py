"""What families of models differ in, as data: biases, norms, gates, and what a layer keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One of transformers' model types.

    Args:
        wide: the key of the feed-forward part's width; where it says nothing, that is four times the model's.
        gated: the feed-forward part has a gate beside its first matrix.
        rms: norms have gains alone, and compute in float32.
        kept: how many tensors as wide as the feed-forward part a layer keeps for the backward pass: 1 where the
            activation's result alone is needed (ReLU), 2 with GELU, more where it is written out in Python.
        bias: of query, key and value; of the projection behind attention; of the feed-forward part. A name: the key.
        layer_norms: of one layer; 0: as Falcon's configuration says.
        multi_query: whether all queries share one key where nothing is said; None: another key says how many.
        positions: learned positions, and rows beside those of the configuration.
        query_key: norms of queries and keys: of one head, or of all heads together.
        changes_logits: what the output layer gives is scaled or capped before it is used.
    """

    gated: bool = True
    rms: bool = True
    tied: bool = False
    kept: int = 4
    bias: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    layer_norms: int = 2
    fused_attention: bool = False
    fused_mlp: bool = False
    positions: int | None = None
    embedding_norm: bool = False
    output_bias: bool = False
    query_key: Literal["head", "all"] | None = None
    head_dim: int | None = None
    multi_query: bool | None = None
    wide: str = "intermediate_size"
    changes_logits: bool = False

    def kv_heads(self, values: Values, heads: int) -> int:
        """Heads of keys and values."""
        if self.multi_query is None:
            return int(values.get("num_key_value_heads") or heads)
        if values.get("new_decoder_architecture", False):
            return int(values.get("num_kv_heads") or heads)
        return 1 if values.get("multi_query", self.multi_query) else heads

    def biases(self, values: Values) -> tuple[bool, bool, bool]:
        """Whether query, key and value, the projection behind attention, and the feed-forward part have biases."""
        first, second, third = (bool(values.get(b, False)) if isinstance(b, str) else b for b in self.bias)
        return first, second, third

    def norms(self, values: Values) -> int:
        """Norms in a layer."""
        if self.layer_norms:
            return self.layer_norms
        if values.get("new_decoder_architecture", False):  # Falcon
            return 1 if values.get("num_ln_in_parallel_attn") == 1 else 2
        return 1 if values.get("parallel_attn", True) else 2

    def query_key_norms(self, values: Values, queries: int, keys: int, head_dim: int) -> int:
        """Numbers in a layer's norms of queries and keys."""
        return {None: 0, "head": 2 * head_dim, "all": queries + keys}[self.query_key]

    def without_final_norm(self, values: Values) -> bool:
        """OPT-350m has its norms behind the layers, and none at the end."""
        return values.get("do_layer_norm_before") is False or bool(values.get("_remove_final_layer_norm"))


_ALL = (True, True, True)
_PLAIN: dict[str, Any] = {"gated": False, "rms": False, "kept": 2}
_PYTHON_GELU = 6  # GELU's tanh form, operator by operator

FAMILIES: Mapping[str, Family] = {
    "opt": Family(**_PLAIN | {"kept": 1}, wide="ffn_dim", bias=_ALL, tied=True, positions=2),
    "bloom": Family(**_PLAIN, wide="", bias=_ALL, tied=True, fused_attention=True, embedding_norm=True),
    "gpt2": Family(
        **_PLAIN | {"kept": _PYTHON_GELU}, wide="n_inner", bias=_ALL, tied=True, fused_attention=True, positions=0
    ),
    "gpt_neo": Family(**_PLAIN | {"kept": _PYTHON_GELU}, bias=(False, True, True), tied=True, positions=0),
    "gptj": Family(
        **_PLAIN | {"kept": _PYTHON_GELU}, wide="n_inner", bias=(False, False, True), layer_norms=1, output_bias=True
    ),
    "codegen": Family(
        **_PLAIN | {"kept": _PYTHON_GELU},
        wide="n_inner",
        bias=(False, False, True),
        layer_norms=1,
        output_bias=True,
        fused_attention=True,
    ),
    "gpt_neox": Family(**_PLAIN, bias=_ALL, fused_attention=True),
    "llama": Family(bias=("attention_bias", "attention_bias", "mlp_bias")),
    "mistral": Family(),
    "granite": Family(bias=("attention_bias", "attention_bias", "mlp_bias"), changes_logits=True),
    "smollm3": Family(bias=("attention_bias", "attention_bias", "mlp_bias"), tied=True),
    "qwen2": Family(bias=(True, False, False)),
    "qwen3": Family(bias=("attention_bias", "attention_bias", False), query_key="head"),
    "gemma": Family(tied=True, head_dim=256, bias=("attention_bias", "attention_bias", False)),
    "gemma2": Family(
        tied=True,
        head_dim=256,
        bias=("attention_bias", "attention_bias", False),
        layer_norms=4,
        changes_logits=True,
    ),
    "gemma3_text": Family(
        tied=True,
        head_dim=256,
        bias=("attention_bias", "attention_bias", False),
        layer_norms=4,
        query_key="head",
    ),
    "phi": Family(**_PLAIN | {"kept": _PYTHON_GELU}, bias=_ALL, layer_norms=1, output_bias=True),
    "phi3": Family(fused_attention=True, fused_mlp=True),
    "falcon": Family(
        **_PLAIN,
        wide="ffn_hidden_size",
        bias=("bias", "bias", "bias"),
        tied=True,
        fused_attention=True,
        layer_norms=0,
        multi_query=True,
    ),
    "stablelm": Family(rms=False, bias=("use_qkv_bias", False, False)),
    "starcoder2": Family(**_PLAIN, bias=_ALL, tied=True),
    "gpt_bigcode": Family(
        **_PLAIN, wide="n_inner", bias=_ALL, tied=True, fused_attention=True, positions=0, multi_query=True
    ),
    "olmo2": Family(bias=("attention_bias", "attention_bias", False), query_key="all"),
}
