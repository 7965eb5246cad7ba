"""The two forward passes of training and scoring: log-probabilities of a policy, scores of a scalar head.

Both take a left- or right-padded batch with its mask and work with any decoder-only model of transformers.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf.models.lm_head import LogProbs, compute_log_probs
from rlhf.models.transformers_patches import build_causal_mask

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


class ScalarHead(nn.Module):
    """A sequence-classification model of transformers that scores every token instead of the last one.

    Its last product is in float32: rounded to bf16, the scores of two replies would often be equal.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        model.score.forward = MethodType(_in_float32, model.score)  # called by the module, so ZeRO-3 has gathered it

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return scores [B, T], float32, for input_ids and attention_mask [B, T]."""
        backbone = getattr(self.model, self.model.base_model_prefix)
        hidden = backbone(**model_inputs(backbone, input_ids, attention_mask)).last_hidden_state
        scores: Tensor = self.model.score(hidden).squeeze(-1)
        return scores


def _in_float32(linear: nn.Linear, hidden: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return nn.functional.linear(hidden.float(), linear.weight.float(), bias)


def completion_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_length: int,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> LogProbs:
    """Return log-probabilities of the last `completion_length` tokens (A) of each row.

    Only their positions are projected to the vocabulary: no [B, T, V] tensor exists.

    Args:
        model: a causal language model.
        input_ids: [B, T].
        attention_mask: [B, T].
        completion_length: A.
        temperature: that of sampling; the log-probabilities are of the tempered distribution.
        entropy: compute the entropy at each position too.
    """
    # The last prompt position predicts the first completion token. Positions rather than a count: a slice of
    # the hidden states would make the projection of a frozen model a batched product, with a copy of the
    # vocabulary matrix for every row (torch 2.13).
    end = input_ids.shape[1] - 1
    positions = torch.arange(end - completion_length, end, device=input_ids.device)
    inputs = model_inputs(model, input_ids, attention_mask) | {"logits_to_keep": positions}
    labels = input_ids[:, end + 1 - completion_length :]
    return compute_log_probs(model, inputs, labels, temperature=temperature, entropy=entropy)


def model_inputs(model: Any, input_ids: Tensor, attention_mask: Tensor, cache: Cache | None = None) -> dict[str, Any]:
    """Return keyword arguments of a forward pass over whole rows, or over prompts that fill an empty `cache`.

    If the architecture allows, the mask is built here (`build_causal_mask`), [B, 1, T, S]. Positions, if the model
    takes them, count real tokens.

    Args:
        model: a language model of transformers.
        input_ids: [B, T].
        attention_mask: [B, S], S = T without a cache, else the cache's length.
        cache: a static cache; None: none is used.
    """
    model = getattr(model, "module", model)  # under DeepSpeed
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": cache is not None}
    if cache is not None:
        inputs["past_key_values"] = cache
    if not accepts_positions(model):
        return inputs  # the model derives positions from the [B, T] mask, as BLOOM does
    # The text part of a composite model (text and images).
    config = model.config.get_text_config(decoder=True)
    present = attention_mask[:, : input_ids.shape[1]]
    inputs["position_ids"] = position_ids(present)
    if getattr(config, "alibi", False):
        return inputs  # the model derives its biases from the [B, S] mask
    # Layers with a recurrent state (linear attention, convolutions) take the mask of the current tokens.
    inputs["attention_mask"] = present
    if _attends_to_all(config):
        like = torch.empty((*input_ids.shape, 0), dtype=model.dtype, device=input_ids.device)
        inputs["attention_mask"] = build_causal_mask(config, like, attention_mask, cache)
    return inputs


def accepts_positions(model: nn.Module) -> bool:
    """Return True if a model's forward pass takes `position_ids`."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _attends_to_all(config: Any) -> bool:
    """Return True if one mask serves all layers, since none has an attention window."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return [B, T]: the index of each real token among its row's real tokens; 0 for padding before them."""
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


def sequence_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return a reward model's score of each row, [B] float32: that of its last real token.

    If its configuration has an `unread_token` (see `rlhf.models.deepspeed_chat`), that of the last other token.
    """
    head = getattr(model, "module", model)  # under DeepSpeed
    unread = getattr(getattr(head.model, "config", None), "unread_token", None)
    read = attention_mask if unread is None else attention_mask * (input_ids != unread)
    return last_token_scores(model(input_ids, attention_mask), read)


def last_token_scores(token_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Return [B]: the score at each row's last real token, for scores and mask [B, T]."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return token_scores.gather(-1, (columns * attention_mask).argmax(-1, keepdim=True)).squeeze(-1).float()
