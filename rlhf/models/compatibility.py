"""Check that a model is supported, and choose its attention, from its folder and configuration alone.

If a stage would fail on a model or train it wrongly, the error is one line. Importing this module loads neither torch
nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.paths import is_path, missing_path_hint
from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.hub import check_available, load_error, summarize_error
from rlhf.models.transformers_patches import STATIC_CACHE_WORKS
from rlhf.roles.model_identity import check_model_files

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

    from accelerators import Accelerator

EMBEDDED_MODEL = "the embedded model"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")
_MAX_LAYERS = 2000
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")


@dataclass(frozen=True)
class AttentionChoice:
    """transformers' name of the chosen attention, and the preferred ones that the model cannot use, with reasons."""

    name: str
    refused: Mapping[str, str]


def check_model_folder(path: str) -> None:
    """Raise `ModelError` if a local folder lacks a configuration or weights, or is damaged; hub names pass.

    Contents of weights are not read; see `check_model_files`.
    """
    if not is_path(path):
        return  # a hub name
    folder = Path(path)
    if not folder.exists():
        raise ModelError(f"{path}: no such model folder; check the path{missing_path_hint(path)}")
    if not folder.is_dir():
        raise ModelError(f"{path}: is a file; name the folder that holds the model")
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{path}: holds a LoRA adapter (adapter_config.json), not a whole model; merge it into its model with "
            "peft's merge_and_unload, save that, and name its folder"
        )
    if not (folder / "config.json").exists() and not any(folder.glob("*.gguf")):
        stage_model = folder / "model" / "config.json"  # of a run's stage
        remedy = f"name {stage_model.parent}" if stage_model.is_file() else "name a folder that save_pretrained wrote"
        raise ModelError(f"{path}: holds no config.json; {remedy}")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        raise ModelError(f"{path}: holds no weights (*.safetensors or *.bin); copy them there or name another folder")
    check_model_files(path, whole=False)


def check_support(path: str, config: ModelConfig, *, attention: str, scalar_head: bool = False) -> PretrainedConfig:
    """Return the configuration of the model at `path` if that model can be trained with this attention implementation.

    With `scalar_head` it has, or will get, a scalar head (reward model, critic).

    Raises:
        ModelError: its configuration cannot be read, or its architecture lacks something.
    """
    model_config = load_model_config(path, config)
    reason = _find_obstacle(model_config, config, attention, scalar_head)
    if reason:
        raise ModelError(
            f"{path}: the architecture {model_config.model_type} is not supported yet: {reason}; "
            "choose another decoder-only architecture"
            + (", or call this one in a function of ppo.reward_functions" if scalar_head else "")
        )
    return model_config


def check_positions(
    path: str,
    model_config: PretrainedConfig,
    max_length: int,
    keys: str = "data.max_prompt_length + data.max_completion_length",
) -> None:
    """Raise `ModelError` if sequences of `max_length` tokens, the value of `keys`, are too long for the model."""
    positions = get_max_positions(model_config)
    if positions is not None and max_length > positions:
        raise ModelError(
            f"{path}: has {positions} positions, fewer than {keys} = {max_length}; "
            "lower that or choose a model with more"
        )


def load_model_config(path: str, config: ModelConfig) -> PretrainedConfig:
    """Return the configuration of the model at `path`; raise `ModelError` if it cannot be read."""
    from transformers import AutoConfig

    gguf = {"gguf_file": config.gguf_file} if config.gguf_file and path == config.path else {}
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, **gguf)
        check_layers(model_config)
    except Exception as error:
        raise load_error(path, "its configuration cannot be read", error, "check config.json") from error
    return model_config


