"""Bytes that tensors on the device hold. What is freed is not kept, so reserved and allocated memory are the same."""

from typing import Any

from gaudi_sim.build import load

_device = load()


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes in all, in use, and at most in use since `reset_peak_memory_stats`."""
    memory = _device.memory()
    return {"Limit": memory["total"], "InUse": memory["in_use"], "MaxInUse": memory["peak"]}


def memory_allocated(device: Any = None) -> int:
    """Bytes in use."""
    return memory_stats()["InUse"]


def max_memory_allocated(device: Any = None) -> int:
    """Bytes in use at most since `reset_peak_memory_stats`."""
    return memory_stats()["MaxInUse"]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and in all."""
    stats = memory_stats()
    return stats["Limit"] - stats["InUse"], stats["Limit"]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset the peak to what is allocated now."""
    _device.reset_peak()


def empty_cache() -> None:
    """Nothing is kept that could be returned."""


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated
reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
