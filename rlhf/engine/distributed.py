"""The process group of a run, and the few collectives that the stages need.

`start_process_group` starts it on the selected accelerator and takes it down again; a single process needs no
launcher. The helpers work alike with one rank and with many.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from accelerators import verify_agreement
from rlhf.errors import RemoteRankError
from rlhf.launchers.rank_monitor import get_store, monitor_ranks
from rlhf.models import transformers_patches
from rlhf.reporting import verbosity
from rlhf.utils.process_info import ProcessInfo, current_process

if TYPE_CHECKING:
    from accelerators import Accelerator, Selection
    from rlhf.launchers.coordinator import WorkerClient


_WAITS = itertools.count()  # the same on all ranks, which wait for the same things
_GROUPS = itertools.count()  # so that none finds what is left of another in the store, such as addresses
_MEETING = "rlhf"  # the scheme of `_meet`
_SECONDS_TO_NAME = 20.0  # for the rank that is late to be found, before a collective only says that somebody is
_members: list[WorkerClient | None] = []  # the session's connection with the other ranks


@dataclass(frozen=True)
class World:
    """Place of this process in the run."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextmanager
def start_process_group(selection: Selection, *, timeout: float = 1800.0) -> Iterator[Accelerator]:
    """Bind this process to its device, start the process group, and end it when the block is left.

    Args:
        timeout: seconds that ranks wait for one another.

    Raises:
        AcceleratorError: the backend cannot be created, DeepSpeed disagrees with it, or the ranks chose
            different backends.
        RemoteRankError: another rank failed.
    """
    accelerator = selection.create()
    place = current_process()
    with _process_group_of(place):
        accelerator.bind(place.local_rank)
        with verbosity.suppress_stdout():
            accelerator.prepare_deepspeed()
            import deepspeed

            from rlhf.engine import deepspeed_patches

            deepspeed_patches.check_version(deepspeed.__version__)
            transformers_patches.check_version(version("transformers"))

        # Left before the group is: collectives that wait for a rank that is gone may keep it from being taken down.
        with monitor_ranks(place, timeout) as member:
            if place.size == 1:  # no launcher, so no address to meet at
                with verbosity.suppress_stdout():  # gloo of torch 2.9 prints that it is alone
                    dist.init_process_group(accelerator.dist_backend(), store=dist.HashStore(), rank=0, world_size=1)
            # DeepSpeed joins the process group above, or makes one with its own settings for the device.
            with verbosity.suppress_stdout():  # for some devices it compiles collectives
                deepspeed.init_distributed(
                    dist_backend=accelerator.dist_backend(),
                    verbose=False,
                    timeout=timedelta(seconds=timeout + _SECONDS_TO_NAME),
                    init_method=f"{_MEETING}://",
                )
            _members.append(member)
            verify_agreement(all_gather_objects(accelerator.name))
            yield accelerator


def _meet(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Where torch has the ranks of a process group find each other: (store, rank, size)."""
    place = current_process()
    yield (
        dist.PrefixStore(f"rlhf/group/{next(_GROUPS)}", get_store(place, timeout.total_seconds())),
        place.rank,
        place.size,
    )


dist.register_rendezvous_handler(_MEETING, _meet)


@contextmanager
def _process_group_of(place: ProcessInfo) -> Iterator[None]:
    """The environment in which libraries find `place`; it ends with the group and what they keep of it."""
    before = dict(os.environ)
    variables = place.variables() or {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update(variables)
    try:
        yield
    finally:
        # Collectives of a failed rank may be pending; the group ends with the process either way.
        _members.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
            from rlhf.engine.deepspeed_patches import clear_process_groups

            clear_process_groups()
        for name in variables.keys() - before.keys():  # a process that this one starts is not one of its ranks
            os.environ.pop(name, None)


def world() -> World:
    """This process's place; a world of one where no process group is running."""
    if not dist.is_initialized():
        return World(0, 1)
    return World(dist.get_rank(), dist.get_world_size())


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor summed over ranks, in place; no host read."""
    if world().size > 1:
        _arrive()
        dist.all_reduce(tensor)
    return tensor


def all_gather_objects(value: Any) -> list[Any]:
    """One picklable value of each rank, in rank order."""
    if world().size == 1:
        return [value]
    _arrive()
    values: list[Any] = [None] * world().size
    dist.all_gather_object(values, value)
    return values


def _arrive() -> None:
    """Note that this rank has come to a collective: where it hangs, it is seen who has not."""
    for member in filter(None, _members):
        member.progress += 1


@contextmanager
def _waiting() -> Iterator[None]:
    """In this block this rank waits for another one that may take its time."""
    for member in filter(None, _members):
        member.is_waiting = True
    try:
        yield
    finally:
        for member in filter(None, _members):
            member.is_waiting = False


@contextmanager
def on_all_ranks(what: str) -> Iterator[None]:
    """Do something on every rank; no rank goes on before all have done it, and if it fails on one, it fails on all.

    Raises:
        RemoteRankError: on the other ranks, when one failed.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
    try:
        failures = all_gather_objects(repr(error) if error else None)
    except Exception as lost:  # another rank died; what failed here is not a consequence of that
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
    """`on_all_ranks`, for what rank 0 alone does: the block receives True there, and False on the others.

    Args:
        takes_long: longer perhaps than a collective waits (downloads, reading); the others wait while rank 0 lives.
    """
    with _only([0], what, takes_long=takes_long) as chosen:
        yield chosen


@contextmanager
def on_each_machine(what: str) -> Iterator[bool]:
    """`on_main`, for what takes long and one rank of each machine does for the others there."""
    first = [rank for rank, place in enumerate(all_gather_objects(current_process().local_rank)) if place == 0]
    with _only(first, what, takes_long=True) as chosen:
        yield chosen


@contextmanager
def _only(ranks: Sequence[int], what: str, *, takes_long: bool) -> Iterator[bool]:
    with on_all_ranks(what):
        chosen = world().rank in ranks
        key = f"rlhf/{next(_WAITS)}" if takes_long and world().size > 1 else None
        if key and not chosen:
            with _waiting():
                _get_default_store().wait([f"{key}/{rank}" for rank in ranks], timedelta(days=30))
        try:
            yield chosen
        finally:
            if key and chosen:
                _get_default_store().set(f"{key}/{world().rank}", "done")