def check_layers(model_config: PretrainedConfig) -> None:
    """Raise `ValueError` if a configuration has so many layers that building them would not end."""
    layers = getattr(model_config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        raise ValueError(f"{layers:,} layers, more than {_MAX_LAYERS:,}")


def load_generation_config(path: str, config: ModelConfig) -> GenerationConfig:
    """Return the generation settings of the model at `path`, above all the tokens that end its replies.

    Raises:
        ModelError: they, or without them its configuration, cannot be read.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except Exception as error:
        if isinstance(error, OSError) and not Path(path, "generation_config.json").is_file():
            return GenerationConfig.from_model_config(load_model_config(path, config))
        what = "its generation settings cannot be read"
        raise load_error(path, what, error, "check generation_config.json") from error


def get_max_positions(config: PretrainedConfig) -> int | None:
    """Return the largest number of tokens in a sequence; None if the configuration has no limit."""
    text_config = config.get_text_config(decoder=True)
    limits = (getattr(text_config, name, None) for name in _POSITIONS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def choose_attention(accelerator: Accelerator, path: str | None, config: ModelConfig) -> AttentionChoice:
    """Choose the best implementation that the model at `path` supports; the embedded model if that is None.

    A backend lists implementations, best first; `eager`, which every architecture has, is the last one.

    Raises:
        ModelError: its configuration cannot be read, or no implementation of the backend supports it.
        AcceleratorError: the backend has no implementation.
    """
    if path is None:
        from transformers import LlamaConfig, LlamaForCausalLM

        return choose_attention_for(accelerator, LlamaConfig(), EMBEDDED_MODEL, LlamaForCausalLM)
    check_model_folder(path)
    check_available(path, "model")
    model_config = load_model_config(path, config)
    return choose_attention_for(accelerator, model_config, path, find_model_class(model_config, config))


def choose_attention_for(accelerator: Accelerator, model_config: Any, name: str, architecture: Any) -> AttentionChoice:
    """Choose as `choose_attention` does, for a configuration and its class, None if only loading shows that.

    `name` names the model in messages.
    """
    refused: dict[str, str] = {}
    kernels = accelerator.kernels
    for implementation, attention in kernels.usable("attention"):
        reason = explain_missing_attention(architecture, attention) or kernels.refusal(implementation, model_config)
        if not reason:
            return AttentionChoice(attention, refused)
        refused[attention] = reason
    first = kernels.get("attention", required=True)
    raise ModelError(
        f"{name}: no attention implementation of {accelerator.name} supports this model ({_join_reasons(refused)}); "
        f"choose a model that supports {first}"
    )


def describe_attention(choices: Mapping[str, AttentionChoice]) -> str | None:
    """Return one line about the models, by name, that did not get the backend's first choice; None if all did."""
    by_reasons: dict[str, list[str]] = {}
    for model, choice in choices.items():
        if choice.refused:
            by_reasons.setdefault(f"({_join_reasons(choice.refused)})", []).append(f"{choice.name} for {model}")
    parts = [f"{', '.join(models)} {reasons}" for reasons, models in by_reasons.items()]
    return f"attention: {'; '.join(parts)}" if parts else None


def _join_reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in refused.items())


def find_model_class(model_config: PretrainedConfig, config: ModelConfig) -> Any:
    """Return the class of the language model that a configuration describes; None if only loading shows it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if config.trust_remote_code and (classes := getattr(model_config, "auto_map", None)):
        try:
            return get_class_from_dynamic_module(classes["AutoModelForCausalLM"], model_config.name_or_path)
        except Exception:  # loading reports it
            return None
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)


def explain_missing_attention(architecture: Any, attention: str) -> str:
    """Return why a class of transformers does not support an attention implementation; empty if it does.

    The class None, which is known only after loading, supports all.
    """
    if architecture is None or attention == "eager":
        return ""
    if "flash" in attention:
        supported = architecture._supports_flash_attn
    elif attention in ("sdpa", "flex_attention"):
        supported = architecture._supports_sdpa if attention == "sdpa" else architecture._supports_flex_attn
    elif architecture._supports_attention_backend or architecture._can_set_attn_implementation():
        return ""
    else:  # building it would fail (Falcon), or silently use another one (BLOOM)
        return f"{architecture.__name__} takes none that is registered with transformers"
    return "" if supported else f"{architecture.__name__} has none"


def _explain_missing_cache(model_config: Any, language_model: Any) -> str:
    """Return why a model cannot generate with a static cache; empty if it can."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    try:
        layers = StaticCache(config=model_config, max_cache_len=1).layers
    except Exception as error:
        return f"no static cache can be made for it ({summarize_error(error)})"
    if not any(isinstance(layer, StaticLayer) for layer in layers):
        return "it keeps a recurrent state and no keys and values, so a static cache cannot hold its past"
    if language_model._can_compile_fullgraph or model_config.model_type in STATIC_CACHE_WORKS:
        return ""
    if getattr(model_config, "is_decoder", True) is False:  # BERT and its relatives, which see later tokens
        return "it is no decoder-only language model"
    if language_model._is_stateful:
        return "it keeps a recurrent state in a separate cache, which a static cache cannot hold"
    return "transformers' code of it cannot generate with a static cache"


def _find_obstacle(model_config: Any, config: ModelConfig, attention: str, scalar_head: bool) -> str | None:
    """Return what the architecture lacks; None if nothing."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.trust_remote_code and getattr(model_config, "auto_map", None):
        return None  # its classes are in code that only loading runs
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if language_model is None or model_config.is_encoder_decoder:
        return "it is no decoder-only language model"
    if reason := explain_missing_attention(language_model, attention):
        return f"of {attention} attention, {reason}"
    if reason := _explain_missing_cache(model_config, language_model):
        return reason
    if scalar_head:
        from rlhf.models.scalar_head import build_scalar_head_class

        try:
            build_scalar_head_class(model_config)
        except ValueError as error:
            return str(error)
    return None
