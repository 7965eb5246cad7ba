"""A second model for the rollout, of which each rank of a team holds a part of every layer.

A model in training flows in, its weights whole or ZeRO-3's shards; out comes one of the same architecture for reading
alone. It is made layer by layer, adapters merged: no rank ever holds more than one layer whole, and the model in
training stays as it is.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Protocol

import torch
from deepspeed.runtime.zero import GatheredParameters
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

from rlhf.generation import tensor_parallel_plans as plans
from rlhf.generation.tensor_parallel_plans import Style
from rlhf.models.lora import merged_weight

logger = logging.getLogger(__name__)


class Partners(Protocol):
    """What a split layer asks of the ranks that hold its other parts (`rlhf.generation.rank_groups.Team`)."""

    size: int
    position: int

    def all_sum(self, tensor: Tensor) -> Tensor: ...

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor: ...


class _Nobody:
    """Partners that are not there: what comes of their parts has the right shape."""

    position = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor:
        return torch.cat([tensor] * self.size, dimension)


@torch.no_grad()
def why_not(model: Any, ranks: int) -> str:
    """Why a causal language model cannot be split among `ranks`; empty where it can. Its weights are not read."""
    if why := plans.why_not(model, ranks):
        return why
    if _fails(split(_outline(model), _Nobody(ranks))) and not _fails(_outline(model)):
        return f"the layers of {model.config.model_type} do not fit together when they are split"
    return ""


def _fails(outline: Any) -> bool:
    """Whether the shapes in a model without weights do not fit together, or it looks at values."""
    try:
        # With a cache: without, transformers 5.23 looks whether a row holds several sequences.
        outline(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=True)
    except RuntimeError as error:
        logger.debug("%s without weights: %s", type(outline).__name__, error)
        return True
    return False


@torch.no_grad()
def split(model: Any, team: Partners) -> Any:
    """This rank's part of a causal language model of transformers, in evaluation mode.

    At ZeRO-3 all ranks of the run must call it together. Embeddings and the projection to the vocabulary are split by
    vocabulary; what the plan of the architecture does not name is whole. Frozen buffers are shared with `model`.
    """
    part = _outline(model)
    styles: dict[str, Style | str] = {**plans.styles(model)}
    paths = {id(module): path for path, module in part.named_modules()}
    if type(embeddings := part.get_input_embeddings()) is nn.Embedding:
        styles[paths[id(embeddings)]] = "vocabulary"
    if type(projection := part.get_output_embeddings()) is nn.Linear:
        styles[paths[id(projection)]] = "columns, gathered"
    known: dict[tuple[int, bool], nn.Parameter] = {}
    for path, module in list(part.named_modules()):
        style = styles.get(path, "whole")
        _fill(module, model.get_submodule(path), style, team, known)
        if style != "whole":
            _connect(part, path, module, style, team)
    plans.adapt(part, team.position, team.size)
    return part.eval()


def _outline(model: Any) -> Any:
    """A model of the same architecture without weights."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _fill(module: Any, source: Any, style: str, team: Partners, known: dict[tuple[int, bool], nn.Parameter]) -> None:
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
                whole = merged_weight(source) if adapted and name == "weight" else parameter.data
                own = _cut(whole, 1 if style.startswith("rows") else 0, team) if cut else whole
                known[key] = nn.Parameter(own.to(parameter.dtype, copy=True), requires_grad=False)
            module._parameters[name] = known[key]


def _cut(whole: Tensor, dimension: int, team: Partners) -> Tensor:
    """This rank's part along a dimension: all parts have one size, the last ones filled up with zeros."""
    size = -(-whole.shape[dimension] // team.size)
    first = min(team.position * size, whole.shape[dimension])
    own = whole.narrow(dimension, first, min(size, whole.shape[dimension] - first))
    missing = size - own.shape[dimension]
    return functional.pad(own, [0, 0] * (whole.dim() - 1 - dimension) + [0, missing]) if missing else own


def _connect(part: nn.Module, path: str, module: Any, style: str, team: Partners) -> None:
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

    def __init__(self, weight: nn.Parameter, team: Partners) -> None:
        super().__init__()
        self.weight = weight
        self.team = team

    def forward(self, ids: Tensor) -> Tensor:
        rows = len(self.weight)
        own = ids - self.team.position * rows
        here = (own >= 0) & (own < rows)
        found = functional.embedding(own.clamp(0, rows - 1), self.weight)
        return self.team.all_sum(found * here.unsqueeze(-1))
