"""Offload frozen models: their weights stay in the host's memory, and are copied to the device for each use.

Weights on the host never change, so the copy on the device is simply released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.roles.roles import ModelPlacement

Model = TypeVar("Model", bound=nn.Module)


def describe_offload(placements: Iterable[ModelPlacement], accelerator: Accelerator) -> str:
    """Return one line about what a stage offloads; empty if it offloads nothing."""
    placements = list(placements)
    roles = {
        "the optimizers": [placement.role.name for placement in placements if placement.offloads_optimizer],
        "the weights": [placement.role.name for placement in placements if placement.offloads_parameters],
    }
    offloaded = " and ".join(f"{what} of {', '.join(names)}" for what, names in roles.items() if names)
    if offloaded and accelerator.host_device() == accelerator.device():
        return f"offload: {offloaded} would wait on the host, which is this device: no memory is gained"
    return f"offload: {offloaded} wait on the host" if offloaded else ""


def offload(model: Model, accelerator: Accelerator) -> Model:
    """Keep the weights of a model on the host between its uses; do nothing if the host is the device.

    Each forward pass copies them to the device and releases the copy. In a block of `on_device` the first of several
    passes copies them, and the end of the block releases them.

    Returns:
        The model.
    """
    if accelerator.host_device() != accelerator.device():
        vars(model)["offloaded"] = offloaded = OffloadedModel(model, accelerator)
        model.register_forward_pre_hook(offloaded.before_forward)
        model.register_forward_hook(lambda *_: offloaded.release(), always_call=True)
    return model


@contextmanager
def on_device(*models: nn.Module | None) -> Iterator[None]:
    """Keep the weights of offloaded `models` on the device, once they are copied there, until the block ends."""
    candidates = [getattr(model, "offloaded", None) for model in models]
    offloaded = [weights for weights in candidates if isinstance(weights, OffloadedModel)]
    for weights in offloaded:
        weights.blocks += 1
    try:
        yield
    finally:
        for weights in offloaded:
            weights.blocks -= 1
            weights.release()


class OffloadedModel:
    """The weights of a model that is offloaded."""

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.blocks = 0  # of `on_device` that are running
        # (the dictionary of a module, the name in it, the tensor on the host).
        self._entries: list[tuple[dict[str, Any], str, Tensor]] = [
            (tensors, name, tensor)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        if accelerator.pins_memory():
            for _, _, tensor in self._entries:
                tensor.data = tensor.data.pin_memory()

    def before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Copy the weights to the device, unless they are there; tensors that layers share are copied once."""
        tensors, name, tensor = self._entries[0]
        if tensors[name] is not tensor:
            return
        copies: dict[int, Tensor] = {}
        for tensors, name, tensor in self._entries:
            if id(tensor) not in copies:
                data = self._accelerator.to_device(tensor.data)
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(data, requires_grad=False) if is_parameter else data
            tensors[name] = copies[id(tensor)]

    def release(self) -> None:
        """Release the copy on the device, unless a block of `on_device` is running."""
        if not self.blocks:
            for tensors, name, tensor in self._entries:
                tensors[name] = tensor
