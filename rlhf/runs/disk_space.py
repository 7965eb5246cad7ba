"""Check that a run's disk has room for its checkpoints and models."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf.config.schema import Config, Stage
from rlhf.errors import RunError
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from accelerators import Precision

# Bytes per parameter in a checkpoint: the float32 weight and two moments of AdamW; and its moving average.
_STATE, _AVERAGE = 12, 4


class StorageNeed(NamedTuple):
    """The models that a stage trains, the first of which it saves, and its steps."""

    models: Sequence[nn.Module]
    steps: int


def check_disk_space(config: Config, folder: Path, needs: Mapping[Stage, StorageNeed], precision: Precision) -> None:
    """Raise `RunError` if `folder` has less free space than the stages will need at least.

    Args:
        needs: the need of each stage that is still to be run; small models, such as the embedded one, are left out.
    """
    needed = bytes_needed(config, needs, precision)
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    replaced = sum(path.stat().st_size for stage in needs for path in (folder / stage).rglob("*") if path.is_file())
    free = shutil.disk_usage(place).free + replaced
    if needed > free:
        raise RunError(
            f"{folder}: checkpoints and models need {format_bytes(needed)}, and its disk has "
            f"{format_bytes(free)} free; "
            "make room, choose another --output, or write fewer checkpoints (<stage>.checkpoint_every)"
        )


def bytes_needed(config: Config, needs: Mapping[Stage, StorageNeed], precision: Precision) -> int:
    """Return the largest number of bytes on disk at any time: saved models and the checkpoints of a stage."""
    width = precision.dtype.itemsize
    saved, most = 0, 0
    for stage, need in needs.items():
        counts = [sum(parameter.numel() for parameter in model.parameters()) for model in need.models]
        adapters_only = config.lora.rank > 0  # small compared with the weights, which are not in checkpoints
        checkpoint = 0 if adapters_only else _STATE * sum(counts)
        every = getattr(config, stage).checkpoint_every
        written = -(-need.steps // every) if every else 1
        averaged = stage == "ppo" and config.ppo.ema is not None  # the actor once more, in checkpoints and as a model
        checkpoint += 0 if adapters_only else _AVERAGE * averaged * sum(counts[:1])
        # The newest two are kept. A third is written before the oldest is deleted, and the model next to two.
        critic = sum(counts[1:]) if stage == "ppo" and config.ppo.save_critic else 0
        trained = width * ((1 + averaged) * sum(counts[:1]) + critic)
        best = trained if getattr(config, stage).selection_metric else 0  # kept while other models are evaluated
        most = max(most, saved + max(checkpoint * min(written, 3) + best, checkpoint * min(written, 2) + trained))
        saved += trained
    return most
