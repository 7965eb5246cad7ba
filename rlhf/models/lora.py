"""LoRA (arXiv:2106.09685): trainable low-rank adapters on the linear layers of a frozen model, made by peft.

A loaded model and the `lora` section flow in; `add_adapters` changes the model in place. Afterwards it is read
in three ways: with its adapters (training, scoring), `without_adapters` (the model that training started
from), and with `merged_adapters` (plain weights, for generation and export).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.config import LoraConfig
from rlhf.errors import ConfigError, ModelError
from rlhf.models.final_norm import was_reset

_ADAPTER = "default"


def add_adapters(model: Any, config: LoraConfig, *, seed: int) -> None:
    """Freeze a model of transformers, but for adapters on its linear layers, and its scalar head, if it has one.

    The norm before the head is trained too where it was reset under a new one.

    One factor of each adapter begins at zero, so the model computes what it did before, bit for bit.

    Args:
        seed: draws the other factor; the same on every rank.

    Raises:
        ConfigError: `target_modules` names a layer that is not there.
        ModelError: the model has no linear layers.
    """
    model.requires_grad_(False)
    transformer = model.base_model  # without the output embedding and the scalar head
    targets = _targets(transformer, config.target_modules)
    torch.manual_seed(seed)
    inject_adapter_in_model(
        PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=list(targets),
            fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in targets.values()),
        ),
        transformer,
        adapter_name=_ADAPTER,
    )
    for name, module in model.named_modules():
        if name == "score" or was_reset(module):
            module.requires_grad_(True)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model computes what its frozen weights alone do; for blocks without gradients. No adapters: no change.

    The adapters run, and count for nothing: the same layers in the same order as with them are the same graph to an
    accelerator that compiles, and the same order of weights to gather at ZeRO-3.
    """
    layers = _adapted_layers(model)
    for layer in layers:
        layer.set_scale(_ADAPTER, 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_ADAPTER, 1)


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Adapters are added to the weights they adapt, in place, and those are restored bit for bit afterwards.

    Sums are float32, rounded once to the weights' type. Meanwhile the frozen weights of the adapted layers
    exist twice on the device: nearly a second model, where all linear layers are adapted. The weights must be
    whole (`TrainingEngine.whole_weights`), and autocast off when the block is entered.
    """
    layers = _adapted_layers(model)
    frozen: list[Tensor] = []
    try:
        with torch.no_grad():
            for layer in layers:
                weight = layer.get_base_layer().weight
                total = merged_weight(layer)
                frozen.append(weight.clone())
                weight.copy_(total)
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        with torch.no_grad():
            for layer, weight in zip(layers, frozen):
                layer.get_base_layer().weight.copy_(weight)


def merged_weight(layer: Any) -> Tensor:
    """What an adapted layer's weight is with its adapter, in float32; both must be whole."""
    adapter = layer.lora_B[_ADAPTER].weight.float() @ layer.lora_A[_ADAPTER].weight.float()
    if layer.fan_in_fan_out:
        adapter = adapter.T
    return layer.get_base_layer().weight.float() + layer.scaling[_ADAPTER] * adapter


def check_targets(model: Any, config: LoraConfig) -> None:
    """Raise as `add_adapters` where the model has no layers that `config` could adapt; changes nothing."""
    _targets(model.base_model, config.target_modules)


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state under the names that it had before `add_adapters`, the adapters' own left out."""
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }


def _targets(transformer: nn.Module, wanted: str | tuple[str, ...]) -> dict[str, nn.Module]:
    """Linear layers by their path: those whose path is or ends in a wanted name, or all."""
    linear = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    if not linear:
        raise ModelError(f"lora.rank: {type(transformer).__name__} has no linear layers to adapt; set it to 0")
    if isinstance(wanted, str):
        return linear
    for name in wanted:
        if not any(_ends_in(path, name) for path in linear):
            known = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
            raise ConfigError(f"lora.target_modules: no linear layer is named {name!r}; there are {known}")
    return {path: layer for path, layer in linear.items() if any(_ends_in(path, name) for name in wanted)}


def _ends_in(path: str, name: str) -> bool:
    return f".{path}".endswith(f".{name}")


def _adapted_layers(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
