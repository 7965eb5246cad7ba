"""Checkpoints of a stage: the trained numbers of every engine and the stage's state, complete or absent.

Any number of ranks can read them, at any ZeRO stage (`rlhf.checkpoint.engine_state`). Only the random generators are
those of a rank.

A checkpoint is written under a temporary name, with a manifest of its files as the last one, and renamed when every
rank has written its files and read them back, so neither a crash nor a bad disk replaces an earlier one. The newest two
are kept, in case a disk damages one later, which the manifest shows.
"""

from __future__ import annotations

import io
import re
import shutil
from collections import ChainMap
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlhf.checkpoint.engine_state import load_engine, save_engine
from rlhf.engine import distributed, fragments
from rlhf.errors import DivergedError, as_resource_error
from rlhf.runs.stage_directory import parse_step
from rlhf.utils.atomic_io import (
    PARTIAL,
    PICKLE_PROTOCOL,
    atomic_rename_dir,
    drop_from_memory,
    read_back_error,
    remove_folder,
)
from rlhf.utils.full_disk import open_waiting, retry_when_full
from rlhf.utils.manifest import digest_folder, write_manifest

if TYPE_CHECKING:
    from rlhf.engine.engine import TrainingEngine
    from rlhf.runs.stage_directory import StageDirectory

_KEPT = 2
_RANK = re.compile(r"rank(\d+)\.")  # actor/rank3.safetensors, random-rank3.pt
_STATE, _RANDOM = "state.pt", "random-rank{rank}.pt"


def save_checkpoint(
    directory: StageDirectory,
    step: int,
    engines: dict[str, TrainingEngine],
    state: dict[str, Any],
    random: dict[str, Any] | None = None,
) -> None:
    """Write the checkpoint of `step` and remove all but the newest two; every rank calls it.

    Args:
        directory: the stage's folder.
        step: the number of steps taken.
        engines: the engines by name.
        state: numbers and tensors that are the same on all ranks (counters); those of rank 0 are written.
        random: the state of this rank's random generators.

    Raises:
        DivergedError: a weight is not finite; earlier checkpoints stay.
    """
    final = directory.checkpoints / f"step-{step:08d}"
    with distributed.on_main("writing the checkpoint") as main:
        if main:
            retry_when_full(lambda: _make_folders(_partial(final), engines), final)
    # Renamed only after all ranks have written: a rank that still writes would lose its folder.
    with distributed.on_all_ranks("writing the checkpoint"):
        for name, engine in engines.items():
            if count := save_engine(engine, _partial(final) / name):
                raise DivergedError(
                    f"{directory.name}: {count:,} weights of the {name} model are not finite after step {step}, so no "
                    f"checkpoint was written; {directory.describe_last_checkpoint()}; lower {engine.placement.rate_key}"
                )
        files = {_RANDOM.format(rank=distributed.world().rank): _encode(random)}
        if distributed.world().is_main:
            counters = {name: fragments.read_counters(engine) for name, engine in engines.items()}
            files[_STATE] = _encode({"state": state, "engines": counters})
            if directory.evaluations.is_file():  # without these, the stage may keep another model
                files[directory.evaluations.name] = directory.evaluations.read_bytes()
        for name, content in files.items():
            _save(content, _partial(final) / name)
    with distributed.on_all_ranks("reading the checkpoint's files"):
        digests = digest_folder(_partial(final), _is_of_this_rank)
    gathered = distributed.all_gather_objects(digests)
    with distributed.on_main("publishing the checkpoint") as main:
        if main:
            write_manifest(_partial(final), dict(ChainMap(*gathered)))
            atomic_rename_dir(_partial(final), final)
            for older in directory.all_checkpoints[:-_KEPT]:
                remove_folder(older)


def verify_checkpoint(directory: StageDirectory) -> None:
    """Compare the newest checkpoint of a stage, if it has one, with its manifest; every rank calls it.

    Each rank reads the files that it wrote, once in a process.

    Raises:
        RunError: a file differs.
    """
    path = directory.latest_checkpoint
    with distributed.on_all_ranks("checking the checkpoint"):
        if path:
            directory.check_files(path, _is_of_this_rank)


class Checkpoint(NamedTuple):
    """What a stage continues with, in addition to its engines.

    Attributes:
        step: the number of steps taken.
        state: what was given to `save_checkpoint`.
        random: the state of this rank's random generators; None if fewer ranks wrote the checkpoint.
        ranks: the number of ranks that wrote it.
    """

    step: int
    state: dict[str, Any]
    random: dict[str, Any] | None
    ranks: int


def restore_checkpoint(directory: StageDirectory, engines: dict[str, TrainingEngine]) -> Checkpoint | None:
    """Load the newest complete checkpoint of a stage into its engines; None if there is none.

    Raises:
        RunError: it cannot be read.
    """
    path = directory.latest_checkpoint
    if path is None:
        return None
    verify_checkpoint(directory)
    random = path / _RANDOM.format(rank=distributed.world().rank)
    try:
        content = torch.load(path / _STATE, weights_only=True)
        for name, engine in engines.items():
            load_engine(engine, path / name)
            fragments.set_counters(engine, content["engines"][name])
        state = content["state"]
        own = torch.load(random, weights_only=True) if random.exists() else None
    except Exception as error:  # the remedy is the same for all errors in the files
        if as_resource_error(error):  # the files may be intact
            raise
        raise directory.unreadable(_reason(error)) from error
    return Checkpoint(parse_step(path), state, own, len(list(path.glob(_RANDOM.format(rank="*")))))


def _encode(content: Any) -> bytes:
    """Return the content of a small file of torch."""
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=PICKLE_PROTOCOL)
    return buffer.getvalue()


def _save(content: bytes, path: Path) -> None:
    """Write a small file, and read it back."""
    with open_waiting(path) as file:
        file.write(content)
    drop_from_memory(path)
    if path.read_bytes() != content:
        raise read_back_error(path)


def _make_folders(path: Path, names: Iterable[str]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name in names:
        (path / name).mkdir()


def _is_of_this_rank(name: str) -> bool:
    """Return True if this rank writes a checkpoint's file: names have the rank, or the file is rank 0's."""
    rank = int(match[1]) if (match := _RANK.search(name)) else 0
    return rank % distributed.world().size == distributed.world().rank


def _reason(error: Exception) -> str:
    if isinstance(error, UnpicklingError):
        return "a file holds objects other than tensors and settings, and code in it is not run"
    if isinstance(error, KeyError):
        return f"{_STATE} has no {error}"
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)
