"""The numbers that an optimizer keeps on this rank, by the trained parameters that they belong to.

DeepSpeed lays out float32 weights and moments in another way at each ZeRO stage: one tensor for each parameter (ZeRO
0), or flat tensors of many parameters, of which each rank has a share (ZeRO 1 to 3). A checkpoint that any number of
ranks can read, at any stage, needs to know which part of which parameter a number is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.engine import deepspeed_patches as patches
from rlhf.engine.fp32_weights import in_memory, list_weights, round_fp32_weights
from rlhf.models.weight_loading import is_sharded, local_range

if TYPE_CHECKING:
    from rlhf.engine.engine import TrainingEngine

WEIGHT, AVERAGE = "weight", "average"
"""Kinds of numbers that are not states of the optimizer."""

_STEPS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Fragment:
    """Some consecutive numbers of a parameter that this rank has.

    Attributes:
        name: the parameter's.
        start: their place in the flattened parameter.
        size: how many they are.
        index: the optimizer's tensor that they are in (`list_weights`).
        offset: their place in it.
    """

    name: str
    start: int
    size: int
    index: int
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of its numbers in a tensor of the optimizer."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)


def list_fragments(engine: TrainingEngine) -> list[Fragment]:
    """Return the fragments of all trained parameters on this rank, in the order of the optimizer's tensors."""
    optimizer = engine.optimizer
    trained = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    if engine.zero_stage == 0:
        groups = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
        indices = {id(parameter): index for index, parameter in enumerate(chain.from_iterable(groups))}
        fragments = [
            Fragment(name, 0, parameter.numel(), indices[id(parameter)], 0) for name, parameter in trained.items()
        ]
    elif engine.zero_stage < 3:
        mapped = {name: parameter._hp_mapping for name, parameter in trained.items()}  # type: ignore[attr-defined]
        fragments = [
            Fragment(
                name,
                mapping.lp_fragment_address.start,
                mapping.lp_fragment_address.numel,
                mapping.param_group_index,
                mapping.hp_fragment_address.start,
            )
            for name, mapping in mapped.items()
            if mapping is not None  # else other ranks have all of it
        ]
    else:
        assert all(map(is_sharded, trained.values()))
        fragments = []
        for name, parameter in trained.items():
            index, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start, stop = local_range(parameter)
            fragments.append(Fragment(name, start, stop - start, index, offset))
    return sorted((fragment for fragment in fragments if fragment.size), key=lambda part: (part.index, part.offset))


class OptimizerTensors:
    """One of the optimizer's weights with the moments and the average that belong to it."""

    def __init__(self, engine: TrainingEngine, index: int) -> None:
        self._weight = list_weights(engine.optimizer)[index]
        self._optimizer = _find_inner_optimizer(engine, self._weight)
        self._average = engine.ema.tensors[index] if engine.ema else None

    @property
    def numbers(self) -> dict[str, Tensor]:
        """Tensors of one shape, by kind: the weights, the optimizer's moments, the moving average."""
        numbers = {key: value for key, value in self._state.items() if self._has_its_shape(value)}
        average = {} if self._average is None else {AVERAGE: self._average}
        return {WEIGHT: self._weight.data, **numbers, **average}

    @property
    def counters(self) -> dict[str, float]:
        """The optimizer's other states of the weights, such as the number of steps."""
        return {key: float(value) for key, value in self._state.items() if not self._has_its_shape(value)}

    def set_counter(self, key: str, value: float) -> None:
        """Set a counter, in the form in which the optimizer keeps it."""
        before = self._state[key]
        if torch.is_tensor(before):
            before.fill_(value)
        else:
            self._state[key] = type(before)(value)

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(self._weight, {})
        return state

    def _has_its_shape(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.shape == self._weight.shape


@contextmanager
def open_tensors(engine: TrainingEngine, index: int, *, write: bool = False) -> Iterator[OptimizerTensors]:
    """Yield the tensors of one index, also if they wait on NVMe; with `write`, they may be changed."""
    with in_memory(engine.optimizer, index, write=write):
        yield OptimizerTensors(engine, index)


@torch.no_grad()
def create_moments(engine: TrainingEngine, index: int) -> None:
    """Let the optimizer create its states of one index, by a step with zero gradients and a learning rate of 0."""
    weight = list_weights(engine.optimizer)[index]
    optimizer = _find_inner_optimizer(engine, weight)
    before, gradient = [(group["params"], group["lr"]) for group in optimizer.param_groups], weight.grad
    for group in optimizer.param_groups:
        group["params"], group["lr"] = [], 0.0
    optimizer.param_groups[0]["params"], weight.grad = [weight], torch.zeros_like(weight)
    try:
        optimizer.step()
    finally:
        weight.grad = gradient
        for group, (parameters, rate) in zip(optimizer.param_groups, before):
            group["params"], group["lr"] = parameters, rate


def finish_loading(engine: TrainingEngine) -> None:
    """Round the model's weights after the optimizer's were set; every rank calls it."""
    round_fp32_weights(engine.optimizer)


def read_counters(engine: TrainingEngine) -> dict[str, float]:
    """Return the numbers of an engine that are equal on all ranks: its steps, and the state of its loss scale."""
    owners = dict.fromkeys(_STEPS, engine.engine) | dict.fromkeys(_SCALE, patches.find_loss_scaler(engine.optimizer))
    counters = {name: getattr(owner, name, None) for name, owner in owners.items()}
    return {name: value for name, value in counters.items() if value is not None}


def set_counters(engine: TrainingEngine, counters: dict[str, float]) -> None:
    """Restore `read_counters`, also of an engine at another ZeRO stage."""
    scaler = patches.find_loss_scaler(engine.optimizer)
    for name, value in counters.items():
        owner = engine.engine if name in _STEPS else scaler
        if hasattr(owner, name):
            setattr(owner, name, value)


def _find_inner_optimizer(engine: TrainingEngine, weight: Tensor) -> Any:
    """Return the accelerator's optimizer inside DeepSpeed's that has the states of one of `list_weights`.

    If ZeRO-3 offloads a part of them (`offload_optimizer.ratio`), there is one for those that stay on the device
    (`DeepSpeedZeroOptimizer_Stage3._optimizer_step`).
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "offload_optimizer", False) and weight.device != engine.accelerator.host_device():
        return optimizer.backup_optimizer
    return getattr(optimizer, "optimizer", optimizer)
