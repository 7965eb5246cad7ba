"""Collectives between simulated cards: gloo, over the memory that the device's tensors lie in.

Importing this registers the backend "hccl" with torch.distributed.
"""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from gaudi_sim import node
from gaudi_sim.behaviours import is_simulated
from gaudi_sim.build import load

_device = load()

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""Methods of a process group that take tensors, under the names of all torch versions that rlhf admits."""


def initialize_distributed_hpu() -> tuple[int, int, int]:
    """World size, rank and local rank, as the launcher set them; the first call with a launcher chooses the module."""
    world_size, rank, local_rank = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT.items())
    if world_size > 1:
        node.choose_module(local_rank)
    return world_size, rank, local_rank


_ENVIRONMENT = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
initialize_distributed_hpu()


class Work(dist.Work):
    """Collectives in progress, whose results are tensors of the device."""

    def __init__(self, works: list[dist.Work], results: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all collectives."""
        return all(work.wait(timeout) for work in self._works)

    def synchronize(self) -> None:
        """Wait for all collectives."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all collectives have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all collectives have succeeded."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """Return the first error; None if there is none."""
        return next((error for work in self._works if (error := work.exception())), None)

    def source_rank(self) -> int:
        """Return the sender of a message that was received from any rank."""
        return self._works[0]._source_rank()

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """Return the results on the device."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the results."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[torch.device("hpu", 0)])
        future.set_result(self._results)
        return future


class ProcessGroup(dist.ProcessGroup):
    """Ranks that work on tensors of the device; a gloo group does the work."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub has one of the constructors only
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType
        self._set_default_backend(kind.CUSTOM)
        self._register_backend(torch.device("hpu"), kind.CUSTOM, backend)
        self._gloo = dist.ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(kind.GLOO)
        self._gloo._register_backend(torch.device("cpu"), kind.GLOO, backend)
        self._coalesced: list[Work] | None = None

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return Work(list(works), [tensor for work in works for tensor in work.result()])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        # Without the device that the options name: it would be ours, which gloo does not know.
        return self._gloo.barrier(dist.BarrierOptions())


def _on_cpu(collective: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "hpu":
        if not is_simulated("host_tensors"):
            return tensor
        raise RuntimeError(f"hccl: {collective} of a tensor on {tensor.device}; move it to hpu, or use a gloo group")
    on_cpu: torch.Tensor = _device.to_cpu(tensor)
    return on_cpu


def _averages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call asks for AVG, in its options or as a separate argument."""
    average = dist.ReduceOp.AVG
    values = [getattr(value, "reduceOp", value) for value in (*args, *kwargs.values())]
    return any(value == average for value in values if isinstance(value, (dist.ReduceOp, type(average))))


def _forwarded(name: str) -> Callable[..., dist.Work]:
    """Return a method that runs gloo's on the same memory, so that nothing needs to be copied back."""

    def collective(self: ProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        if _averages(args, kwargs) and is_simulated("average"):
            raise RuntimeError(f"hccl: {name} has no AVG; divide the sum")
        call = functools.partial(_on_cpu, name)
        cpu_args, cpu_kwargs = pytree.tree_map_only(torch.Tensor, call, (args, kwargs))
        results = [leaf for leaf in pytree.tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
        work = Work([getattr(self._gloo, name)(*cpu_args, **cpu_kwargs)], results)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    collective.__name__ = name
    return collective


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _forwarded(_name))

dist.Backend.register_backend("hccl", ProcessGroup, devices=["hpu"])
