"""Turn a library's error about a model into one sentence, without the library's advice."""

from __future__ import annotations

import json
import re

from rlhf.errors import ModelError

# Patterns of libraries' messages -> their meaning; \1 is the first group.
_MEANINGS = (
    (r"model type `(.*?)` but Transformers does not recognize", r"transformers does not know the model type '\1'"),
    (r"Unrecognized model in .*Should have a `model_type`", "config.json names no model_type"),
    (r"config file at '(?:.*/)?(.*?)' is not a valid JSON", r"\1 is not valid JSON"),
    (r"Error no file named (.*?),? found in directory", r"there is no \1"),
    (r"ignore_mismatched_sizes", "the weights have other shapes than config.json says"),
    (r"deserializing header: (.*)", r"a .safetensors file is incomplete or damaged: \1"),
    (r"PytorchStreamReader failed|invalid load key|unexpected EOF", "a .bin file is incomplete or damaged"),
    (r"(?s)instantiate the backend tokenizer from one of.*sentencepiece", "it needs the package sentencepiece"),
    (r"couldn't find them in the cached files", "the copy on this machine is incomplete, and the hub was not reached"),
)
_ADVICE = re.compile(
    r"(?<=[.!?]) +(?=(?:Check|Consider|Example|For|If|Install|Make|Otherwise|Please|See|This could|Try|Use|You) )"
)


def summarize_error(error: BaseException) -> str:
    """Return what is wrong in one sentence, without what to do."""
    text = f"KeyError: {error}" if isinstance(error, KeyError) else str(error).strip()
    if isinstance(error, json.JSONDecodeError):
        return f"one of its files is not valid JSON: {text}"
    for pattern, meaning in _MEANINGS:
        if match := re.search(pattern, text):
            return match.expand(meaning)
    return _ADVICE.split((text or type(error).__name__).splitlines()[0])[0].rstrip(".!")


def hub_load_error(path: str, error: BaseException) -> ModelError:
    """Return the error for a name that is no local folder and could not be loaded from the hub."""
    return ModelError(f"{path}: no folder here, and not loaded from the hub ({summarize_error(error)}); check the name")
