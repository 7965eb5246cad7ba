"""Which attention implementation a model runs with: the first of the backend's that its architecture takes.

A backend offers implementations, best first; a model's configuration flows in; out comes the one it gets, and why it
did not get the better ones. At the bottom of every backend's offers is `eager`, which every architecture has.
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
    """`name` is transformers' for an attention implementation; `refused` are the better ones, each with the reason."""

    name: str
    refused: Mapping[str, str]


EMBEDDED_MODEL = "the embedded model"


def choose_attention(accelerator: Accelerator, path: str | None, config: ModelConfig) -> AttentionChoice:
    """What the model at `path`, or the embedded one, gets of what the backend offers.

    Raises:
        ModelError: its configuration cannot be read, or nothing that the backend offers serves it.
        AcceleratorError: the backend offers nothing.
    """
    if path is None:
        from transformers import LlamaConfig, LlamaForCausalLM

        return choose_attention_for(accelerator, LlamaConfig(), EMBEDDED_MODEL, LlamaForCausalLM)
    check_model_folder(path)
    hub.check_available(path, "model")
    found = load_model_config(path, config)
    return choose_attention_for(accelerator, found, path, find_model_class(found, config))


def choose_attention_for(accelerator: Accelerator, found: Any, path: str, architecture: Any) -> AttentionChoice:
    """As `choose_attention`, for a configuration of transformers.

    Args:
        path: how messages call the model.
        architecture: the class of its language model; None where only loading tells.
    """
    refused: dict[str, str] = {}
    for implementation, name in accelerator.kernels.usable("attention"):
        why = explain_missing_attention(architecture, name) or accelerator.kernels.refusal(implementation, found)
        if not why:
            return AttentionChoice(name, refused)
        refused[name] = why
    first = accelerator.kernels.get("attention", required=True)
    raise ModelError(
        f"{path}: no attention of {accelerator.name} serves it ({_listed(refused)}); choose a model that takes {first}"
    )


def describe_attention(choices: Mapping[str, AttentionChoice]) -> str | None:
    """What to say of models, by the names they go by, that did not get the backend's first choice; None if all did."""
    said: dict[str, list[str]] = {}
    for model, choice in choices.items():
        if choice.refused:
            said.setdefault(f"({_listed(choice.refused)})", []).append(f"{choice.name} for {model}")
    parts = [f"{', '.join(models)} {why}" for why, models in said.items()]
    return f"attention: {'; '.join(parts)}" if parts else None


def _listed(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in refused.items())
