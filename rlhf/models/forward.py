"""The two forward passes of training and scoring: log-probabilities of a policy, scores of a scalar head.

Both take a left- or right-padded batch with its mask and work on any decoder-only model of transformers.
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
    """A sequence-classification model of transformers, read at every token instead of the last one.

    Its last product is in float32: of scores rounded to bf16, those of two replies would often be equal.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        model.score.forward = MethodType(_in_float32, model.score)  # called by the module: ZeRO-3 has it whole then

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """input_ids, attention_mask: [B, T] -> scores [B, T], float32."""
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
    """Log-probabilities of the last `completion_length` tokens (A) of each row.

    Only their positions are projected to the vocabulary: no [B, T, V] tensor exists.

    Args:
        input_ids, attention_mask: [B, T].
        temperature: the one the tokens were drawn with; the log-probabilities are of that distribution.
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
    """Keyword arguments of a forward pass over whole rows, or over prompts that fill an empty `cache`.

    If the architecture allows, the mask is built here (`build_causal_mask`), [B, 1, T, S]. Positions, if the model
    takes them, count real tokens.

    Args:
        input_ids: [B, T].
        attention_mask: [B, S], S = T without a cache, else the cache's length.
    """
    model = getattr(model, "module", model)  # under DeepSpeed
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": cache is not None}
    if cache is not None:
        inputs["past_key_values"] = cache
    if not accepts_positions(model):
        return inputs  # derives positions from the [B, T] mask, as BLOOM does
    # Of a composite model (text and images) the part that reads text.
    config = model.config.get_text_config(decoder=True)
    present = attention_mask[:, : input_ids.shape[1]]
    inputs["position_ids"] = position_ids(present)
    if getattr(config, "alibi", False):
        return inputs  # derives its biases from the [B, S] mask
    # Layers with a state of their own (linear attention, convolutions) take the mask of the tokens they are given.
    inputs["attention_mask"] = present
    if _attends_to_all(config):
        like = torch.empty((*input_ids.shape, 0), dtype=model.dtype, device=input_ids.device)
        inputs["attention_mask"] = build_causal_mask(config, like, attention_mask, cache)
    return inputs


def accepts_positions(model: nn.Module) -> bool:
    """Whether a model's forward takes `position_ids`."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _attends_to_all(config: Any) -> bool:
    """Whether one mask serves all layers: none has a window of its own."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, T]: the index of each real token among its row's real tokens; 0 for padding before them."""
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


def sequence_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """[B] float32: a reward model's score of each row, that of its last real token.

    Where its configuration has an `unread_token` (see `rlhf.models.deepspeed_chat`), it is that of the last other one.
    """
    head = getattr(model, "module", model)  # under DeepSpeed
    unread = getattr(getattr(head.model, "config", None), "unread_token", None)
    read = attention_mask if unread is None else attention_mask * (input_ids != unread)
    return last_token_scores(model(input_ids, attention_mask), read)


def last_token_scores(token_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """[B, T] scores and mask -> [B]: the score at each row's last real token."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return token_scores.gather(-1, (columns * attention_mask).argmax(-1, keepdim=True)).squeeze(-1).float()
