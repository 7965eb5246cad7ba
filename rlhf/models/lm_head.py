"""Log-probabilities from a causal language model's last hidden states, if possible without a tensor of logits.

The fused product replaces the forward pass of the output layer for one call, so that hooks on the layer (DeepSpeed's
ZeRO-3 gathers its weights with them) run as usual.
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
"""Bytes of 16-bit logits above which they are not stored. Fused, the projection's forward and backward passes of 512
rows take 15 % longer, since logits are computed twice; with more rows the difference shrinks, and memory is scarce."""

_is_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""True if the logits of a model are the output layer's result, unchanged; by the models examined so far."""


class LogProbs(NamedTuple):
    """log_probs: [B, A] float32; entropy: [B, A] float32, or None if it was not requested."""

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
    """Run a forward pass, and return the log-probabilities of `labels` under softmax(logits / temperature).

    Args:
        model: a causal language model.
        inputs: keyword arguments of the model's forward pass.
        labels: [B, T], one for each position that has logits; with `places` [N].
        temperature: that of sampling.
        entropy: compute the entropy of each distribution too.
        places: [N], the positions to project to the vocabulary, of B * T counted row by row; None: all.

    Returns:
        Of the shape of `labels`. No float32 tensor of logits exists; if the output layer can be fused with the rest
        (see `can_be_fused`), and its logits would be float32 or large, no tensor of logits at all.
    """
    entropies: Tensor | None = None  # kept out of the model output, or autograd would build a zero gradient for them

    def fused(hidden: Tensor) -> Tensor:
        nonlocal entropies
        log_probs, entropies = projected_log_probs(
            hidden, head.weight, head.bias, labels, temperature=temperature, entropy=entropy
        )
        return log_probs.unsqueeze(-1)  # as the model's output, which DeepSpeed's hooks see

    bare = getattr(model, "module", model)  # under DeepSpeed
    head = get_output_layer(bare)
    with contextlib.ExitStack() as stack:
        if places is not None:
            assert head is not None
            stack.callback(head.register_forward_pre_hook(lambda _, args: _select_places(args[0], places)).remove)
        if can_be_fused(bare) and _is_large(head, labels):
            stack.enter_context(_replace_forward(head, fused))
            log_probs = model(**inputs).logits.view(labels.shape)
            return LogProbs(log_probs, None if entropies is None else entropies.view(labels.shape))
        logits = model(**inputs).logits
        logits = logits.view(*labels.shape, logits.shape[-1])
    if entropy:
        return LogProbs(*token_log_probs_and_entropy(logits, labels, temperature))
    return LogProbs(token_log_probs(logits, labels, temperature), None)


def get_output_layer(model: nn.Module) -> Any:
    """Return the layer that computes logits; None if the model names none."""
    get_layer = getattr(model, "get_output_embeddings", None)
    return get_layer() if get_layer else None


def can_be_fused(model: nn.Module) -> bool:
    """Return True if a model's logits are a plain product of its last hidden states.

    They are not if an adapter or another forward pass replaces the output layer's (packed weights, for example), or if
    the model scales or caps the layer's result.
    """
    head = get_output_layer(model)
    if type(head) is not nn.Linear or "forward" in vars(head):
        return False
    if model not in _is_plain:
        _is_plain[model] = _returns_head_output(model, head)
        if not _is_plain[model]:
            logger.debug("%s: logits are computed in one piece: they are more than a product", type(model).__name__)
    return _is_plain[model]


def _is_large(head: nn.Linear, labels: Tensor) -> bool:
    """Return True if logits should not be stored; the same in scoring and training, so that their numbers agree."""
    size = head.weight.element_size()
    return size > 2 or labels.numel() * head.out_features * size > LARGE


def _select_places(hidden: Tensor, places: Tensor) -> tuple[Tensor]:
    """Select positions: [B, T, H] -> [1, N, H]."""
    return (hidden.flatten(0, -2).index_select(0, places).unsqueeze(0),)


@contextlib.contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the instance attribute hid the class's method


def _returns_head_output(model: nn.Module, head: nn.Linear) -> bool:
    """Run the model's forward pass between stubs, and return True if its logits are the output layer's result.

    It uses no weight, no random number and no hook, and runs nothing on the device, where it would become part of the
    first batch's graph.
    """
    names = [name for name, child in model.named_children() if child is head]
    backbone = getattr(model, "base_model_prefix", "")
    if len(names) != 1 or backbone not in model._modules or backbone == names[0]:
        return False
    device = torch.device("meta")
    hidden, logits = (torch.zeros(1, 1, size, device=device) for size in (head.in_features, head.out_features))
    modules = model._modules.copy()
    try:
        model._modules[backbone] = _Stub(_HiddenOutput(last_hidden_state=hidden))
        model._modules[names[0]] = _Stub(logits, like=head)
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        return type(model).forward(model, input_ids=ids, use_cache=False).logits is logits
    except Exception as error:  # an architecture that uses its parts in other ways keeps its logits
        logger.debug("%s: %s", type(model).__name__, error)
        return False
    finally:
        model._modules.update(modules)


class _Stub(nn.Module):
    """A module that returns a given result; its unknown attributes are itself."""

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


class _HiddenOutput(BaseModelOutputWithPast):
    """The output of a decoder; attributes that only some decoders return are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
