"""A LoRA adapter alone, as peft saves it: which model it was trained on, and that model with the adapter in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.errors import ModelError
from rlhf.models.folder import check_model_folder
from rlhf.utils.atomic_io import read_json

_CONFIG = "adapter_config.json"


def base_of(folder: Path | str) -> str:
    """The model to be loaded for `folder`: the one that the adapter in it was trained on, or else what it holds itself.

    Raises:
        ModelError: the adapter does not name its model, or the model's folder lacks something.
    """
    base, config = str(folder), Path(folder) / _CONFIG
    if config.is_file():
        base = str(read_json(config).get("base_model_name_or_path") or "")
        if not base:
            raise ModelError(f"{folder}: this adapter names no model; put its base_model_name_or_path into {_CONFIG}")
    check_model_folder(base)
    return base


def merged(model: Any, folder: str) -> Any:
    """`model`, in float32, with the adapter in `folder` added to its weights: what a stage leaves as merged model.

    Raises:
        ModelError: it is another model's adapter, or cannot be read.
    """
    from peft import PeftModel

    from accelerators import find_out_of_memory
    from rlhf.models.hf_errors import reason

    try:
        return PeftModel.from_pretrained(model, folder).merge_and_unload()
    except Exception as error:
        if find_out_of_memory(error):
            raise
        raise ModelError(
            f"{folder}: this adapter cannot be put into {model.name_or_path} ({reason(error).rstrip(':')}); "
            f"check its files, and base_model_name_or_path in {_CONFIG}"
        ) from error
