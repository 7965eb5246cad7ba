"""Whether a run's disk has room for what the run will leave there: checkpoints while a stage trains, and its model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config import Config, Stage
from rlhf.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from accelerators import Precision

# Bytes a parameter: two moments of AdamW, and the weight in float32 once more, where it has fewer bits or is sharded.
_MOMENTS, _MASTER = 8, 4


def check_room(config: Config, folder: Path, models: Mapping[Stage, Sequence[nn.Module]], precision: Precision) -> None:
    """Raise `RunError` where less is free than the stages are sure to write to `folder`.

    Args:
        models: what each stage trains, the first of which it leaves; nothing for the embedded one, which is small.
    """
    needed = bytes_needed(config, models, precision)
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    held = sum(path.stat().st_size for stage in models for path in (folder / stage).rglob("*") if path.is_file())
    free = shutil.disk_usage(place).free + held  # what is there of these stages gives way
    if needed > free:
        raise RunError(
            f"{folder}: checkpoints and models will take {_size(needed)}, and its disk has {_size(free)} free; make "
            "room, choose another --output, or keep one checkpoint instead of two with <stage>.checkpoint_every=0"
        )


def bytes_needed(config: Config, models: Mapping[Stage, Sequence[nn.Module]], precision: Precision) -> int:
    """Bytes on disk at the fullest moment: the models that are left, and one or two checkpoints of a stage."""
    width = precision.dtype.itemsize
    state = width + _MOMENTS + (_MASTER if width < 4 or config.engine.zero_stage else 0)
    left, most = 0, 0
    for stage, trained in models.items():
        counts = [sum(parameter.numel() for parameter in model.parameters()) for model in trained]
        left += width * sum(counts[:1])
        adapters_only = config.lora.rank > 0  # little beside the weights, which the checkpoints leave out
        checkpoint = 0 if adapters_only else state * sum(counts)
        most = max(most, left + checkpoint * _kept(config, stage))
    return most


def _kept(config: Config, stage: Stage) -> int:
    """Checkpoints that lie there together: that of the last step, and one of before where there is one."""
    section = getattr(config, stage)
    last = config.ppo.steps if stage == "ppo" else section.max_steps
    return 2 if section.checkpoint_every and (last is None or last > section.checkpoint_every) else 1


def _size(number: float) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
