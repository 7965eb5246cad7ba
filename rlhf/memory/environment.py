"""Where a run is planned for: a device that is described, or the accelerator that is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.schema import Config
from rlhf.memory.advice import Room
from rlhf.memory.model_state import Surroundings

if TYPE_CHECKING:
    from accelerators import Accelerator

PROCESS = 760 * 2**20
"""Bytes of a process that has imported torch, transformers and DeepSpeed; a run measures its own."""

# Of a device with an allocator of its own: what lies between blocks, and what its runtime takes for itself.
_MARGIN, _CONTEXT = 0.04, 2**29


def described(config: Config, devices: int, memory: int, host: int | None) -> tuple[Surroundings, Room]:
    """`devices` of `memory` bytes each, with an allocator of their own, in a machine whose host has `host` bytes."""
    precision = "bf16" if config.precision == "auto" else config.precision
    around = Surroundings(devices, precision, base=PROCESS, margin=_MARGIN, memory=memory)
    return around, Room(max(memory - _CONTEXT, 0), host and host // devices)


def found(accelerator: Accelerator, config: Config, ranks: int, *, local: int) -> tuple[Surroundings, Room]:
    """The accelerator that this process is bound to, `ranks` of them, `local` of them on this machine.

    A process holds what this one does now.
    """
    memory = accelerator.memory()
    one_memory = accelerator.device() == accelerator.host_device()
    around = Surroundings(
        ranks,
        accelerator.precision(config.precision).name,
        one_memory=one_memory,
        base=memory.allocated if one_memory else PROCESS,
        margin=0 if one_memory else _MARGIN,
        memory=memory.total,
    )
    # Ranks on one machine share the host's memory, but each has its device for itself.
    return around, Room(memory.total // local if one_memory else memory.total - _CONTEXT)
