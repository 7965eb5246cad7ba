"""The process group of a run, and the few collectives that the stages need.

`start_process_group` starts it on the selected accelerator and ends it; a single process needs no launcher. All helpers
work with one rank and with many.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import register_rendezvous_handler

from accelerators import verify_agreement
from rlhf.errors import RemoteRankError
from rlhf.launchers.rank_monitor import get_store, monitor_ranks
from rlhf.losses.log_probs import use_chunks
from rlhf.models import transformers_patches
from rlhf.reporting import verbosity
from rlhf.utils.process_info import ProcessInfo, current_process

if TYPE_CHECKING:
    from accelerators import Accelerator, Selection
    from rlhf.launchers.coordinator import WorkerClient


_SCHEME = "rlhf"  # of the URL by which torch finds `_rendezvous`
_SECONDS_TO_NAME = 20.0  # to name the late rank, before a collective fails without naming it


@dataclass
class _Process:
    """The state of this process's groups.

    Attributes:
        client: the connection with the other ranks; None without a group, or with one rank.
        waits: counter of waits, equal on all ranks.
        groups: counter of groups, so that no group reads entries of an earlier one in the store.
    """

    client: WorkerClient | None = None
    waits: Iterator[int] = field(default_factory=itertools.count)
    groups: Iterator[int] = field(default_factory=itertools.count)


_process = _Process()


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of ranks."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


@contextmanager
def start_process_group(selection: Selection, *, timeout: float = 1800.0) -> Iterator[Accelerator]:
    """Bind this process to its device, start the process group, and end it after the block.

    Args:
        selection: the backend that was chosen.
        timeout: seconds that ranks wait for one another.

    Raises:
        AcceleratorError: the backend cannot be created, DeepSpeed disagrees with it, or the ranks chose
            different backends.
        DependencyError: DeepSpeed or transformers is of a release that rlhf was not written for.
        RemoteRankError: another rank failed.
    """
    accelerator = selection.create()
    process = current_process()
    with _rank_environment(process):
        accelerator.bind(process.local_rank)
        use_chunks(accelerator.chunk_elements)
        with verbosity.suppress_stdout():
            accelerator.prepare_deepspeed()
            import deepspeed

            from rlhf.engine import deepspeed_patches

            deepspeed_patches.check_version(deepspeed.__version__)
            transformers_patches.check_version(version("transformers"))

        # Ends before the group does: collectives that wait for a dead rank may block the group's end.
        with monitor_ranks(process, timeout) as client:
            if process.size == 1:  # there is no launcher, so no address to meet at
                with verbosity.suppress_stdout():  # gloo of torch 2.9 prints that it is alone
                    dist.init_process_group(accelerator.dist_backend(), store=HashStore(), rank=0, world_size=1)
            # DeepSpeed joins the process group above, or starts one with its settings for the device.
            with verbosity.suppress_stdout():  # for some devices it compiles collectives
                deepspeed.init_distributed(
                    dist_backend=accelerator.dist_backend(),
                    verbose=False,
                    timeout=timedelta(seconds=timeout + _SECONDS_TO_NAME),
                    init_method=f"{_SCHEME}://",
                )
            _process.client = client
            verify_agreement(all_gather_objects(accelerator.name))
            yield accelerator
            accelerator.teardown()  # not after an error: the device may not answer any more


def _rendezvous(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, size) for torch, which connects the ranks of a group with them."""
    process = current_process()
    store = get_store(process, timeout.total_seconds())
    yield PrefixStore(f"rlhf/group/{next(_process.groups)}", store), process.rank, process.size


register_rendezvous_handler(_SCHEME, _rendezvous)


@contextmanager
def _rank_environment(process: ProcessInfo) -> Iterator[None]:
    """Set the variables in which libraries look for the rank; end the group and unset them after the block."""
    before = dict(os.environ)
    variables = process.variables() or {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update(variables)
    try:
        yield
    finally:
        # Collectives of a failed rank may be pending; the group ends with the process in any case.
        _process.client = None
        if dist.is_initialized():
            dist.destroy_process_group()
            from rlhf.engine.deepspeed_patches import clear_process_groups

            clear_process_groups()
        for name in variables.keys() - before.keys():  # child processes are not ranks of the run
            os.environ.pop(name, None)


def world() -> World:
    """Return this process's rank and the number of ranks; rank 0 of 1 if no group is running."""
    if not dist.is_initialized():
        return World(0, 1)
    return World(dist.get_rank(), dist.get_world_size())


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the tensor over ranks, in place and without reading it on the host, and return it."""
    if world().size > 1:
        _count_collective()
        dist.all_reduce(tensor)
    return tensor


def all_max(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce the tensor to its maximum over ranks, as `all_sum` does to its sum, and return it."""
    if world().size > 1:
        _count_collective()
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def all_gather_objects(value: T) -> list[T]:
    """Return one picklable value of each rank, in the order of ranks."""
    if world().size == 1:
        return [value]
    _count_collective()
    values: list[Any] = [None] * world().size
    dist.all_gather_object(values, value)
    return values


def _count_collective() -> None:
    """Count a collective of this rank; if it hangs, the counts show which rank is behind."""
    if _process.client:
        _process.client.progress += 1


@contextmanager
def _waiting() -> Iterator[None]:
    """Mark this rank as waiting for another one, which may take long, during the block."""
    client = _process.client
    if client:
        client.is_waiting = True
    try:
        yield
    finally:
        if client:
            client.is_waiting = False


@contextmanager
def on_all_ranks(what: str) -> Iterator[None]:
    """Run the block on every rank and wait for all of them; if it fails on one, it fails on all.

    Args:
        what: the action, for the error: "writing the checkpoint".

    Raises:
        RemoteRankError: on the other ranks, if one failed.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
    try:
        failures = all_gather_objects(repr(error) if error else None)
    except Exception as lost:  # another rank ended; the failure here is not its consequence
        if error:
            raise error from lost
        raise
    if error:
        raise error
    for rank, failure in enumerate(failures):
        if failure:
            raise RemoteRankError(f"{what} failed on rank {rank}: {failure}")


@contextmanager
def on_main(what: str, *, takes_long: bool = False) -> Iterator[bool]:
    """Run the block as `on_all_ranks` does; yield True on rank 0, which alone acts, and False on the others.

    Args:
        what: as in `on_all_ranks`.
        takes_long: the action may take longer than the timeout of a collective (downloads, reading); the others wait as
            long as rank 0 is alive.
    """
    with _on_ranks([0], what, takes_long=takes_long) as acts:
        yield acts


@contextmanager
def on_each_machine(what: str) -> Iterator[bool]:
    """Run the block as `on_main` does if it takes long, with one acting rank on each machine.

    Args:
        what: as in `on_all_ranks`.
    """
    first = [rank for rank, local in enumerate(all_gather_objects(current_process().local_rank)) if local == 0]
    with _on_ranks(first, what, takes_long=True) as acts:
        yield acts


@contextmanager
def _on_ranks(ranks: Sequence[int], what: str, *, takes_long: bool) -> Iterator[bool]:
    with on_all_ranks(what):
        acts = world().rank in ranks
        key = f"rlhf/{next(_process.waits)}" if takes_long and world().size > 1 else None
        if key and not acts:
            with _waiting():
                _get_default_store().wait([f"{key}/{rank}" for rank in ranks], timedelta(days=30))
        try:
            yield acts
        finally:
            if key and acts:
                _get_default_store().set(f"{key}/{world().rank}", "done")
