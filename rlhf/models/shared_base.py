"""Models on one frozen base: separate module trees that share their frozen tensors.

`SharedBase` holds the weights of a model that is trained with LoRA; `build_on_base` builds another model on them, whose
scalar head, adapters and other trained parameters alone take memory. Engines, checkpoints and exports see a model like
any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.loading import build_on_meta
from rlhf.models.lora import (
    FROZEN_ADAPTER,
    TRAINED_ADAPTER,
    inject_adapters,
    is_adapted,
    read_adapter_config,
    read_adapter_tensors,
    to_plain_name,
)
from rlhf.models.weight_loading import get_source, set_source


class SharedBase:
    """The weights of a model, on which others can be built; created while they are whole, before an engine has them.

    Parameters that the model trains, except adapters, are trained in a copy: the original ones stay frozen, with their
    initial numbers. Other models may share them, and the model may share them with its own base.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        trained: dict[int, nn.Parameter] = {}
        self._initial: dict[str, nn.Parameter] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if parameter.requires_grad and ".lora_" not in name:
                if id(parameter) not in trained:
                    trained[id(parameter)] = nn.Parameter(parameter.detach().clone())
                    set_source(trained[id(parameter)], get_source(parameter))
                self._initial[_base_name(model, name)] = parameter
                path, _, key = name.rpartition(".")
                model.get_submodule(path)._parameters[key] = trained[id(parameter)]
        for parameter in self._initial.values():
            parameter.requires_grad_(False)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return parameters, without trained adapters, by their names below the transformer; tied ones by all names."""
        current = {
            _base_name(self.model, name): parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if f".{TRAINED_ADAPTER}." not in name
        }
        return current | self._initial

    def modules(self) -> dict[str, nn.Module]:
        """Return modules, without layers that have adapters, by their names below the transformer."""
        return {
            _base_name(self.model, f"{path}.").removesuffix("."): module
            for path, module in self.model.named_modules()
            if ".lora_" not in path and not is_adapted(module)
        }


def build_on_base(
    base: SharedBase, config: ModelConfig, *, attention: str, scalar_head: bool = False, adapter: Path | None = None
) -> Any:
    """Build a frozen model on the weights of `base`; `adapter` is the folder of its adapter and other tensors.

    The other arguments are those of `rlhf.models.loading.build_on_meta`.

    Raises:
        ModelError: a tensor is neither in `base` nor in `adapter`.
    """
    model = build_on_meta(base.model.config, config, attention=attention, scalar_head=scalar_head)
    tensors: Mapping[str, Tensor] = {}
    if adapter:
        inject_adapters(model, FROZEN_ADAPTER, read_adapter_config(adapter))
        tensors = {
            _base_name(model, name): tensor for name, tensor in read_adapter_tensors(adapter, FROZEN_ADAPTER).items()
        }
    share_tensors(model, base, tensors)
    return model.requires_grad_(False)


def share_tensors(model: Any, base: SharedBase, tensors: Mapping[str, Tensor]) -> None:
    """Give a model on the meta device the parameters and buffers of `base`, except those in `tensors`.

    If the base already has the adapter of a reward model, its tensors are shared too.

    Raises:
        ModelError: `base` lacks a tensor, or has one of another shape.
    """
    parameters, modules = base.parameters(), base.modules()
    frozen = {name for name in parameters if f".{FROZEN_ADAPTER}." in name}
    if frozen:  # with the adapter it has all other tensors of that folder
        tensors = {}
    for path, module in list(model.named_modules()):
        if is_adapted(module):
            continue
        place = _base_name(model, f"{path}.").removesuffix(".")
        theirs = modules.get(place)
        if theirs is not None and type(theirs) is not type(module) and _holds_tensors(theirs) and path:
            parent, _, key = path.rpartition(".")
            setattr(model.get_submodule(parent), key, _copy_module(theirs))  # a layer of another class: quantized
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{place}.{name}".lstrip(".")
            if full in tensors:
                shared: Any = nn.Parameter(tensors[full], requires_grad=False)
            else:
                shared = parameters.get(full)
            if shared is None or shared.shape != parameter.shape:
                raise ModelError(
                    f"{full}: the shared base lacks this tensor of {type(model).__name__}, or has another shape of it; "
                    "set lora.share_base=false"
                )
            module._parameters[name] = shared
        if theirs is not None:
            for name in module._buffers:
                module._buffers[name] = theirs._buffers[name]
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_meta:
                    setattr(module, name, getattr(theirs, name))


def _base_name(model: Any, name: str) -> str:
    """Return a name before adapters and below the transformer, whose own name differs between kinds of heads."""
    return to_plain_name(name).removeprefix(f"{model.base_model_prefix}.")


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _copy_module(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its tensors."""
    twin = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(twin)[name] = dict(vars(module)[name])
    return twin
