"""Build a second model for rollouts, of which each rank of a group has a part of every layer.

`split_model` takes a model in training, with whole weights or ZeRO-3's shards, and returns a read-only model of the
same architecture. It is built layer by layer with adapters merged: no rank ever has more than one whole layer, and the
model in training does not change. A plan states how the layers of an architecture are split: transformers has plans,
`_FAMILIES` adds missing ones. A plan names modules of the base model, `*` for the number of a layer. Modules that it
does not name are whole on every rank and compute the same there.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn
from torch.nn import functional

from rlhf.models.lora import compute_adapter_update, compute_merged_weight, is_adapted
from rlhf.models.quantized import unpack_weight

logger = logging.getLogger(__name__)

Style = Literal["columns", "columns, gathered", "rows", "rows, of a whole input", "whole"]
"""`columns`: a rank computes its part of the outputs (gathered: and receives the others). `rows`: a rank computes its
summand of all outputs from its part of the inputs."""

# Names in transformers (5.23, `transformers.distributed.tensor_parallel`); earlier versions have names with _rep.
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


class SplitFamily(NamedTuple):
    """The plan of an architecture for which transformers has none.

    Attributes:
        plan: module name -> style, in transformers' terms.
        head_counts: attributes of the attention modules that count heads.
        adapt: (model, position, ranks) -> None, for everything else.
    """

    plan: Mapping[str, str]
    head_counts: tuple[str, ...] = ()
    adapt: Callable[[Any, int, int], None] = lambda model, position, ranks: None


def _select_slopes(model: Any, position: int, ranks: int) -> None:
    """Give a rank the ALiBi slopes of its heads: BLOOM biases attention by distance, with a slope per head."""
    heads = model.config.num_attention_heads

    def select(block: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        slopes = options["alibi"]  # [B * heads, 1, S]
        part = slopes.unflatten(0, (-1, heads)).chunk(ranks, 1)[position].flatten(0, 1)
        return inputs, options | {"alibi": part}

    for block in model.base_model.h:
        block.register_forward_pre_hook(select, with_kwargs=True)
    for module in model.modules():
        if hasattr(module, "slow_but_exact"):  # it would slice the weight, which is a slice already
            module.slow_but_exact = False


_FAMILIES: Mapping[str, SplitFamily] = {
    "opt": SplitFamily(
        {
            "decoder.layers.*.self_attn.q_proj": "colwise",
            "decoder.layers.*.self_attn.k_proj": "colwise",
            "decoder.layers.*.self_attn.v_proj": "colwise",
            "decoder.layers.*.self_attn.out_proj": "rowwise",
            "decoder.layers.*.fc1": "colwise",
            "decoder.layers.*.fc2": "rowwise",
        },
        head_counts=("num_heads",),
    ),
    # Queries, keys and values are interleaved by head, so that a part of the outputs is a part of the heads.
    "bloom": SplitFamily(
        {
            "h.*.self_attention.query_key_value": "colwise",
            "h.*.self_attention.dense": "rowwise",
            "h.*.mlp.dense_h_to_4h": "colwise",
            "h.*.mlp.dense_4h_to_h": "rowwise",
        },
        head_counts=("num_heads",),
        adapt=_select_slopes,
    ),
    "gpt_neox": SplitFamily(
        {
            "layers.*.attention.query_key_value": "colwise",
            "layers.*.attention.dense": "rowwise",
            "layers.*.mlp.dense_h_to_4h": "colwise",
            "layers.*.mlp.dense_4h_to_h": "rowwise",
        }
    ),
}


def _find_plan_obstacle(model: Any, ranks: int) -> str:
    """Return the reason why the model's plan does not suit `ranks`; empty if it does."""
    config, family = model.config, model.config.model_type
    plan = _plan(config)
    if not plan:
        return f"there is no plan for splitting the layers of {family}"
    if unknown := sorted(set(plan.values()) - set(_STYLES)):
        return f"{family} has layers that rlhf cannot split ({', '.join(unknown)})"
    if any(key.rpartition(".")[2] in _HEADS and _STYLES[style] == "columns" for key, style in plan.items()):
        heads = config.num_attention_heads
        for count, name in ((heads, "heads"), (getattr(config, "num_key_value_heads", None) or heads, "key heads")):
            if count % ranks:
                return f"{count} {name} cannot be divided among {ranks} ranks"
    for path, style in list_styles(model).items():
        layer = model.get_submodule(path)
        width = layer.out_features if style.startswith("columns") else getattr(layer, "in_features", 0)
        if style != "whole" and width % ranks:
            return f"{path} has {width} features, which cannot be divided among {ranks} ranks"
    return ""


