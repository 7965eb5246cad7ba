"""Where a run is planned for: a device that is described, or the accelerator that is there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlhf.config.schema import Config
from rlhf.errors import ConfigError
from rlhf.memory.advice import Room
from rlhf.memory.model_state import Surroundings

if TYPE_CHECKING:
    from accelerators import Accelerator

PROCESS = 760 * 2**20
"""Bytes of a process that has imported torch, transformers and DeepSpeed; a run measures its own."""

_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# Of a device with an allocator of its own: what lies between blocks, and what its runtime takes for itself.
_MARGIN, _CONTEXT = 0.04, 2**29


def parse_bytes(text: str, option: str) -> int:
    """Bytes that are written as people write them: `80GiB`, `80GB`, `24g`.

    Raises:
        ConfigError: it is no size, or has no unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not match or not float(match[1]):
        raise ConfigError(f"{option} {text}: is no size; write e.g. 80GiB or 24GB")
    if not match[2]:
        raise ConfigError(f"{option} {text}: has no unit; write {match[1]}GiB, or {match[1]}MiB")
    return int(float(match[1]) * (_UNITS | _BINARY)[match[2]])


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
