"""Choose the attention implementation of a model: the first of the backend's that its architecture supports.

A backend lists implementations, best first. `eager`, which every architecture has, is the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.errors import ModelError
from rlhf.models import hub
from rlhf.models.compatibility import check_model_folder, explain_missing_attention, find_model_class, load_model_config

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.config.schema import ModelConfig


@dataclass(frozen=True)
class AttentionChoice:
    """The attention implementation of a model.

    Attributes:
        name: transformers' name of the implementation.
        refused: the better ones that the model does not get, with the reasons.
    """

    name: str
    refused: Mapping[str, str]


EMBEDDED_MODEL = "the embedded model"


def choose_attention(accelerator: Accelerator, path: str | None, config: ModelConfig) -> AttentionChoice:
    """Choose the implementation for the model at `path`, or for the embedded one if that is None.

    Raises:
        ModelError: its configuration cannot be read, or no implementation of the backend supports it.
        AcceleratorError: the backend has no implementation.
    """
    if path is None:
        from transformers import LlamaConfig, LlamaForCausalLM

        return choose_attention_for(accelerator, LlamaConfig(), EMBEDDED_MODEL, LlamaForCausalLM)
    check_model_folder(path)
    hub.check_available(path, "model")
    model_config = load_model_config(path, config)
    return choose_attention_for(accelerator, model_config, path, find_model_class(model_config, config))


def choose_attention_for(accelerator: Accelerator, model_config: Any, name: str, architecture: Any) -> AttentionChoice:
    """Choose as `choose_attention` does, for a configuration of transformers.

    Args:
        accelerator: the backend.
        model_config: the model's configuration.
        name: the name of the model in messages.
        architecture: the class of its language model; None if it is known only after loading.
    """
    refused: dict[str, str] = {}
    for implementation, attention in accelerator.kernels.usable("attention"):
        refusal = accelerator.kernels.refusal
        reason = explain_missing_attention(architecture, attention) or refusal(implementation, model_config)
        if not reason:
            return AttentionChoice(attention, refused)
        refused[attention] = reason
    first = accelerator.kernels.get("attention", required=True)
    raise ModelError(
        f"{name}: no attention implementation of {accelerator.name} supports this model ({_join_reasons(refused)}); "
        f"choose a model that supports {first}"
    )


def describe_attention(choices: Mapping[str, AttentionChoice]) -> str | None:
    """Return one line about the models that did not get the backend's first choice; None if all did.

    Args:
        choices: the choice for each model, by its name.
    """
    by_reasons: dict[str, list[str]] = {}
    for model, choice in choices.items():
        if choice.refused:
            by_reasons.setdefault(f"({_join_reasons(choice.refused)})", []).append(f"{choice.name} for {model}")
    parts = [f"{', '.join(models)} {reasons}" for reasons, models in by_reasons.items()]
    return f"attention: {'; '.join(parts)}" if parts else None


def _join_reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in refused.items())