def list_styles(model: Any) -> dict[str, Style]:
    """Return the style of each module that the model's plan names, by its path in the whole model."""
    plan, base = _plan(model.config), model.base_model
    prefix = next(path for path, module in model.named_modules() if module is base)
    styles = {}
    for path, module in base.named_modules():
        name = re.sub(r"\.\d+(?=\.|$)", ".*", path)
        if name in plan:
            assert isinstance(module, nn.Module)
            styles[f"{prefix}.{path}" if prefix else path] = _STYLES[plan[name]]
    return styles


def adapt_head_counts(model: Any, position: int, ranks: int) -> None:
    """Set the head counts of a split model's modules to their part, and apply the family's other changes."""
    family = _FAMILIES.get(model.config.model_type)
    if family is None:
        return
    for path in list_styles(model):
        attention = model.get_submodule(path.rpartition(".")[0])
        if path.rpartition(".")[2] in ("q_proj", "query_key_value"):
            for name in family.head_counts:
                setattr(attention, name, getattr(attention, name) // ranks)
    family.adapt(model, position, ranks)


def _plan(config: Any) -> Mapping[str, str]:
    """Return the plan of an architecture; empty if there is none."""
    family = _FAMILIES.get(config.model_type)
    plan = family.plan if family else getattr(config, "base_model_tp_plan", None) or {}
    # Every rank keeps all embeddings. transformers 5.17 adds this entry to each plan, 5.23 to hardly any.
    return {name: style for name, style in plan.items() if name != "embed_tokens"}


class SplitRanks(Protocol):
    """Communication among the ranks that hold the parts of a split layer (a `TensorParallelGroup`)."""

    size: int
    position: int

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over the ranks."""

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor:
        """Concatenate the ranks' tensors along `dimension`."""


class _ShapeOnlyRanks:
    """A stand-in without communication: its results have the right shapes."""

    position = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor:
        """Return as many copies of the tensor as there are ranks."""
        return torch.cat([tensor] * self.size, dimension)


@torch.no_grad()
def find_split_obstacle(model: Any, ranks: int) -> str:
    """Return the reason why a causal language model cannot be split among `ranks`, or ""; no weights are read."""
    if obstacle := _find_plan_obstacle(model, ranks):
        return obstacle
    if _fails(split_model(_outline(model), _ShapeOnlyRanks(ranks))) and not _fails(_outline(model)):
        return f"the layers of {model.config.model_type} do not fit together when they are split"
    return ""


def _fails(outline: Any) -> bool:
    """Return True if the shapes of a model without weights do not fit together, or its code reads values."""
    try:
        # With a cache: without one, transformers 5.23 reads the positions to see if a row holds several sequences
        # (https://github.com/huggingface/transformers/pull/39194).
        outline(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=True)
    except RuntimeError as error:
        logger.debug("%s without weights: %s", type(outline).__name__, error)
        return True
    return False


@torch.no_grad()
def split_model(model: Any, ranks: SplitRanks) -> Any:
    """Return this rank's part of a causal language model of transformers, in evaluation mode.

    At ZeRO-3 this is a collective of all ranks of the run. Embeddings and the projection to the vocabulary are split by
    vocabulary; modules that the plan of the architecture does not name are whole. Buffers are shared with `model`.
    """
    part = _outline(model)
    module_styles: dict[str, Style | str] = {**list_styles(model)}
    paths = {id(module): path for path, module in part.named_modules()}
    if type(embeddings := part.get_input_embeddings()) is nn.Embedding:
        module_styles[paths[id(embeddings)]] = "vocabulary"
    if type(projection := part.get_output_embeddings()) is nn.Linear:
        module_styles[paths[id(projection)]] = "columns, gathered"
    parameters: dict[tuple[int, bool], nn.Parameter] = {}
    for path, module in list(part.named_modules()):
        style = module_styles.get(path, "whole")
        _fill(module, model.get_submodule(path), style, ranks, parameters, model.dtype)
        if style != "whole":
            _connect(part, path, module, style, ranks)
    adapt_head_counts(part, ranks.position, ranks.size)
    return part.eval()


def _outline(model: Any) -> Any:
    """Return a model of the same architecture without weights."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _fill(
    module: Any,
    source: Any,
    style: str,
    ranks: SplitRanks,
    parameters: dict[tuple[int, bool], nn.Parameter],
    dtype: torch.dtype,
) -> None:
    """Set the parameters of a module of the new model, or their parts, and its buffers.

    `parameters` has the parameters made so far, for weights that several modules share; quantized weights become
    `dtype`.
    """
    has_adapter = is_adapted(source)
    base = source.get_base_layer() if has_adapter else source
    module._buffers.update(base._buffers)
    vars(module).update({name: value for name, value in vars(base).items() if isinstance(value, Tensor)})
    with GatheredParameters([*source.parameters(recurse=has_adapter)]):
        for name, parameter in base._parameters.items():
            if parameter is None:
                continue
            is_split = style != "whole" and not (name == "bias" and style.startswith("rows"))
            key = id(parameter), is_split
            if key not in parameters:
                whole, new_dtype = parameter.data, parameter.dtype
                if name == "packed":
                    whole, new_dtype = unpack_weight(base), dtype
                    whole = whole + compute_adapter_update(source) if has_adapter else whole
                elif has_adapter and name == "weight":
                    whole = compute_merged_weight(source)
                part = _slice(whole, 1 if style.startswith("rows") else 0, ranks) if is_split else whole
                parameters[key] = nn.Parameter(part.to(new_dtype, copy=True), requires_grad=False)
            module._parameters["weight" if name == "packed" else name] = parameters[key]


def _slice(whole: Tensor, dimension: int, ranks: SplitRanks) -> Tensor:
    """Return this rank's part along a dimension; all parts have one size, the last ones are padded with zeros."""
    size = -(-whole.shape[dimension] // ranks.size)
    first = min(ranks.position * size, whole.shape[dimension])
    part = whole.narrow(dimension, first, min(size, whole.shape[dimension] - first))
    missing = size - part.shape[dimension]
    return functional.pad(part, [0, 0] * (whole.dim() - 1 - dimension) + [0, missing]) if missing else part


def _connect(part: nn.Module, path: str, module: Any, style: str, ranks: SplitRanks) -> None:
    """Make a split module return the output of the whole one."""
    if style == "vocabulary":
        parent, _, name = path.rpartition(".")
        setattr(part.get_submodule(parent), name, _Embedding(module.weight, ranks))
    elif style == "columns, gathered":
        width = module.out_features
        module.register_forward_hook(lambda _, inputs, output: ranks.all_gather(output, -1)[..., :width])
    elif style.startswith("rows"):
        bias, module.bias = module.bias, None  # added once, not by every rank

        def add_parts(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            summed = ranks.all_sum(output)
            return summed if bias is None else summed + bias

        module.register_forward_hook(add_parts)
        if style == "rows, of a whole input":
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].chunk(ranks.size, -1)[ranks.position])


class _Embedding(nn.Module):
    """Embeddings of this rank's part of the vocabulary; the sum over the ranks has all of them."""

    def __init__(self, weight: nn.Parameter, ranks: SplitRanks) -> None:
        super().__init__()
        self.weight = weight
        self.ranks = ranks

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of `ids`, [..., hidden]."""
        rows = len(self.weight)
        offsets = ids - self.ranks.position * rows
        is_local = (offsets >= 0) & (offsets < rows)
        embedded = functional.embedding(offsets.clamp(0, rows - 1), self.weight)
        return self.ranks.all_sum(embedded * is_local.unsqueeze(-1))
