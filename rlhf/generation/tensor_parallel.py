"""A second model for the rollout, of which each rank of a team holds a part of every layer.

A model in training flows in, its weights whole or ZeRO-3's shards; out comes one of the same architecture for reading
alone. It is made layer by layer, adapters merged: no rank ever holds more than one layer whole, and the model in
training stays as it is.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from deepspeed.runtime.zero import GatheredParameters
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

from rlhf.models.lora import compute_merged_weight

logger = logging.getLogger(__name__)


class SplitRanks(Protocol):
    """Communication among the ranks that hold the parts of a split layer (a `TensorParallelGroup`)."""

    size: int
    position: int

    def all_sum(self, tensor: Tensor) -> Tensor: ...

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor: ...


class _ShapeOnlyRanks:
    """Partners that are not there: what comes of their parts has the right shape."""

    position = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor:
        return torch.cat([tensor] * self.size, dimension)


@torch.no_grad()
def find_split_obstacle(model: Any, ranks: int) -> str:
    """Why a causal language model cannot be split among `ranks`; empty where it can. Its weights are not read."""
    if why := _plan_obstacle(model, ranks):
        return why
    if _fails(split_model(_outline(model), _ShapeOnlyRanks(ranks))) and not _fails(_outline(model)):
        return f"the layers of {model.config.model_type} do not fit together when they are split"
    return ""


def _fails(outline: Any) -> bool:
    """Whether the shapes in a model without weights do not fit together, or it looks at values."""
    try:
        # With a cache: without one, transformers 5.23 reads the positions to see if a row holds several sequences
        # (https://github.com/huggingface/transformers/pull/39194).
        outline(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=True)
    except RuntimeError as error:
        logger.debug("%s without weights: %s", type(outline).__name__, error)
        return True
    return False


@torch.no_grad()
def split_model(model: Any, team: SplitRanks) -> Any:
    """This rank's part of a causal language model of transformers, in evaluation mode.

    At ZeRO-3 all ranks of the run must call it together. Embeddings and the projection to the vocabulary are split by
    vocabulary; what the plan of the architecture does not name is whole. Frozen buffers are shared with `model`.
    """
    part = _outline(model)
    module_styles: dict[str, Style | str] = {**list_styles(model)}
    paths = {id(module): path for path, module in part.named_modules()}
    if type(embeddings := part.get_input_embeddings()) is nn.Embedding:
        module_styles[paths[id(embeddings)]] = "vocabulary"
    if type(projection := part.get_output_embeddings()) is nn.Linear:
        module_styles[paths[id(projection)]] = "columns, gathered"
    known: dict[tuple[int, bool], nn.Parameter] = {}
    for path, module in list(part.named_modules()):
        style = module_styles.get(path, "whole")
        _fill(module, model.get_submodule(path), style, team, known)
        if style != "whole":
            _connect(part, path, module, style, team)
    adapt_head_counts(part, team.position, team.size)
    return part.eval()


def _outline(model: Any) -> Any:
    """A model of the same architecture without weights."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _fill(module: Any, source: Any, style: str, team: SplitRanks, known: dict[tuple[int, bool], nn.Parameter]) -> None:
    """Give a module of the new model its own parameters, or parts of them, and its buffers.

    Args:
        known: what was made so far, for weights that several modules share.
    """
    adapted = isinstance(source, LoraLayer)
    base = source.get_base_layer() if adapted else source
    module._buffers.update(base._buffers)
    vars(module).update({name: value for name, value in vars(base).items() if isinstance(value, Tensor)})
    with GatheredParameters([*source.parameters(recurse=adapted)]):
        for name, parameter in base._parameters.items():
            if parameter is None:
                continue
            cut = style != "whole" and not (name == "bias" and style.startswith("rows"))
            key = id(parameter), cut
            if key not in known:
                whole = compute_merged_weight(source) if adapted and name == "weight" else parameter.data
                own = _cut(whole, 1 if style.startswith("rows") else 0, team) if cut else whole
                known[key] = nn.Parameter(own.to(parameter.dtype, copy=True), requires_grad=False)
            module._parameters[name] = known[key]


def _cut(whole: Tensor, dimension: int, team: SplitRanks) -> Tensor:
    """This rank's part along a dimension: all parts have one size, the last ones filled up with zeros."""
    size = -(-whole.shape[dimension] // team.size)
    first = min(team.position * size, whole.shape[dimension])
    own = whole.narrow(dimension, first, min(size, whole.shape[dimension] - first))
    missing = size - own.shape[dimension]
    return functional.pad(own, [0, 0] * (whole.dim() - 1 - dimension) + [0, missing]) if missing else own


def _connect(part: nn.Module, path: str, module: Any, style: str, team: SplitRanks) -> None:
    """Have a split module give what the whole one would."""
    if style == "vocabulary":
        parent, _, name = path.rpartition(".")
        setattr(part.get_submodule(parent), name, _Embedding(module.weight, team))
    elif style == "columns, gathered":
        width = module.out_features
        module.register_forward_hook(lambda _, inputs, output: team.all_gather(output, -1)[..., :width])
    elif style.startswith("rows"):
        bias, module.bias = module.bias, None  # added once, not by each

        def total(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            summed = team.all_sum(output)
            return summed if bias is None else summed + bias

        module.register_forward_hook(total)
        if style == "rows, of a whole input":
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].chunk(team.size, -1)[team.position])


class _Embedding(nn.Module):
    """Embeddings of a part of the vocabulary; the others come from the other ranks."""

    def __init__(self, weight: nn.Parameter, team: SplitRanks) -> None:
        super().__init__()
        self.weight = weight
        self.team = team

    def forward(self, ids: Tensor) -> Tensor:
        rows = len(self.weight)
        own = ids - self.team.position * rows
        here = (own >= 0) & (own < rows)
        found = functional.embedding(own.clamp(0, rows - 1), self.weight)
        return self.team.all_sum(found * here.unsqueeze(-1))


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


class SplitFamily(NamedTuple):
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
        counted=("num_heads",),
    ),
    # Queries, keys and values lie together, head by head, so that a part of the outputs is a part of the heads.
    "bloom": SplitFamily(
        {
            "h.*.self_attention.query_key_value": "colwise",
            "h.*.self_attention.dense": "rowwise",
            "h.*.mlp.dense_h_to_4h": "colwise",
            "h.*.mlp.dense_4h_to_h": "rowwise",
        },
        counted=("num_heads",),
        adapt=_own_slopes,
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


def _plan_obstacle(model: Any, ranks: int) -> str:
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
    for path, style in list_styles(model).items():
        layer = model.get_submodule(path)
        width = layer.out_features if style.startswith("columns") else getattr(layer, "in_features", 0)
        if style != "whole" and width % ranks:
            return f"{path} has {width} features, which cannot be shared among {ranks} ranks"
    return ""


def list_styles(model: Any) -> dict[str, Style]:
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


def adapt_head_counts(model: Any, position: int, ranks: int) -> None:
    """Tell a split model's modules how many heads are theirs, where they count them."""
    family = _FAMILIES.get(model.config.model_type)
    if family is None:
        return
    for path in list_styles(model):
        attention = model.get_submodule(path.rpartition(".")[0])
        if path.rpartition(".")[2] in ("q_proj", "query_key_value"):
            for name in family.counted:
                setattr(attention, name, getattr(attention, name) // ranks)
    family.adapt(model, position, ranks)


def _plan(config: Any) -> Mapping[str, str]:
    family = _FAMILIES.get(config.model_type)
    return family.plan if family else getattr(config, "base_model_tp_plan", None) or {}
