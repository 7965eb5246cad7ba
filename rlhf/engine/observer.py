"""The observation point of a step: named tensors by phase, for a program that compares or records steps.

Nothing is computed, read from the device or kept unless an observer is set, and a step's numbers are the same with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

from rlhf.reporting.step_records import Phase


class Place(NamedTuple):
    """The origin of a tensor.

    Attributes:
        phase: one of `rlhf.reporting.step_records.PHASES`.
        step: from 1.
        role: the model; empty if the tensor is that of no model.
        update: from 0; PPO may have several in a step.
        micro_batch: from 0, in an update; -1 for tensors of the whole step or update.
    """

    stage: str
    step: int
    phase: Phase
    role: str
    update: int
    micro_batch: int


Observer = Callable[[Place, str, Tensor], None]
"""(place, name, tensor): called for each tensor, in the order of computation, on every rank alike.

A tensor may change after the call: copy what is kept. Calls for the gradients and the weights of sharded models are
collectives, so all ranks set an observer or none does.
"""


@dataclass
class ObservationPoint:
    """The observer of a stage, and the place in its step; shared by a stage and its engines.

    Attributes:
        observer: receives the tensors of steps; None: there is none.
        update, micro_batch: see `Place`.
    """

    observer: Observer | None = None
    update: int = 0
    micro_batch: int = -1
    _stage: str = ""
    _step: int = 0

    @property
    def is_on(self) -> bool:
        """True in a step, if there is an observer."""
        return self.observer is not None and self._step > 0

    @contextmanager
    def during(self, stage: str, step: int) -> Iterator[None]:
        """Report what this block computes as that of a step; evaluations and checks lie outside of such blocks."""
        self._stage, self._step, self.update, self.micro_batch = stage, step, 0, -1
        try:
            yield
        finally:
            self._step = 0

    def report(self, phase: Phase, role: str, /, **tensors: Tensor | None) -> None:
        """Give tensors to the observer; those that are None are left out."""
        if self.observer is None or not self._step:
            return
        place = Place(self._stage, self._step, phase, role, self.update, self.micro_batch)
        for name, tensor in tensors.items():
            if tensor is not None:
                self.observer(place, name, tensor.detach())

    def report_all(self, phase: Phase, role: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Give each tensor to the observer as it is computed; without one, none is."""
        if self.is_on:
            for name, tensor in tensors:
                self.report(phase, role, **{name: tensor})


def whole_gradients(module: nn.Module, *, zero_stage: int, loss_scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients that wait for the optimizer's step, in float32; a parameter without one has zeros."""
    for name, parameter in _list_trained(module):
        gradient = parameter.grad if zero_stage == 0 else safe_get_full_grad(parameter)
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        yield name, gradient.float() / loss_scale


def whole_weights(module: nn.Module, optimizer: Any, *, zero_stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the float32 weights that a DeepSpeed optimizer trains."""
    groups = zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ())) if not zero_stage else ()
    copies = {id(parameter): weight for group in groups for parameter, weight in zip(*group, strict=True)}
    for name, parameter in _list_trained(module):
        yield name, safe_get_full_fp32_param(parameter) if zero_stage else copies.get(id(parameter), parameter)


def _list_trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
