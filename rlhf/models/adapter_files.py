"""Read LoRA adapters from a folder in peft's format: `adapter_config.json`, `adapter_model.safetensors`."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig as PeftConfig
from safetensors.torch import load_file
from torch import Tensor

from rlhf.models.lora import TRAINED_ADAPTER

_PREFIX = "base_model.model."  # what peft wraps a model in
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def read_adapter_config(path: Path) -> PeftConfig:
    """What peft is told of the adapter at `path`; modules that were trained whole are ordinary ones to it."""
    config = PeftConfig.from_pretrained(str(path))
    config.modules_to_save, config.bias, config.inference_mode = None, "none", False
    return config


def read_adapter_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of the adapter at `path` as a model has them whose adapters are called `name`."""
    found = load_file(path / ADAPTER_WEIGHTS)
    return {
        key.removeprefix(_PREFIX)
        .replace(".lora_A.weight", f".lora_A.{name}.weight")
        .replace(".lora_B.weight", f".lora_B.{name}.weight"): tensor
        for key, tensor in found.items()
    }


def to_peft_name(name: str) -> str:
    """Return the name that peft gives to the trained parameter `name` in its files."""
    return _PREFIX + name.replace(f".{TRAINED_ADAPTER}.", ".")
