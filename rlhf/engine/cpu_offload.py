"""Frozen models whose weights wait on the host: they come to the device for the block in which they are used.

A frozen model flows in and comes out as the same object. The weights on the host stay where they are, for they never
change: leaving the device is to forget the copy there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.roles.roles import ModelPlacement

Model = TypeVar("Model", bound=nn.Module)


def describe_offload(held: Iterable[ModelPlacement], accelerator: Accelerator) -> str:
    """One line about what waits on the host in a stage; empty where nothing does."""
    held = list(held)
    parts = {
        "the optimizers": [placement.role.name for placement in held if placement.offloads_optimizer],
        "the weights": [placement.role.name for placement in held if placement.offloads_parameters],
    }
    said = " and ".join(f"{what} of {', '.join(names)}" for what, names in parts.items() if names)
    if said and accelerator.host_device() == accelerator.device():
        return f"offload: {said} would wait on the host, which is this device: no memory is gained"
    return f"offload: {said} wait on the host" if said else ""


def offload(model: Model, accelerator: Accelerator) -> Model:
    """Keep the weights of a model, which are on the host, there between its uses; where that is the device, do nothing.

    Each forward pass brings them and leaves them; in a block of `on_device` the first of several does, and its end.
    """
    if accelerator.host_device() != accelerator.device():
        vars(model)["offloaded"] = offloaded = OffloadedModel(model, accelerator)
        model.register_forward_pre_hook(offloaded.before)
        model.register_forward_hook(offloaded.after, always_call=True)
    return model


@contextmanager
def on_device(*models: nn.Module | None) -> Iterator[None]:
    """The weights of those of `models` that are offloaded stay on the device, once brought, until the block ends."""
    with ExitStack() as stack:
        for model in models:
            offloaded = getattr(model, "offloaded", None)
            if isinstance(offloaded, OffloadedModel):
                stack.enter_context(offloaded.kept())
        yield


class OffloadedModel:
    """Where a model's weights are now."""

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._blocks = 0
        # Weights that two layers share are one tensor, and come once.
        self._places: list[tuple[dict[str, Any], str, Tensor]] = [
            (tensors, name, tensor)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        if accelerator.pins_memory():
            for _, _, tensor in self._places:
                tensor.data = tensor.data.pin_memory()

    def before(self, model: nn.Module, inputs: Any) -> None:
        """Hook: bring the weights, unless they are there."""
        if self._places and self._here() is self._places[0][2]:
            moved: dict[int, Tensor] = {}
            for tensors, name, tensor in self._places:
                if id(tensor) not in moved:
                    moved[id(tensor)] = _like(tensor, self._accelerator.to_device(tensor.data))
                tensors[name] = moved[id(tensor)]

    def after(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Hook: leave, unless a block goes on."""
        if not self._blocks:
            self.leave()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What `on_device` does for one model."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self.leave()

    def leave(self) -> None:
        """Let go of the copy on the device."""
        for tensors, name, tensor in self._places:
            tensors[name] = tensor

    def _here(self) -> Tensor:
        tensors, name, _ = self._places[0]
        found: Tensor = tensors[name]
        return found


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data
