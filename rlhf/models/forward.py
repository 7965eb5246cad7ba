"""The two forward passes of training and scoring: log-probabilities of a policy, scores of a scalar head.

Both take a left- or right-padded batch with its mask and work on any decoder-only model of transformers.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.objectives import token_entropy, token_log_probs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ScalarHead(nn.Module):
    """A sequence-classification model of transformers, read at every token instead of the last one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """input_ids, attention_mask: [B, T] -> scores [B, T]."""
        backbone = getattr(self.model, self.model.base_model_prefix)
        hidden = backbone(**model_inputs(backbone, input_ids, attention_mask)).last_hidden_state
        return self.model.score(hidden).squeeze(-1)


class LogProbs(NamedTuple):
    """log_probs: [B, A] float32; entropy: [B, A] float32, or None where it was not asked for."""

    log_probs: Tensor
    entropy: Tensor | None


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
    output = model(
        **model_inputs(model, input_ids, attention_mask),
        logits_to_keep=completion_length + 1,  # the last prompt position predicts the first completion token
    )
    logits = output.logits[:, :-1]
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    log_probs = token_log_probs(logits, input_ids[:, -completion_length:])
    return LogProbs(log_probs, token_entropy(logits) if entropy else None)


def model_inputs(model: Any, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """Keyword arguments of a forward pass; positions count real tokens, where the model takes positions."""
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if accepts_positions(model):
        inputs["position_ids"] = position_ids(attention_mask)
    return inputs


def accepts_positions(model: Any) -> bool:
    """Whether a model's forward takes `position_ids` (BLOOM, for one, derives them from the mask)."""
    model = getattr(model, "module", model)  # under DeepSpeed
    return "position_ids" in inspect.signature(model.forward).parameters


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, T]: the index of each real token among its row's real tokens; 0 for padding before them."""
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


def last_token_scores(token_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """[B, T] scores and mask -> [B]: the score at each row's last real token."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return token_scores.gather(-1, (columns * attention_mask).argmax(-1, keepdim=True)).squeeze(-1).float()
