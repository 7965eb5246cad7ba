"""The dropout of a model: one rate for all of its layers, whatever the architecture calls them.

A loaded model flows in and is changed in place. Its configuration, which is saved with it, keeps the rates that it was
loaded with: how long a stage is trained says nothing of how the next one should be.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from rlhf.errors import ConfigError


def set_dropout(model: nn.Module, rate: float) -> None:
    """Every layer of `model` that can drop activations drops `rate` of them from here on, in training mode.

    Layers of transformers keep their rates in `nn.Dropout` modules, in numbers of their own (`attention_dropout`,
    ...), or look them up in the configuration, of which they get a copy.

    Args:
        rate: 0 switches off whatever is random in training, so that it computes what evaluation does. That takes
            layers that are skipped as a whole (`layerdrop`) too, which another rate leaves as they are.
    """
    copies: dict[int, Any] = {}
    outermost = None
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = rate
        for name in _rates(vars(module), rate):
            setattr(module, name, rate)
        config = getattr(module, "config", None)
        if config is None:
            continue
        outermost = outermost or module
        if module is not outermost and (names := _rates(vars(config), rate)):
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                for name in names:
                    setattr(copies[id(config)], name, rate)
            module.config = copies[id(config)]


def has_dropout(model: nn.Module) -> bool:
    """Whether training passes drop anything: activations, those of adapters included, or whole layers."""
    found: list[float] = []
    outermost = None
    for module in model.modules():
        found += [module.p] if isinstance(module, _DropoutNd) else []
        found += [getattr(module, name) for name in _rates(vars(module), 0)]
        config = getattr(module, "config", None)
        if config is None:
            continue
        outermost = outermost or module
        if module is not outermost:
            found += [getattr(config, name) for name in _rates(vars(config), 0)]
    return any(found)


def check_dropout(model: nn.Module, rate: float | None, key: str) -> None:
    """Raise `ConfigError` where `key` asks for a `rate` and `model` has no layer that could drop anything.

    A rate in the configuration alone is none: some architectures have inherited keys that they do not read.
    """
    if rate and not any(isinstance(module, _DropoutNd) or _rates(vars(module), rate) for module in model.modules()):
        raise ConfigError(f"{key}: {rate:g}, but {type(model).__name__} has no dropout; leave it empty, or set it to 0")


def _rates(values: dict[str, Any], rate: float) -> list[str]:
    """The names of dropout rates among a module's or configuration's values; skipped layers count where `rate` is 0."""
    return [
        name
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        if "drop" in name and (not rate or not ("layer" in name or "path" in name))
    ]
