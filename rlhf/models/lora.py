"""LoRA (arXiv:2106.09685): trainable low-rank adapters on the linear layers of a frozen model, made by peft.

A loaded model and the `lora` section flow in; `add_adapters` changes the model in place. Afterwards it is read
in three ways: with its adapters (training, scoring), `without_adapters` (the model that training started
from), and with `merged_adapters` (plain weights, for generation). A layer may have two: below the one that is
trained, a frozen one that came with the model (PPO's critic has the reward model's, see `shared_base`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.config.schema import LoraConfig
from rlhf.errors import ConfigError, ModelError
from rlhf.models.scalar_head import was_reset

TRAINED_ADAPTER = "default"
"""peft's name of the adapters that are trained."""
FROZEN_ADAPTER = "reward"
"""Of those that came with the model."""

_PEFT_PREFIX = "base_model.model."  # what peft wraps a model in
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_LARGEST_COPY = 0.1  # of the device's memory, for `lora.merge: auto`


def add_adapters(model: Any, config: LoraConfig, *, seed: int) -> None:
    """Freeze a model of transformers, but for new adapters on its linear layers, and its scalar head, if it has one.

    The norm before the head is trained too where it was reset under a new one, and so is what `also_train` names.

    One factor of each adapter begins at zero, so the model computes what it did before, bit for bit. Both are float32,
    whatever the model's numbers are: an engine's master weights begin with them as they were drawn.

    Args:
        seed: draws the other factor; the same on every rank.

    Raises:
        ConfigError: `target_modules` names a layer that is not there, or matches none.
        ModelError: the model has no linear layers.
    """
    model.requires_grad_(False)
    torch.manual_seed(seed)
    inject_adapters(model, TRAINED_ADAPTER, build_peft_config(model, config))
    drawn = torch.Generator().manual_seed(seed)
    for layer in find_adapted_layers(model).values():
        if TRAINED_ADAPTER in layer.lora_A:
            for factor in (layer.lora_A[TRAINED_ADAPTER], layer.lora_B[TRAINED_ADAPTER]):
                factor.weight = nn.Parameter(torch.zeros(factor.out_features, factor.in_features, dtype=torch.float32))
            nn.init.kaiming_uniform_(
                layer.lora_A[TRAINED_ADAPTER].weight, a=math.sqrt(5), generator=drawn
            )  # as peft does
    for parameter in _trained_whole(model, config):
        parameter.requires_grad_(True)


def build_peft_config(model: Any, config: LoraConfig) -> PeftConfig:
    """What peft is told of adapters on `model`.

    Raises:
        ConfigError, ModelError: as `add_adapters`.
    """
    targets = _targets(model, config.target_modules)
    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(targets),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in targets.values()),
    )


def inject_adapters(model: Any, name: str, config: PeftConfig) -> None:
    """Add adapters called `name` to layers of `model`; those called TRAINED_ADAPTER are trained."""
    vars(model.base_model).pop("peft_config", None)  # of earlier adapters: peft 0.21 warns of it, and needs it not
    inject_adapter_in_model(config, model.base_model, adapter_name=name)
    for layer in find_adapted_layers(model).values():
        layer.set_adapter([key for key in (FROZEN_ADAPTER, TRAINED_ADAPTER) if key in layer.lora_A])
        for key, factor in (*layer.lora_A.items(), *layer.lora_B.items()):
            factor.requires_grad_(key == TRAINED_ADAPTER)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model computes what its frozen weights alone do; for blocks without gradients. No adapters: no change.

    The adapters run, and count for nothing: the same layers in the same order as with them are the same graph to an
    accelerator that compiles, and the same order of weights to gather at ZeRO-3. What `also_train` names stays as
    training has made it: a model with such parts has a reference of its own.
    """
    layers = find_adapted_layers(model).values()
    for layer in layers:
        layer.set_scale(TRAINED_ADAPTER, 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(TRAINED_ADAPTER, 1)


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Adapters are added to the weights they adapt, in place, and those are restored bit for bit afterwards.

    Sums are float32, rounded once to the weights' type. Meanwhile the frozen weights of the adapted layers
    exist twice on the device: nearly a second model, where all linear layers are adapted. The weights must be
    whole (`TrainingEngine.whole_weights`), and autocast off when the block is entered. Quantized layers take nothing
    in, and stay as they are.
    """
    layers = [
        layer for layer in find_adapted_layers(model).values() if layer.get_base_layer().weight.is_floating_point()
    ]
    frozen: list[Tensor] = []
    try:
        with torch.no_grad():
            for layer in layers:
                weight = layer.get_base_layer().weight
                total = compute_merged_weight(layer)
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


@contextmanager
def adapters_for_rollout(model: nn.Module, config: LoraConfig, memory: int) -> Iterator[None]:
    """Merge the adapters if `should_merge`; otherwise they run next to the weights, which then need no second copy."""
    if should_merge(model, config, memory)[0]:
        with merged_adapters(model):
            yield
    else:
        yield


def should_merge(model: nn.Module, config: LoraConfig, memory: int) -> tuple[bool, str]:
    """Whether adapters are merged for rollouts, or run beside the weights; and, for `auto`, why they are not.

    Args:
        memory: bytes that the device has; beside the weights, merging needs as much as the adapted ones take.
    """
    weights = [getattr(layer.get_base_layer(), "weight", None) for layer in find_adapted_layers(model).values()]
    if not all(weight is not None and weight.is_floating_point() for weight in weights):
        return False, "the frozen weights are quantized"
    if config.merge != "auto":
        return config.merge, ""
    # A parameter partitioned by ZeRO-3 is empty; `ds_numel` counts its numbers.
    copied = sum(
        getattr(weight, "ds_numel", weight.numel()) * weight.element_size() for weight in weights if weight is not None
    )
    if copied <= _LARGEST_COPY * memory:
        return True, ""
    return False, (
        f"a copy of the adapted weights would take {copied / 2**30:.1f} of {memory / 2**30:.1f} GiB; "
        "lora.merge=true merges them all the same"
    )


