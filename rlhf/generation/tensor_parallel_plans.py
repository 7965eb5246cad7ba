"""How the layers of each architecture are split among ranks: transformers' own plans, and those that it lacks.

A plan names modules of the base model, `*` for the number of a layer, and says for each how it is split. What it does
not name is whole on every rank and computes the same there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import nn

Style = Literal["columns", "columns, gathered", "rows", "rows, of a whole input", "whole"]
"""`columns`: a rank computes its part of the outputs (gathered: and gets those of the others). `rows`: from a part of
the inputs, its summand of all outputs."""

# transformers' words (5.23, `transformers.distributed.tensor_parallel`); with _rep: of earlier versions.
_STYLES: Mapping[str, Style] = {
    "colwise": "columns",
    "colwise_gather_output": "columns, gathered",
    "colwise_rep": "columns, gathered",
    "rowwise": "rows",
    "rowwise_split_input": "rows, of a whole input",
    "rowwise_rep": "rows, of a whole input",
    "replicated_with_grad_allreduce": "whole",
}
_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")


class Family(NamedTuple):
    """What an architecture needs that transformers has no plan for.

    `counted`: attributes of the attention modules that count heads; `adapt` (model, position, ranks) sees to the rest.
    """

    plan: Mapping[str, str]
    counted: tuple[str, ...] = ()
    adapt: Callable[[Any, int, int], None] = lambda model, position, ranks: None


def _own_slopes(model: Any, position: int, ranks: int) -> None:
    """BLOOM draws attention to near tokens with a slope of each head's own; a rank needs those of its heads."""
    heads = model.config.num_attention_heads

    def own(block: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        slopes = options["alibi"]  # [B * heads, 1, S]
        part = slopes.unflatten(0, (-1, heads)).chunk(ranks, 1)[position].flatten(0, 1)
        return inputs, options | {"alibi": part}

    for block in model.base_model.h:
        block.register_forward_pre_hook(own, with_kwargs=True)
    for module in model.modules():
        if hasattr(module, "slow_but_exact"):  # adds up parts of a weight that is a part itself
            module.slow_but_exact = False


_FAMILIES: Mapping[str, Family] = {
    "opt": Family(
        {
            "decoder.layers.*.self_attn.q_proj": "colwise",
            "decoder.layers.*.self_attn.k_proj": "colwise",
            "decoder.layers.*.self_attn.v_proj": "colwise",
            "decoder.layers.*.self_attn.out_proj": "rowwise",
            "decoder.layers.*.fc1": "colwise",
            "decoder.layers.*.fc2": "rowwise",
        },
        counted=("num_heads",),
    ),
    # Queries, keys and values lie together, head by head, so that a part of the outputs is a part of the heads.
    "bloom": Family(
        {
            "h.*.self_attention.query_key_value": "colwise",
            "h.*.self_attention.dense": "rowwise",
            "h.*.mlp.dense_h_to_4h": "colwise",
            "h.*.mlp.dense_4h_to_h": "rowwise",
        },
        counted=("num_heads",),
        adapt=_own_slopes,
    ),
    "gpt_neox": Family(
        {
            "layers.*.attention.query_key_value": "colwise",
            "layers.*.attention.dense": "rowwise",
            "layers.*.mlp.dense_h_to_4h": "colwise",
            "layers.*.mlp.dense_4h_to_h": "rowwise",
        }
    ),
}


def why_not(model: Any, ranks: int) -> str:
    """Why a causal language model cannot be split among `ranks`; empty where it can. Its weights are not read."""
    config, kind = model.config, model.config.model_type
    plan = _plan(config)
    if not plan:
        return f"there is no plan for splitting the layers of {kind}"
    if unknown := sorted(set(plan.values()) - set(_STYLES)):
        return f"{kind} has layers that rlhf cannot split ({', '.join(unknown)})"
    if any(key.rpartition(".")[2] in _HEADS and _STYLES[style] == "columns" for key, style in plan.items()):
        heads = config.num_attention_heads
        for count, what in ((heads, "heads"), (getattr(config, "num_key_value_heads", None) or heads, "key heads")):
            if count % ranks:
                return f"{count} {what} cannot be shared among {ranks} ranks"
    for path, style in styles(model).items():
        layer = model.get_submodule(path)
        width = layer.out_features if style.startswith("columns") else getattr(layer, "in_features", 0)
        if style != "whole" and width % ranks:
            return f"{path} has {width} features, which cannot be shared among {ranks} ranks"
    return ""


def styles(model: Any) -> dict[str, Style]:
    """How each module that the model's plan names is split, by its path in the whole model."""
    plan, base = _plan(model.config), model.base_model
    prefix = next(path for path, module in model.named_modules() if module is base)
    found = {}
    for path, module in base.named_modules():
        name = re.sub(r"\.\d+(?=\.|$)", ".*", path)
        if name in plan:
            assert isinstance(module, nn.Module)
            found[f"{prefix}.{path}" if prefix else path] = _STYLES[plan[name]]
    return found


def adapt(model: Any, position: int, ranks: int) -> None:
    """Tell a split model's modules how many heads are theirs, where they count them."""
    family = _FAMILIES.get(model.config.model_type)
    if family is None:
        return
    for path in styles(model):
        attention = model.get_submodule(path.rpartition(".")[0])
        if path.rpartition(".")[2] in ("q_proj", "query_key_value"):
            for name in family.counted:
                setattr(attention, name, getattr(attention, name) // ranks)
    family.adapt(model, position, ranks)


def _plan(config: Any) -> Mapping[str, str]:
    family = _FAMILIES.get(config.model_type)
    return family.plan if family else getattr(config, "base_model_tp_plan", None) or {}
