"""LoRA (arXiv:2106.09685): trainable low-rank adapters on the linear layers of a frozen model, created by peft.

`add_adapters` changes a model in place. Afterwards it is used in three ways: with its adapters (training, scoring),
`without_adapters` (the model that training started from), and with `merged_adapters` (plain weights, for generation). A
layer may have two: the trained one, and a frozen one that came with the model (PPO's critic has the reward model's, see
`shared_base`). Adapters in a folder have peft's format: `adapter_config.json`, `adapter_model.safetensors`.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.config.schema import LoraConfig
from rlhf.errors import ConfigError, ModelError
from rlhf.models.scalar_head import was_reset
from rlhf.models.weight_loading import whole_bytes

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

TRAINED_ADAPTER = "default"
"""peft's name of the adapters that are trained."""
FROZEN_ADAPTER = "reward"
"""Our name of the adapters that came with the model."""

_PEFT_PREFIX = "base_model.model."  # what peft wraps a model in
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def add_adapters(model: Any, config: LoraConfig, *, seed: int) -> None:
    """Freeze a model of transformers, except for new adapters on its linear layers, and its scalar head if it has one.

    The norm before the head is trained too if it was reset under a new head, and so are the parts in `also_train`.

    The second factor of each adapter starts at zero, so the model's results do not change by a bit; `seed`, the same on
    every rank, draws the first one, in the range that `init` names. Both are float32, whatever the model's type is: an
    engine's float32 weights start as the factors were drawn.

    Raises:
        ConfigError: `target_modules` names a layer that does not exist, or matches none.
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
            first = layer.lora_A[TRAINED_ADAPTER]
            bound = 1 / math.sqrt(config.rank if config.init == "rank" else first.in_features)
            nn.init.uniform_(first.weight, -bound, bound, generator=drawn)
    for parameter in _find_also_trained(model, config):
        parameter.requires_grad_(True)


def build_peft_config(model: Any, config: LoraConfig) -> PeftConfig:
    """Return peft's configuration of adapters on `model`.

    Raises:
        ConfigError, ModelError: as `add_adapters`.
    """
    from peft import LoraConfig as PeftConfig

    targets = find_adapter_targets(model, config.target_modules)
    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(targets),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in targets.values()),
    )


def inject_adapters(model: Any, name: str, config: PeftConfig) -> None:
    """Add adapters called `name` to layers of `model`; only those called TRAINED_ADAPTER are trained."""
    from peft import inject_adapter_in_model

    vars(model.base_model).pop("peft_config", None)  # peft 0.21 warns about that of earlier adapters
    inject_adapter_in_model(config, model.base_model, adapter_name=name)
    for layer in find_adapted_layers(model).values():
        layer.set_adapter([key for key in (FROZEN_ADAPTER, TRAINED_ADAPTER) if key in layer.lora_A])
        for key, factor in (*layer.lora_A.items(), *layer.lora_B.items()):
            factor.requires_grad_(key == TRAINED_ADAPTER)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone in this block, which must not need gradients.

    The adapters run with a factor of 0: the same layers in the same order are the same graph for an accelerator that
    compiles, and the same order of weights to gather at ZeRO-3. Parts in `also_train` keep their trained weights: a
    model with such parts needs a separate reference.
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
    """Add adapters to the weights of their layers in this block, in place; restore those bit for bit afterwards.

    Sums are float32, rounded once to the weights' type. Meanwhile the frozen weights of the adapted layers exist twice
    on the device: nearly a second model, if all linear layers are adapted. The weights must be whole
    (`TrainingEngine.whole_weights`), and autocast off at the start. Quantized layers are not merged.
    """
    layers = [
        layer for layer in find_adapted_layers(model).values() if layer.get_base_layer().weight.is_floating_point()
    ]
    frozen: list[Tensor] = []
    try:
        with torch.no_grad():
            for layer in layers:  # all copies first: next to sums in float32 they would leave gaps in the memory
                frozen.append(layer.get_base_layer().weight.clone())
            for layer in layers:
                layer.get_base_layer().weight.copy_(compute_merged_weight(layer))
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
    with merged_adapters(model) if should_merge(model, config, memory)[0] else nullcontext():
        yield


def should_merge(model: nn.Module, config: LoraConfig, memory: int) -> tuple[bool, str]:
    """Return (True if adapters are merged for rollouts, the reason why they run next to the weights instead).

    Merging needs as much `memory`, the device's in bytes, again as the adapted weights take.
    """
    weights = [getattr(layer.get_base_layer(), "weight", None) for layer in find_adapted_layers(model).values()]
    if not all(weight is not None and weight.is_floating_point() for weight in weights):
        return False, "the frozen weights are quantized"
    copied = sum(whole_bytes(weight) for weight in weights if weight is not None)
    if config.merges(copied, memory):
        return True, ""
    return False, "" if config.merge is False else (
        f"a copy of the adapted weights would take {copied / 2**30:.1f} of {memory / 2**30:.1f} GiB; "
        "lora.merge=true merges them anyway"
    )


def is_adapted(module: nn.Module) -> bool:
    """Return True if peft has given the layer adapters; it does not import peft, which is slow and seldom needed."""
    lora = sys.modules.get("peft.tuners.lora")  # without it no layer has any
    return lora is not None and isinstance(module, lora.LoraLayer)


def find_adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters, by their paths."""
    return {path: layer for path, layer in model.named_modules() if is_adapted(layer)}