def check_adapter_targets(model: Any, config: LoraConfig) -> None:
    """Raise as `add_adapters` where the model has no layers that `config` could adapt; changes nothing."""
    _targets(model, config.target_modules)


def find_adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with adapters, by the path that they had without."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def compute_adapter_update(layer: Any) -> Tensor:
    """What the adapters of a layer add to its weight, in float32."""
    total: Tensor | None = None
    for name in layer.active_adapters:
        adapter = layer.lora_B[name].weight.float() @ layer.lora_A[name].weight.float()
        scaled = layer.scaling[name] * adapter
        total = scaled if total is None else total + scaled
    assert total is not None  # a layer is adapted by at least one
    return total.T if layer.fan_in_fan_out else total


def compute_merged_weight(layer: Any) -> Tensor:
    """The layer's frozen weight and its adapters, in float32."""
    weight: Tensor = layer.get_base_layer().weight
    return weight.float() + compute_adapter_update(layer)


def to_plain_name(name: str) -> str:
    """A tensor's name before adapters were added."""
    return name.replace(".base_layer.", ".")


def list_trained_modules(model: nn.Module) -> list[str]:
    """Paths of the modules, adapters aside, all of whose own parameters are trained: the scalar head, norms, ..."""
    found = []
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and all(parameter.requires_grad for parameter in own) and ".lora_" not in path:
            found.append(to_plain_name(f"{path}.").removesuffix("."))
    return found


def read_adapter_config(path: Path) -> PeftConfig:
    """What peft is told of the adapter at `path`; modules that were trained whole are ordinary ones to it."""
    config = PeftConfig.from_pretrained(str(path))
    config.modules_to_save, config.bias, config.inference_mode = None, "none", False
    return config


def read_adapter_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of the adapter at `path` as a model has them whose adapters are called `name`."""
    found = load_file(path / ADAPTER_WEIGHTS)
    return {
        key.removeprefix(_PEFT_PREFIX)
        .replace(".lora_A.weight", f".lora_A.{name}.weight")
        .replace(".lora_B.weight", f".lora_B.{name}.weight"): tensor
        for key, tensor in found.items()
    }


def to_peft_name(name: str) -> str:
    """Return the name that peft gives to the trained parameter `name` in its files."""
    return _PEFT_PREFIX + name.replace(f".{TRAINED_ADAPTER}.", ".")


def _trained_whole(model: Any, config: LoraConfig) -> Iterator[nn.Parameter]:
    """Parameters that are trained beside the adapters."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    for path, module in model.named_modules():
        if ".lora_" in path:
            continue
        norm = "norms" in config.also_train and "Norm" in type(module).__name__
        embedding = "embeddings" in config.also_train and any(module is each for each in embeddings)
        whole = norm or embedding or path == "score" or was_reset(module)
        for name, parameter in module.named_parameters(recurse=path == "score"):
            if whole or ("biases" in config.also_train and name == "bias"):
                yield parameter


def _targets(model: Any, wanted: str | tuple[str, ...]) -> dict[str, nn.Module]:
    """Linear layers by their path below the transformer: those that are wanted by the end of it, or by `re:`, or all.

    The output embedding and the scalar head are not of the transformer.
    """
    transformer = model.base_model
    linear = _linear_layers(transformer)
    if not linear:
        raise ModelError(f"lora.rank: {type(transformer).__name__} has no linear layers to adapt; set it to 0")
    if isinstance(wanted, str):
        return linear
    prefix = "" if transformer is model else f"{model.base_model_prefix}."
    found: set[str] = set()
    for name in wanted:
        here = {path for path in linear if _is_wanted(path, name, prefix)}
        if not here and name.startswith("re:"):
            example = prefix + next(iter(linear))
            raise ConfigError(
                f"lora.target_modules: {name!r} matches the whole path of no linear layer; one of them is {example}"
            )
        if not here:
            known = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
            raise ConfigError(f"lora.target_modules: no linear layer is named {name!r}; there are {known}")
        found |= here
    return {path: layer for path, layer in linear.items() if path in found}


def _linear_layers(transformer: Any) -> dict[str, nn.Module]:
    """Those that adapters can be put on, by path.

    Not those that do something else besides (routers of experts), that share their weight with another (adapters of
    both would be merged into one), nor, of peft 0.21, what it takes for parts of stacked experts or refuses.
    """
    found = {
        name.removesuffix(".base_layer"): layer
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and ".lora_" not in name
        if type(layer).__name__.endswith(("Linear", "Conv1D"))
    }
    uses = Counter(id(layer._parameters.get("weight")) for layer in found.values())
    stacked = any(len(getattr(parameter, "ds_shape", parameter.shape)) == 3 for parameter in transformer.parameters())
    refused = _OF_EXPERTS if stacked else ()
    if getattr(getattr(transformer, "config", None), "model_type", None) in _MAMBA:
        refused = (*refused, "out_proj")
    return {
        path: layer
        for path, layer in found.items()
        if (uses[id(layer._parameters.get("weight"))] == 1 or "weight" not in layer._parameters)
        and path.rpartition(".")[2] not in refused
    }


def _is_wanted(path: str, name: str, prefix: str) -> bool:
    if name.startswith("re:"):
        return re.fullmatch(name.removeprefix("re:"), prefix + path) is not None
    return f".{path}".endswith(f".{name}")
