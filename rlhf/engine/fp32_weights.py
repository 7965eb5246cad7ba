"""The float32 weights that an optimizer updates: restored from the checkpoint, and their moving average.

DeepSpeed creates the float32 weights from the model's weights, which are rounded to 16 bits. If the checkpoint has more
digits, `restore_precision` replaces them by its numbers. It reads one parameter at a time, and only this rank's part of
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import safe_set_local_fp32_param
from torch import Tensor, nn

from rlhf.models import lazy_tensors
from rlhf.models.weight_loading import get_source, is_sharded, local_range, set_source

if TYPE_CHECKING:
    from accelerators import Accelerator

CHUNK = 1 << 24
"""Elements that are copied between the host and the device at a time."""


def keep_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Round trained parameters with more digits than `dtype` (new adapters) to it, and remember the unrounded ones."""
    for parameter in model.parameters():
        if parameter.requires_grad and not is_sharded(parameter) and _is_wider(parameter.dtype, dtype):
            if get_source(parameter) is None:
                set_source(parameter, lazy_tensors.InMemory(parameter.detach()))
            parameter.data = parameter.detach().to(dtype)


def restore_precision(engine: Any) -> None:
    """Set the float32 weights of a new DeepSpeed engine from the sources of its parameters, and release the sources."""
    weights_by_id = {id(parameter): weight for parameter, weight in _pair_weights(engine.optimizer)}
    for parameter in engine.module.parameters():
        source = get_source(parameter)
        if source is None:
            continue
        if parameter.requires_grad and _is_wider(source.dtype, parameter.dtype):
            _set_fp32_weight(parameter, source, weights_by_id.get(id(parameter)))
        if parameter.requires_grad or isinstance(source, lazy_tensors.InMemory):
            set_source(parameter, None)


def list_weights(optimizer: Any) -> list[Tensor]:
    """Return the float32 tensors that a DeepSpeed optimizer updates on this rank, each contiguous.

    At ZeRO 1 to 3 they are flat shares of groups of parameters. At ZeRO 0 there is one for each parameter: a copy, or
    in fp32 the parameter itself.
    """
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):  # ZeRO 1-2, ZeRO 3
        if shares := getattr(optimizer, name, None):
            return list(shares)
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def get_fp32_weights(optimizer: Any) -> list[Tensor]:
    """Return the numbers of `list_weights`."""
    return [weight.data for weight in list_weights(optimizer)]


@contextmanager
def in_memory(optimizer: Any, index: int, *, write: bool = False) -> Iterator[None]:
    """In this block, have one of `list_weights` in memory with the optimizer's states of it, if they wait on NVMe.

    With `write`, changed numbers are stored again. The methods are those of ZeRO-3 in DeepSpeed 0.19.8.
    """
    if not hasattr(optimizer, "swap_optimizer") or not optimizer._swappable_optimizer_subgroup(index):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(index)
    try:
        yield
    finally:
        if write:
            optimizer._optimizer_states_and_gradient_swap_out(index)
        else:
            optimizer._release_swap_buffers(index)


@torch.no_grad()
def round_fp32_weights(optimizer: Any) -> None:
    """Set the model's weights to the rounded float32 weights; every rank calls it.

    It calls the methods that a step of DeepSpeed 0.19.8 calls.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._partition_all_parameters()  # a gathered parameter would keep its numbers
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            with in_memory(optimizer, index):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer._post_step(())  # gather the parameters that are never released
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for parameter, weight in _pair_weights(optimizer):
            parameter.copy_(weight)


class EMA:
    """An exponential moving average of the float32 weights (arXiv:1412.6980, section 7.2), starting at the weights.

    average := decay * average + (1 - decay) * weights. For saving and evaluation, it is swapped with the weights. Each
    rank stores the average of its float32 weights: at ZeRO 1 to 3 its share, with LoRA those of the adapters.

    Attributes:
        tensors: this rank's part of the average.
    """

    def __init__(self, optimizer: Any, decay: float, accelerator: Accelerator, *, on_host: bool = False) -> None:
        """Copy the weights.

        Args:
            optimizer: an engine's, which has the weights.
            decay: the share of the average that a step keeps.
            accelerator: the device of the weights.
            on_host: store and compute the average in the host's memory instead of on the device.
        """
        self.decay = decay
        self._optimizer = optimizer
        device = accelerator.host_device() if on_host else accelerator.device()
        self.tensors = [weight.to(device, copy=True) for weight in get_fp32_weights(optimizer)]
        if on_host and accelerator.pins_memory():
            self.tensors = [average.pin_memory() for average in self.tensors]

    @torch.no_grad()
    def follow(self) -> None:
        """Update the average after a step of the optimizer."""
        for average, weight in _split_in_chunks(self.tensors, get_fp32_weights(self._optimizer)):
            average.lerp_(weight.to(average.device), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the average in this block; afterwards the weights are bit for bit the same as before.

        Every rank must enter it, and must not take a step in it.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weight in _split_in_chunks(self.tensors, get_fp32_weights(self._optimizer)):
            copy = average.to(weight.device, copy=True)
            average.copy_(weight)
            weight.copy_(copy)
        round_fp32_weights(self._optimizer)


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return True if numbers of `dtype` may not fit into `other` without rounding."""
    return torch.promote_types(dtype, other) != other


def _set_fp32_weight(parameter: nn.Parameter, source: lazy_tensors.Source, weight: Tensor | None) -> None:
    """Copy `source` to this rank's part of the parameter's float32 weight; at ZeRO 0 that is `weight`, else None."""
    if weight is not None:
        lazy_tensors.copy_source(source, weight)
    elif is_sharded(parameter):
        part = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)  # type: ignore[attr-defined]
        start, stop = local_range(parameter)
        lazy_tensors.copy_source(source, part[: stop - start], start)
        safe_set_local_fp32_param(parameter, part)
    elif (fragment := getattr(parameter, "_hp_mapping", None)) is not None:  # None also if other ranks have all of it
        lazy_tensors.copy_source(source, fragment.hp_fragment, fragment.lp_fragment_address.start)


def _pair_weights(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with its float32 weight, at ZeRO 0 (`FP16_UnfusedOptimizer`); nothing in fp32."""
    for group, weights in zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ())):
        yield from zip(group, weights)


def _split_in_chunks(averages: list[Tensor], weights: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of both, chunk by chunk, so that no more than one chunk is copied at a time."""
    for average, weight in zip(averages, weights, strict=True):
        yield from zip(average.view(-1).split(CHUNK), weight.view(-1).split(CHUNK), strict=True)
