"""Reward models as DeepSpeed-Chat saves them: recognized by their keys, and read as the family's sequence classifier.

Such a folder has the `config.json` of the language model that training started from and, in `pytorch_model.bin`, the
state of DeepSpeed-Chat's own module: a backbone called `rwtransformer` and a linear layer `v_head` without bias.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_BACKBONE = r"^(?:module\.)*rw(?:transformer|tranrsformer)\."  # the second is an early misspelling
KEY_MAPPING = {_BACKBONE: "", r"^(?:module\.)*v_head\.": "score."}
"""Its names -> those of transformers, for `key_mapping` of `from_pretrained`; wrappers add `module.`."""


def is_deepspeed_chat(names: Iterable[str]) -> bool:
    """Return True if a checkpoint whose tensors have these names is such a reward model."""
    return any(re.match(_BACKBONE, name) for name in names)


def to_deepspeed_chat_name(name: str, prefix: str) -> str:
    """Return DeepSpeed-Chat's name of a tensor of the sequence classifier whose backbone is called `prefix`."""
    return "v_head.weight" if name == "score.weight" else f"rwtransformer.{name.removeprefix(f'{prefix}.')}"


def find_unread_token(config: Any, eos: int) -> int | None:
    """Return the token whose score such a model has not been trained for; None if there is none.

    DeepSpeed-Chat reads the score before the first padding. It pads with the end-of-sequence token, whose score has
    therefore not been trained, except for Llama, whose tokenizer gets a separate pad token.
    """
    return None if config.model_type == "llama" else eos
