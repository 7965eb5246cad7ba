"""Float32 masters as the checkpoint has them.

DeepSpeed makes the float32 weights that an optimizer updates from those that the model computes with, which are rounded
to 16 bits. An engine whose parameters remember where they came from (`rlhf.models.weight_loading`) flows in;
afterwards its
masters are the checkpoint's own numbers wherever those have more digits, read one parameter, and one rank's part of it,
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import safe_set_local_fp32_param
from torch import Tensor, nn

from rlhf.models import lazy_tensors
from rlhf.models.weight_loading import get_source, set_source
from rlhf.models.zero3_loading import is_sharded, local_range

if TYPE_CHECKING:
    from accelerators import Accelerator

CHUNK = 1 << 24
"""Elements that are on their way between the host and the device at a time."""


def keep_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Round what is trained, and was made with more digits (adapters), to `dtype`, and remember what it was."""
    for parameter in model.parameters():
        if parameter.requires_grad and not is_sharded(parameter) and _is_wider(parameter.dtype, dtype):
            if get_source(parameter) is None:
                set_source(parameter, lazy_tensors.InMemory(parameter.detach()))
            parameter.data = parameter.detach().to(dtype)


def restore_precision(engine: Any) -> None:
    """Set the masters of a new DeepSpeed engine; what its parameters were made from is let go of."""
    whole = _whole_masters(engine.optimizer)
    for parameter in engine.module.parameters():
        found = get_source(parameter)
        if found is None:
            continue
        if parameter.requires_grad and _is_wider(found.dtype, parameter.dtype):
            _set(parameter, found, whole.get(id(parameter)))
        if parameter.requires_grad or isinstance(found, lazy_tensors.InMemory):
            set_source(parameter, None)


def get_fp32_weights(optimizer: Any) -> list[Tensor]:
    """The float32 numbers that a DeepSpeed optimizer updates on this rank, each tensor contiguous.

    They are flat shares of groups of parameters at ZeRO 1-3; at ZeRO 0 one for each parameter: a copy of it, or in fp32
    itself.
    """
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):  # ZeRO 1-2, ZeRO 3
        if shares := getattr(optimizer, name, None):
            return [share.data for share in shares]
    return [master.data for group in optimizer.param_groups for master in group["params"]]


@torch.no_grad()
def round_fp32_weights(optimizer: Any) -> None:
    """Compute from now on with the weights that the masters are when rounded; every rank calls it.

    As a step of deepspeed 0.19.8 does it, whose own means these are.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._partition_all_parameters()  # what is whole yet would stay what it is
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer._post_step(())  # parameters that stay whole are so again
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for rounded, master in _pairs(optimizer):
            rounded.copy_(master)


class EMA:
    """average := decay * average + (1 - decay) * weights, in float32, beginning at the weights.

    Args:
        optimizer: an engine's, which has the weights.
        on_host: it waits in the host's memory, and is computed there; else on the device.

    Attributes:
        tensors: this rank's part of the average.
    """

    def __init__(self, optimizer: Any, decay: float, accelerator: Accelerator, *, on_host: bool = False) -> None:
        self.decay = decay
        self._optimizer = optimizer
        self._host = accelerator.host_device()
        place = self._host if on_host else accelerator.device()
        self.tensors = [master.to(place, copy=True) for master in get_fp32_weights(optimizer)]
        if on_host and accelerator.pins_memory():
            self.tensors = [average.pin_memory() for average in self.tensors]

    @torch.no_grad()
    def follow(self) -> None:
        """Follow a step that the optimizer has taken."""
        for average, master in _pieces(self.tensors, get_fp32_weights(self._optimizer)):
            average.lerp_(master.to(average.device), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The weights are the average's for the block, and afterwards bit for bit what they were.

        Every rank enters it; no step is taken in it.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def save_state(self) -> list[Tensor]:
        """This rank's part of the average, in the host's memory."""
        return [average.to(self._host) for average in self.tensors]

    def load_state(self, state: list[Tensor]) -> None:
        for average, saved in zip(self.tensors, state, strict=True):
            average.copy_(saved)

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in _pieces(self.tensors, get_fp32_weights(self._optimizer)):
            kept = average.to(master.device, copy=True)
            average.copy_(master)
            master.copy_(kept)
        round_fp32_weights(self._optimizer)


def _is_wider(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether a number of type `one` may not be a number of the `other`."""
    return torch.promote_types(one, other) != other


def _set(parameter: nn.Parameter, found: lazy_tensors.Source, master: Tensor | None) -> None:
    if master is not None:
        lazy_tensors.copy_source(found, master)
    elif is_sharded(parameter):
        part = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)
        start, stop = local_range(parameter)
        lazy_tensors.copy_source(found, part[: stop - start], start)
        safe_set_local_fp32_param(parameter, part)
    elif (fragment := getattr(parameter, "_hp_mapping", None)) is not None:  # None too where other ranks have all of it
        lazy_tensors.copy_source(found, fragment.hp_fragment, fragment.lp_fragment_address.start)


def _whole_masters(optimizer: Any) -> dict[int, Tensor]:
    """At ZeRO 0, the master of each parameter, by the parameter's id."""
    return {id(rounded): master for rounded, master in _pairs(optimizer)}


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """At ZeRO 0, each parameter and its master (deepspeed 0.19: FP16_UnfusedOptimizer); in fp32 there are none."""
    for rounded, masters_of_group in zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ())):
        yield from zip(rounded, masters_of_group)


def _pieces(averages: list[Tensor], of: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of both, piece by piece: no more than a piece is ever copied."""
    for average, master in zip(averages, of, strict=True):
        yield from zip(average.view(-1).split(CHUNK), master.view(-1).split(CHUNK), strict=True)
