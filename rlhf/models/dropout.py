"""Set the dropout of a model: one rate for all of its layers, whatever names an architecture uses.

The configuration that is saved with the model keeps its original rates, so the rate of one stage is not the default of
the next.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from rlhf.errors import ConfigError


def set_dropout(model: nn.Module, rate: float) -> None:
    """Set the dropout rate of every layer of `model` that can drop activations in training mode, in place.

    Layers of transformers have their rates in `nn.Dropout` modules or in attributes (`attention_dropout`, ...), or read
    them from the configuration; such layers get a copy of it.

    Args:
        model: a model of transformers.
        rate: 0 switches all randomness in training off, so that it computes what evaluation does: also layers that are
            skipped as a whole (`layerdrop`), which other rates leave unchanged.
    """
    copies: dict[int, Any] = {}
    for module, config in _list_inner_configs(model):
        if _select_rates(config, rate):
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
            module.config = copies[id(config)]
    for owner, name in _list_rates(model, rate):
        setattr(owner, name, rate)


def is_stochastic(model: nn.Module) -> bool:
    """Return True if training passes draw at random: activations, those of adapters, whole layers, or experts."""
    noises = (value for module in model.modules() for name, value in vars(module).items() if "jitter" in name)
    return any(getattr(owner, name) for owner, name in _list_rates(model, 0)) or any(noises)


def check_dropout(model: nn.Module, rate: float | None, key: str) -> None:
    """Raise `ConfigError` if `key` sets a `rate` and `model` has no layer that could drop anything.

    A rate in the configuration alone has no effect: some architectures inherit keys that they do not read.
    """
    if rate and not any(isinstance(module, _DropoutNd) or _select_rates(module, rate) for module in model.modules()):
        raise ConfigError(f"{key}: {rate:g}, but {type(model).__name__} has no dropout; leave it empty, or set it to 0")


def _list_rates(model: nn.Module, rate: float) -> list[tuple[Any, str]]:
    """Return (owner, attribute) of the rates that layers read; see `_select_rates`."""
    owners = [*model.modules(), *(config for _, config in _list_inner_configs(model))]
    rates = [(owner, name) for owner in owners for name in _select_rates(owner, rate)]
    return rates + [(module, "p") for module in model.modules() if isinstance(module, _DropoutNd)]


def _list_inner_configs(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return (module, configuration) of all modules that have one but the outermost, whose configuration is saved."""
    return [(module, module.config) for module in model.modules() if getattr(module, "config", None) is not None][1:]


def _select_rates(owner: Any, rate: float) -> list[str]:
    """Return the attributes of `owner` that are dropout rates; those of skipped layers only if `rate` is 0."""
    return [
        name
        for name, value in vars(owner).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        if "drop" in name and (not rate or not ("layer" in name or "path" in name))
    ]
