"""Set the dropout of a model: one rate for all of its layers, under whatever names an architecture has it.

The model's configuration, which is saved with it, keeps the rates that it was loaded with: the rate of one stage is no
default for the next.
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
    outermost = None
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = rate
        for name in _find_rates(vars(module), rate):
            setattr(module, name, rate)
        config = getattr(module, "config", None)
        if config is None:
            continue
        outermost = outermost or module
        if module is not outermost and (names := _find_rates(vars(config), rate)):
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                for name in names:
                    setattr(copies[id(config)], name, rate)
            module.config = copies[id(config)]


def has_dropout(model: nn.Module) -> bool:
    """Return True if training passes drop activations, including those of adapters, or whole layers."""
    rates: list[float] = []
    outermost = None
    for module in model.modules():
        rates += [module.p] if isinstance(module, _DropoutNd) else []
        rates += [getattr(module, name) for name in _find_rates(vars(module), 0)]
        config = getattr(module, "config", None)
        if config is None:
            continue
        outermost = outermost or module
        if module is not outermost:
            rates += [getattr(config, name) for name in _find_rates(vars(config), 0)]
    return any(rates)


def check_dropout(model: nn.Module, rate: float | None, key: str) -> None:
    """Raise `ConfigError` if `key` sets a `rate` and `model` has no layer that could drop anything.

    A rate in the configuration alone has no effect: some architectures inherit keys that they do not read.
    """
    if rate and not any(
        isinstance(module, _DropoutNd) or _find_rates(vars(module), rate) for module in model.modules()
    ):
        raise ConfigError(f"{key}: {rate:g}, but {type(model).__name__} has no dropout; leave it empty, or set it to 0")


def _find_rates(values: dict[str, Any], rate: float) -> list[str]:
    """Return the names of dropout rates among attributes; those of skipped layers only if `rate` is 0."""
    return [
        name
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        if "drop" in name and (not rate or not ("layer" in name or "path" in name))
    ]
