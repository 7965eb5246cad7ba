"""Models on one frozen base: each a module tree of its own, whose frozen leaves are the same tensors.

`SharedBase` holds the weights of a model that is trained with LoRA; `build_on_base` builds another model on them, whose
scalar head, adapters and other trained parameters alone take memory. Engines, checkpoints and exports see a model like
any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.loading import build_on_meta
from rlhf.models.lora import (
    FROZEN_ADAPTER,
    TRAINED_ADAPTER,
    inject_adapters,
    read_adapter_config,
    read_adapter_tensors,
    to_plain_name,
)
from rlhf.models.weight_loading import get_source, set_source


class SharedBase:
    """The weights of a model, as another may stand on them; taken when it is whole, before an engine has it.

    What it trains, but adapters, it trains in a copy: the parameters themselves are kept, frozen, with the numbers that
    training begins with. Other models may stand on them, and it may have them from the base that it stands on itself.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        trained: dict[int, nn.Parameter] = {}
        self._first: dict[str, nn.Parameter] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if parameter.requires_grad and ".lora_" not in name:
                if id(parameter) not in trained:
                    trained[id(parameter)] = nn.Parameter(parameter.detach().clone())
                    set_source(trained[id(parameter)], get_source(parameter))
                self._first[_place(model, name)] = parameter
                path, _, key = name.rpartition(".")
                model.get_submodule(path)._parameters[key] = trained[id(parameter)]
        for parameter in self._first.values():
            parameter.requires_grad_(False)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By their names below the transformer, the adapters that are trained left out; tied ones by all of them."""
        now = {
            _place(self.model, name): parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if f".{TRAINED_ADAPTER}." not in name
        }
        return now | self._first

    def modules(self) -> dict[str, nn.Module]:
        """By their names below the transformer, without the layers that adapters are around."""
        return {
            _place(self.model, f"{path}.").removesuffix("."): module
            for path, module in self.model.named_modules()
            if ".lora_" not in path and not isinstance(module, LoraLayer)
        }


def build_on_base(
    base: SharedBase, config: ModelConfig, *, attention: str, scalar_head: bool = False, adapter: Path | None = None
) -> Any:
    """A model on the weights of `base`, frozen.

    Args:
        scalar_head: as a sequence-classification model with one output; else as a causal language model.
        adapter: the folder of an adapter that it has on top, and of what else is its own, where `base` has it not.

    Raises:
        ModelError: something of it is neither in `base` nor in `adapter`.
    """
    model = build_on_meta(base.model.config, config, attention=attention, scalar_head=scalar_head)
    own: Mapping[str, Tensor] = {}
    if adapter:
        inject_adapters(model, FROZEN_ADAPTER, read_adapter_config(adapter))
        own = {_place(model, name): tensor for name, tensor in read_adapter_tensors(adapter, FROZEN_ADAPTER).items()}
    share_tensors(model, base, own)
    return model.requires_grad_(False)


def share_tensors(model: Any, base: SharedBase, own: Mapping[str, Tensor]) -> None:
    """Give a model on the meta device the parameters and buffers of `base`, but for those in `own`.

    Where the adapter of a reward model is on the base already, its tensors are shared too.

    Raises:
        ModelError: `base` has no tensor for a place, or one of another shape.
    """
    parameters, modules = base.parameters(), base.modules()
    frozen = {name for name in parameters if f".{FROZEN_ADAPTER}." in name}
    if frozen:  # whoever has the adapter has all that came with it
        own = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            continue
        place = _place(model, f"{path}.").removesuffix(".")
        theirs = modules.get(place)
        if theirs is not None and type(theirs) is not type(module) and _holds_tensors(theirs) and path:
            parent, _, key = path.rpartition(".")
            setattr(model.get_submodule(parent), key, _twin(theirs))  # its weights are held otherwise: quantized
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{place}.{name}".lstrip(".")
            if full in own:
                found: Any = nn.Parameter(own[full], requires_grad=False)
            else:
                found = parameters.get(full)
            if found is None or found.shape != parameter.shape:
                raise ModelError(
                    f"{full}: the base that is to be shared has none for {type(model).__name__}, or of another shape; "
                    "set lora.share_base=false"
                )
            module._parameters[name] = found
        if theirs is not None:
            for name in module._buffers:
                module._buffers[name] = theirs._buffers[name]
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_meta:
                    setattr(module, name, getattr(theirs, name))


def _place(model: Any, name: str) -> str:
    """A name as it was before adapters, below the transformer where it is of that: heads differ in how they call it."""
    return to_plain_name(name).removeprefix(f"{model.base_model_prefix}.")


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _twin(module: nn.Module) -> nn.Module:
    """A module of its own that holds the same tensors."""
    made = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(made)[name] = dict(vars(module)[name])
    return made
