"""The device: also reachable as `torch.hpu`."""

import atexit
import functools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gaudi_sim import accounting, node
from gaudi_sim.build import load

from . import metrics, random
from .memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
)
from .random import default_generators, get_rng_state, initial_seed, manual_seed, manual_seed_all, set_rng_state
from .streams import Event, Stream, current_stream, default_stream, set_stream, stream

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_rng_state",
    "init",
    "initial_seed",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "metrics",
    "random",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]

if accounting.is_lazy():
    from .graphs import HPUGraph, graph

    __all__ += ["HPUGraph", "graph"]


def init() -> None:
    """Open the card."""
    node.acquire_card()
    if error := node.error_of_operators():
        atexit.unregister(load().drain_autograd)  # it would run an operator
        load().refuse_operators(error)


def is_initialized() -> bool:
    """Whether the card is open."""
    return True


def is_available() -> bool:
    """Whether there is a card."""
    return device_count() > 0


@functools.cache
def device_count() -> int:
    """Cards that hl-smi lists."""
    return len(subprocess.run(["hl-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())


def current_device() -> int:
    """Return 0: a process has one card, whichever module that is."""
    return 0


def set_device(device: Any) -> None:
    """Nothing: a process has one card."""


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Nothing: a process has one card."""
    yield


def get_device_name(device: Any = None) -> str:
    """Return the chip's name, marked as simulated."""
    return "GAUDI2 (simulated)"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that torch.autocast may use."""
    return [torch.bfloat16, torch.float16]


def synchronize(device: Any = None) -> None:
    """Wait for the device, which is never behind; refused while a graph is recorded, as CUDA refuses it."""
    if accounting.is_lazy() and HPUGraph.is_recording:
        raise RuntimeError("synchronize: the device cannot be waited for while a graph is recorded")


_initialized = True  # asked by PyTorch


def _is_in_bad_fork() -> bool:
    """Return False: a forked child can use the device as its parent does."""
    return False
