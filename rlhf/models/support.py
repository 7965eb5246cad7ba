"""What a model must be able to do, found out from its configuration before any weight is read.

The name of a model flows in; an error of one line comes out where a stage would fail on it, or do something else
than it says.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.reasons import reason, unreachable

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")


def check_support(path: str, config: ModelConfig, *, attention: str, scalar_head: bool = False) -> PretrainedConfig:
    """The configuration of the model at `path`, if that can be trained.

    Args:
        attention: transformers' name of the attention implementation that it will run with.
        scalar_head: whether the model is, or will become, one with a scalar head (reward model, critic).

    Raises:
        ModelError: its configuration cannot be read, or its architecture lacks something.
    """
    found = read_config(path, config)
    why = _missing(found, config, attention, scalar_head)
    if why:
        raise ModelError(
            f"{path}: the architecture {found.model_type} is not supported yet: {why}; "
            "choose another decoder-only architecture"
        )
    return found


def check_positions(path: str, found: PretrainedConfig, max_length: int) -> None:
    """Raise `ModelError` where sequences of `max_length` tokens, prompt and completion, have no room in the model."""
    positions = max_positions(found)
    if positions is not None and max_length > positions:
        raise ModelError(
            f"{path}: has {positions} positions, fewer than data.max_prompt_length + data.max_completion_length "
            f"= {max_length}; lower these or choose a model with more"
        )


def read_config(path: str, config: ModelConfig) -> PretrainedConfig:
    """The configuration of the model at `path`.

    Raises:
        ModelError: it cannot be read.
    """
    from transformers import AutoConfig

    gguf = {"gguf_file": config.gguf_file} if config.gguf_file and path == config.path else {}
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, **gguf)
    except Exception as error:
        if not Path(path).exists():
            raise unreachable(path, error) from error
        raise ModelError(f"{path}: its configuration cannot be read ({reason(error)}); check config.json") from error


def generation_settings(path: str, config: ModelConfig) -> GenerationConfig:
    """How the model at `path` generates: what ends its replies, above all."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # it has no settings of its own
        return GenerationConfig.from_model_config(read_config(path, config))


def max_positions(config: PretrainedConfig) -> int | None:
    """The most tokens a sequence may have; None where the configuration names no limit."""
    text = config.get_text_config(decoder=True)
    found = (getattr(text, name, None) for name in _POSITIONS)
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)


def _missing(found: Any, config: ModelConfig, attention: str, scalar_head: bool) -> str | None:
    """What the architecture lacks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.trust_remote_code and getattr(found, "auto_map", None):
        return None  # its classes are in code that only loading runs
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), None)
    if language_model is None or found.is_encoder_decoder:
        return "it is no decoder-only language model"
    if attention != "eager" and not language_model._supports_sdpa:
        return f"transformers has no {attention} attention for it"
    if not language_model._can_compile_fullgraph:
        return "it cannot generate with a static cache"
    if scalar_head:
        from rlhf.models.scalar_head import made_class

        try:
            made_class(found)
        except ValueError as error:
            return str(error)
    return None
