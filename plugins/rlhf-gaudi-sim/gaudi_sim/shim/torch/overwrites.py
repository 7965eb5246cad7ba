"""What the bridge changes in torch when it is imported in lazy mode: saving and loading, and where parameters stay."""

import functools
import os
from typing import Any

import torch
from torch import nn

from gaudi_sim import accounting
from gaudi_sim.behaviours import is_simulated


class HabanaParameterWrapper:
    """Keeps every parameter that `nn.Module.to` has brought to the device (the bridge's core/weight_sharing.py).

    The real class puts proxies in the place of parameters; here they stay as they are, and are only kept alive.
    """

    db: dict[int, nn.Parameter] = {}  # noqa: RUF012 (one for the class, as there)


def install() -> None:
    """Change torch as the environment asks for."""
    if not accounting.is_lazy():
        return
    if is_simulated("save"):
        torch.save = _with_protocol_4(torch.save)
        torch.load = _with_own_unpickler(torch.load)
    # The bridge's core/__init__.py: on in lazy mode, unless the variable is 0.
    if is_simulated("weight_sharing") and os.environ.get("PT_HPU_WEIGHT_SHARING", "1") != "0":
        nn.Module.to = _keeping_parameters(nn.Module.to)  # type: ignore[method-assign]


def _with_protocol_4(save: Any) -> Any:
    """Return `torch.save` with the bridge's default of `pickle_protocol`, which `weights_only` of torch cannot read."""

    @functools.wraps(save)
    def wrapped(obj: Any, f: Any, pickle_module: Any = None, pickle_protocol: int = 4, **options: Any) -> None:
        modules = {} if pickle_module is None else {"pickle_module": pickle_module}
        save(obj, f, pickle_protocol=pickle_protocol, **modules, **options)

    return wrapped


def _with_own_unpickler(load: Any) -> Any:
    """Return `torch.load` with the bridge's default of `weights_only`, False; its own unpickler reads protocol 4."""

    @functools.wraps(load)
    def wrapped(f: Any, map_location: Any = None, pickle_module: Any = None, **options: Any) -> Any:
        return load(f, map_location, pickle_module, **options | {"weights_only": False})

    return wrapped


def _keeping_parameters(to: Any) -> Any:
    @functools.wraps(to)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        module: nn.Module = to(self, *args, **kwargs)
        for parameter in module.parameters():
            if parameter.device.type == "hpu":
                HabanaParameterWrapper.db[id(parameter)] = parameter
        return module

    return wrapped
