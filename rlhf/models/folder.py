"""A model's folder, checked before torch and transformers are loaded to read it."""

from __future__ import annotations

from pathlib import Path

from rlhf.config.paths import is_path, missing_path_hint
from rlhf.errors import ModelError

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")


def check_model_folder(path: str) -> None:
    """Raise `ModelError` where a local folder lacks a configuration or weights; hub names pass."""
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
    has_gguf = any(folder.glob("*.gguf"))
    if not (folder / "config.json").exists() and not has_gguf:
        raise ModelError(f"{path}: holds no config.json; name a folder that save_pretrained wrote")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ModelError(f"{path}: holds no weights (*.safetensors or *.bin); copy them there or name another folder")
