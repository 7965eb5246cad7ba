"""Reward models as DeepSpeed-Chat saves them: recognized by their keys, and read as the family's sequence classifier.

Such a folder holds the `config.json` of the language model that training started from and, in `pytorch_model.bin`, the
state of a module of its own: a backbone called `rwtransformer` and above it a linear layer `v_head` without bias.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_BACKBONE = r"^(?:module\.)*rw(?:transformer|tranrsformer)\."  # the second is how it was written at first
KEY_MAPPING = {_BACKBONE: "", r"^(?:module\.)*v_head\.": "score."}
"""Its names -> those of transformers, as `key_mapping` of `from_pretrained` takes them; `module.` is of a wrapper."""


def is_deepspeed_chat(names: Iterable[str]) -> bool:
    """Whether a checkpoint whose tensors have these names is such a reward model."""
    return any(re.match(_BACKBONE, name) for name in names)


def to_deepspeed_chat_name(name: str, prefix: str) -> str:
    """What DeepSpeed-Chat calls a tensor of the sequence classifier whose backbone is called `prefix`."""
    return "v_head.weight" if name == "score.weight" else f"rwtransformer.{name.removeprefix(f'{prefix}.')}"


def find_unread_token(config: Any, eos: int) -> int | None:
    """The token at which such a model's score of a text is not read but at the one before; None: there is none.

    DeepSpeed-Chat reads the score before the first padding. Padding is the end-of-sequence token, whose score has
    therefore not been trained, but for Llama, whose tokenizer gets a pad token of its own.
    """
    return None if config.model_type == "llama" else eos
