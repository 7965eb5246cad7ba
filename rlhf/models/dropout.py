"""Switching dropout off in a loaded model, for training that compares two passes over the same tokens."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def disable_dropout(model: nn.Module) -> None:
    """No layer of `model` drops anything from here on, in training mode either.

    Layers of transformers keep their rates in `nn.Dropout` modules, in numbers of their own (`attention_dropout`,
    `layerdrop`, ...), or look them up in the configuration. That one is saved with the model,
    which keeps it as it is; its layers get a copy without the rates.
    """
    copies: dict[int, Any] = {}
    outermost = None
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in _rates(vars(module)):
            setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        if config is None:
            continue
        outermost = outermost or module
        if module is not outermost and (rates := _rates(vars(config))):
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                for name in rates:
                    setattr(copies[id(config)], name, 0.0)
            module.config = copies[id(config)]


def _rates(values: dict[str, Any]) -> list[str]:
    return [name for name, value in values.items() if isinstance(value, float) and value and "drop" in name]