def compute_adapter_update(layer: Any, rows: slice = slice(None)) -> Tensor:
    """Return the sum of a layer's adapters, which is added to `rows` of its weight, in float32: a new tensor."""
    total: Tensor | None = None
    for name in layer.active_adapters:
        left, right = layer.lora_B[name].weight, layer.lora_A[name].weight
        left, right = (left, right[:, rows]) if layer.fan_in_fan_out else (left[rows], right)
        adapter = left.float() @ right.float()
        scaled = adapter.mul_(layer.scaling[name])  # in place: a weight in float32 is large
        total = scaled if total is None else total.add_(scaled)
    assert total is not None  # an adapted layer has at least one
    return total.T if layer.fan_in_fan_out else total


def compute_merged_weight(layer: Any, rows: slice = slice(None)) -> Tensor:
    """Return `rows` of the sum of a layer's frozen weight and its adapters, in float32."""
    weight: Tensor = layer.get_base_layer().weight
    return compute_adapter_update(layer, rows).add_(weight[rows]).contiguous()  # without another float32 copy


def to_plain_name(name: str) -> str:
    """Return a tensor's name before adapters were added."""
    return name.replace(".base_layer.", ".")


def list_trained_modules(model: nn.Module) -> list[str]:
    """Return the paths of modules, except adapters, all of whose direct parameters are trained (head, norms)."""
    paths = []
    for path, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if parameters and all(parameter.requires_grad for parameter in parameters) and ".lora_" not in path:
            paths.append(to_plain_name(f"{path}.").removesuffix("."))
    return paths


def read_adapter_config(path: Path) -> PeftConfig:
    """Return peft's configuration of the adapter at `path`, without the modules that were trained whole."""
    from peft import LoraConfig as PeftConfig

    config = PeftConfig.from_pretrained(str(path))
    config.modules_to_save, config.bias, config.inference_mode = None, "none", False
    return config


def read_adapter_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of the adapter at `path` under the names in a model whose adapters are called `name`."""
    tensors = load_file(path / ADAPTER_WEIGHTS)
    return {
        key.removeprefix(_PEFT_PREFIX)
        .replace(".lora_A.weight", f".lora_A.{name}.weight")
        .replace(".lora_B.weight", f".lora_B.{name}.weight"): tensor
        for key, tensor in tensors.items()
    }


def to_peft_name(name: str) -> str:
    """Return the name that peft gives to the trained parameter `name` in its files."""
    return _PEFT_PREFIX + name.replace(f".{TRAINED_ADAPTER}.", ".")


def _find_also_trained(model: Any, config: LoraConfig) -> Iterator[nn.Parameter]:
    """Yield the parameters that are trained in addition to the adapters."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    for path, module in model.named_modules():
        if ".lora_" in path:
            continue
        norm = "norms" in config.also_train and "Norm" in type(module).__name__
        embedding = "embeddings" in config.also_train and any(module is layer for layer in embeddings)
        whole = norm or embedding or path == "score" or was_reset(module)
        for name, parameter in module.named_parameters(recurse=path == "score"):
            if whole or ("biases" in config.also_train and name == "bias"):
                yield parameter


def find_adapter_targets(model: Any, names: str | tuple[str, ...]) -> dict[str, nn.Module]:
    """Return linear layers by their paths below the transformer: those that end in one of `names` or match `re:`.

    A string selects all. The output embedding and the scalar head are not part of the transformer.

    Raises:
        ConfigError, ModelError: as `add_adapters`.
    """
    transformer = model.base_model
    linear = _find_linear_layers(transformer)
    if not linear:
        raise ModelError(f"lora.rank: {type(transformer).__name__} has no linear layers to adapt; set it to 0")
    if isinstance(names, str):
        return linear
    prefix = "" if transformer is model else f"{model.base_model_prefix}."
    selected: set[str] = set()
    for name in names:
        matches = {path for path in linear if _matches(path, name, prefix)}
        if not matches and name.startswith("re:"):
            example = prefix + next(iter(linear))
            raise ConfigError(
                f"lora.target_modules: {name!r} matches no full path of a linear layer; one of them is {example}"
            )
        if not matches:
            known = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
            raise ConfigError(f"lora.target_modules: no linear layer is named {name!r}; there are {known}")
        selected |= matches
    return {path: layer for path, layer in linear.items() if path in selected}


def _find_linear_layers(transformer: Any) -> dict[str, nn.Module]:
    """Return the layers that can have adapters, by path.

    Excluded are layers that do more than multiply (routers of experts), that share their weight with another layer
    (adapters of both would be merged into one), and those that peft 0.21 mistakes for stacked experts or refuses.
    """
    layers = {
        name.removesuffix(".base_layer"): layer
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and ".lora_" not in name
        if type(layer).__name__.endswith(("Linear", "Conv1D"))
    }
    uses = Counter(id(layer._parameters.get("weight")) for layer in layers.values())
    stacked = any(len(getattr(parameter, "ds_shape", parameter.shape)) == 3 for parameter in transformer.parameters())
    refused = _OF_EXPERTS if stacked else ()
    if getattr(getattr(transformer, "config", None), "model_type", None) in _MAMBA:
        refused = (*refused, "out_proj")
    return {
        path: layer
        for path, layer in layers.items()
        if (uses[id(layer._parameters.get("weight"))] == 1 or "weight" not in layer._parameters)
        and path.rpartition(".")[2] not in refused
    }


def _matches(path: str, name: str, prefix: str) -> bool:
    if name.startswith("re:"):
        return re.fullmatch(name.removeprefix("re:"), prefix + path) is not None
    return f".{path}".endswith(f".{name}")
