"""Checkpoints of a stage: DeepSpeed's shards of every engine and the stage's own state, complete or absent.

Weights that are not trained (LoRA) are left out: the stage loads them from where it took them at first.

A checkpoint is written beside its final name and renamed when every rank has finished, so a crash leaves
the ones before it. The newest two are kept: if a disk fails one, the other remains.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf.engine import distributed
from rlhf.errors import as_resource_error
from rlhf.runs.stage_directory import STATE, parse_step
from rlhf.utils.atomic_io import PARTIAL, atomic_rename_dir

if TYPE_CHECKING:
    from rlhf.engine.engine import TrainingEngine
    from rlhf.runs.stage_directory import StageDirectory

_KEPT = 2


def save_checkpoint(
    directory: StageDirectory, step: int, engines: dict[str, TrainingEngine], state: dict[str, Any]
) -> None:
    """Write the checkpoint of `step` and remove all but the newest two; every rank calls it.

    Args:
        state: this rank's own numbers and tensors (random generators, counters).
    """
    final = directory.checkpoints / f"step-{step:08d}"
    with distributed.on_main("writing the checkpoint") as main:
        if main:
            shutil.rmtree(_partial(final), ignore_errors=True)
            _partial(final).mkdir(parents=True)
    # Published only when the files of all ranks are there: one that still wrote would find its folder gone.
    with distributed.on_all_ranks("writing the checkpoint"):
        for name, engine in engines.items():
            engine.engine.save_checkpoint(
                str(_partial(final) / name), tag="weights", save_latest=False, exclude_frozen_parameters=True
            )
        torch.save(state, _partial(final) / STATE.format(rank=distributed.world().rank))
    with distributed.on_main("publishing the checkpoint") as main:
        if main:
            atomic_rename_dir(_partial(final), final)
            for older in directory.all_checkpoints[:-_KEPT]:
                shutil.rmtree(older)


def restore_checkpoint(
    directory: StageDirectory, engines: dict[str, TrainingEngine]
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest complete checkpoint of a stage into its engines.

    Returns:
        (step, this rank's state), or None where there is no checkpoint.

    Raises:
        RunError: it was written by another number of ranks, or cannot be read.
    """
    path = directory.latest_checkpoint
    if path is None:
        return None
    directory.check_checkpoint(distributed.world().size)
    try:
        for name, engine in engines.items():
            whole = engine.parameter_counts["trainable"] == engine.parameter_counts["all"]
            engine.engine.load_checkpoint(str(path / name), tag="weights", load_module_strict=whole)
        state = torch.load(path / STATE.format(rank=distributed.world().rank), weights_only=True)
    except Exception as error:  # whatever the reader met in the files, the remedy is the same
        if as_resource_error(error):  # they may be in order
            raise
        raise directory.unreadable(_reason(error)) from error
    return parse_step(path), state


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)
