"""A toy-size copy of a model: the same architecture, vocabulary and tokenizer, with random weights of a few megabytes.

Which operators run, and on which shapes beside the hidden sizes, is what the large model's are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError

LAYERS, HEADS, HIDDEN, INNER = 2, 4, 64, 128


def toy_copy(model: ModelConfig, folder: Path) -> ModelConfig:
    """Save a toy of `model` into `folder`; gives the configuration that loads it.

    Raises:
        ModelError: the model's configuration or its tokenizer cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    assert model.path is not None
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if model.gguf_file:
        options["gguf_file"] = model.gguf_file
    try:
        config = AutoConfig.from_pretrained(model.path, **options)
        shrink(config)
        AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code).save_pretrained(folder)
        if model.tokenizer is None:
            AutoTokenizer.from_pretrained(model.path, **options).save_pretrained(folder)
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{model.path}: no toy copy can be made of it ({line}); check model.path") from error
    return model.model_copy(update={"path": str(folder), "gguf_file": None})


def shrink(config: Any) -> None:
    """Make a transformers configuration small in place; what decides on operators and masks stays."""
    key_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    grouped = key_heads not in (None, config.num_attention_heads)
    layers = min(LAYERS, config.num_hidden_layers)
    for name, value in {
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "intermediate_size": INNER,
        "ffn_dim": INNER,
        "ffn_hidden_size": INNER,
        "n_inner": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2 if grouped else HEADS,
        "num_kv_heads": HEADS // 2 if grouped else HEADS,  # Falcon's word
        "head_dim": HIDDEN // HEADS,
        "rotary_dim": HIDDEN // HEADS // 2,
    }.items():
        # Some configurations leave a size to be derived from others; only what they state is set.
        if getattr(config, name, None) is not None and not isinstance(getattr(type(config), name, None), property):
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))  # one layer of each kind at least
        config.num_hidden_layers = max(layers, len(kinds))
        config.layer_types = (kinds * config.num_hidden_layers)[: config.num_hidden_layers]
