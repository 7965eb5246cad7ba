"""What a causal language model makes of its last hidden states: log-probabilities, without the logits where it can be.

The fused product stands in the place of the output layer's own forward pass for one call, so that whoever cares for a
layer's weights (DeepSpeed's ZeRO-3 gathers them around it) sees nothing else than before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhf.losses.fused_lm_head import projected_log_probs
from rlhf.losses.log_probs import token_log_probs, token_log_probs_and_entropy

logger = logging.getLogger(__name__)

LARGE = 64 << 20
"""Bytes of 16-bit logits from which on they are not kept. Fused, the vocabulary's forward and backward passes of 512
rows take 15 % longer, for the logits are made twice; with more rows the difference goes, and memory is what lacks."""

_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Of models that were asked: whether their logits are what the output layer gives, and nothing after it."""


class LogProbs(NamedTuple):
    """log_probs: [B, A] float32; entropy: [B, A] float32, or None where it was not asked for."""

    log_probs: Tensor
    entropy: Tensor | None


def compute_log_probs(
    model: nn.Module,
    inputs: dict[str, Any],
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    places: Tensor | None = None,
) -> LogProbs:
    """A forward pass, to the log-probabilities of `labels` under softmax(logits / temperature).

    Args:
        inputs: keyword arguments of the model's forward pass.
        labels: [B, T], one for each position that has logits; with `places` [N].
        places: [N], which of the B * T positions, counted row by row, are projected to the vocabulary; by default all.

    Returns:
        Of the shape of `labels`. No float32 tensor of logits exists; where the output layer can be fused with the
        rest (see `can_be_fused`), and float32 or large, no tensor of logits at all.
    """

    entropies: Tensor | None = None  # not in the output: as a part of it they had a gradient, of 0, always

    def fused(hidden: Tensor) -> Tensor:
        nonlocal entropies
        made, entropies = projected_log_probs(
            hidden, head.weight, head.bias, labels, temperature=temperature, entropy=entropy
        )
        return made.unsqueeze(-1)  # through the model's own output: DeepSpeed's hooks are there

    bare = getattr(model, "module", model)  # under DeepSpeed
    head = get_output_layer(bare)
    with contextlib.ExitStack() as stack:
        if places is not None:
            assert head is not None
            stack.callback(head.register_forward_pre_hook(lambda _, args: _chosen(args[0], places)).remove)
        if can_be_fused(bare) and _is_large(head, labels):
            stack.enter_context(_in_place_of_forward(head, fused))
            found = model(**inputs).logits.view(labels.shape)
            return LogProbs(found, None if entropies is None else entropies.view(labels.shape))
        logits = model(**inputs).logits
        logits = logits.view(*labels.shape, logits.shape[-1])
    if entropy:
        return LogProbs(*token_log_probs_and_entropy(logits, labels, temperature))
    return LogProbs(token_log_probs(logits, labels, temperature), None)


def get_output_layer(model: nn.Module) -> Any:
    """The layer that gives logits, or None of a model that names none."""
    named = getattr(model, "get_output_embeddings", None)
    return named() if named else None


def can_be_fused(model: nn.Module) -> bool:
    """Whether a model's logits are a plain product of its last hidden states.

    Not where an adapter or another forward pass is in the output layer's place (packed weights, say), nor where the
    model scales or caps what the layer gives.
    """
    head = get_output_layer(model)
    if type(head) is not nn.Linear or "forward" in vars(head):
        return False
    if model not in _plain:
        _plain[model] = _gives_what_the_layer_gives(model, head)
        if not _plain[model]:
            logger.debug("%s: logits are made in one piece: more than a product makes them", type(model).__name__)
    return _plain[model]


def _is_large(head: nn.Linear, labels: Tensor) -> bool:
    """Whether logits are not to exist; the same for scoring and training, so that their numbers are the same."""
    size = head.weight.element_size()
    return size > 2 or labels.numel() * head.out_features * size > LARGE


def _chosen(hidden: Tensor, places: Tensor) -> tuple[Tensor]:
    """[B, T, H] -> [1, N, H]."""
    return (hidden.flatten(0, -2).index_select(0, places).unsqueeze(0),)


@contextlib.contextmanager
def _in_place_of_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # an attribute of the instance: the class's is back


def _gives_what_the_layer_gives(model: nn.Module, head: nn.Linear) -> bool:
    """Have the model's own forward pass run between stand-ins, and see what becomes of the output layer's result.

    No weight takes part, no random number is drawn, no hook runs, and the device sees nothing of it: it would be a part
    of the first batch's graph.
    """
    names = [name for name, child in model.named_children() if child is head]
    backbone = getattr(model, "base_model_prefix", "")
    if len(names) != 1 or backbone not in model._modules or backbone == names[0]:
        return False
    device = torch.device("meta")
    hidden, given = (torch.zeros(1, 1, size, device=device) for size in (head.in_features, head.out_features))
    kept = model._modules.copy()
    try:
        model._modules[backbone] = _StandIn(_Hidden(last_hidden_state=hidden))
        model._modules[names[0]] = _StandIn(given, like=head)
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        return type(model).forward(model, input_ids=ids, use_cache=False).logits is given
    except Exception as error:  # of an architecture that wants more of its parts: it has its logits made as ever
        logger.debug("%s: %s", type(model).__name__, error)
        return False
    finally:
        model._modules.update(kept)


class _StandIn(nn.Module):
    """Gives what it was made with; its parts are itself."""

    def __init__(self, result: Any, like: nn.Module | None = None) -> None:
        super().__init__()
        self._result = result
        self._parameters = {} if like is None else like._parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self


class _Hidden(BaseModelOutputWithPast):
    """What a decoder gives; of all that some give beside, nothing."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
