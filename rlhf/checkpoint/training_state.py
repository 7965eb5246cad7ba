"""Checkpoints of a stage: DeepSpeed's shards of every engine and the stage's state, complete or absent.

Frozen weights (LoRA) are not included: the stage loads them again from their source.

A checkpoint is written under a temporary name, with a manifest of its files as the last one, and renamed when every
rank has finished, so a crash does not damage earlier ones. The newest two are kept, in case a disk damages one, which
the manifest shows.
"""

from __future__ import annotations

import re
import shutil
from collections import ChainMap
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from rlhf.engine import distributed
from rlhf.errors import as_resource_error
from rlhf.runs.stage_directory import STATE, parse_step
from rlhf.utils.atomic_io import PARTIAL, PICKLE_PROTOCOL, atomic_rename_dir
from rlhf.utils.manifest import digest_folder, write_manifest

if TYPE_CHECKING:
    from rlhf.engine.engine import TrainingEngine
    from rlhf.runs.stage_directory import StageDirectory

_KEPT = 2
_RANK = re.compile(r"(?<!mp_)rank_?(\d+)")  # zero_pp_rank_3_mp_rank_00_optim_states.pt, state-rank3.pt


def save_checkpoint(
    directory: StageDirectory, step: int, engines: dict[str, TrainingEngine], state: dict[str, Any]
) -> None:
    """Write the checkpoint of `step` and remove all but the newest two; every rank calls it.

    Args:
        directory: the stage's folder.
        step: the number of steps taken.
        engines: the engines by name.
        state: this rank's numbers and tensors (random generators, counters).
    """
    final = directory.checkpoints / f"step-{step:08d}"
    with distributed.on_main("writing the checkpoint") as main:
        if main:
            shutil.rmtree(_partial(final), ignore_errors=True)
            _partial(final).mkdir(parents=True)
    # Renamed only after all ranks have written: a rank that still writes would lose its folder.
    with distributed.on_all_ranks("writing the checkpoint"):
        for name, engine in engines.items():
            engine.engine.save_checkpoint(
                str(_partial(final) / name), tag="weights", save_latest=False, exclude_frozen_parameters=True
            )
        file = _partial(final) / STATE.format(rank=distributed.world().rank)
        torch.save(state, file, pickle_protocol=PICKLE_PROTOCOL)
    with distributed.on_all_ranks("reading the checkpoint's files"):
        digests = digest_folder(_partial(final), _is_of_this_rank)
    gathered = distributed.all_gather_objects(digests)
    with distributed.on_main("publishing the checkpoint") as main:
        if main:
            write_manifest(_partial(final), dict(ChainMap(*gathered)))
            atomic_rename_dir(_partial(final), final)
            for older in directory.all_checkpoints[:-_KEPT]:
                shutil.rmtree(older)


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


def restore_checkpoint(
    directory: StageDirectory, engines: dict[str, TrainingEngine]
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest complete checkpoint of a stage into its engines.

    Returns:
        (step, this rank's state), or None if there is no checkpoint.

    Raises:
        RunError: it was written by another number of ranks, or cannot be read.
    """
    path = directory.latest_checkpoint
    if path is None:
        return None
    directory.check_checkpoint(distributed.world().size)
    verify_checkpoint(directory)
    try:
        for name, engine in engines.items():
            whole = engine.parameter_counts["trainable"] == engine.parameter_counts["all"]
            engine.engine.load_checkpoint(str(path / name), tag="weights", load_module_strict=whole)
        state = torch.load(path / STATE.format(rank=distributed.world().rank), weights_only=True)
    except Exception as error:  # the remedy is the same for all errors in the files
        if as_resource_error(error):  # the files may be intact
            raise
        raise directory.unreadable(_reason(error)) from error
    return parse_step(path), state


def _is_of_this_rank(name: str) -> bool:
    """Return True if this rank writes a checkpoint's file: names have the rank, or the file is rank 0's."""
    rank = int(match[1]) if (match := _RANK.search(name)) else 0
    return rank % distributed.world().size == distributed.world().rank


def _reason(error: Exception) -> str:
    if isinstance(error, UnpicklingError):
        return "a file holds objects other than tensors and settings, and code in it is not run"
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)
