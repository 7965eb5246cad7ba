"""A stage's surroundings in this process, for tests that call a stage itself rather than the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerators import Accelerator, Precision, ShapePolicy
from rlhf.config import Stage, build_config
from rlhf.engine import distributed
from rlhf.metrics.recorder import Recorder
from rlhf.run import RunDirectory
from rlhf.stages.loop import StageContext


def stage_context(
    accelerator: Accelerator,
    folder: Path,
    stage: Stage,
    values: dict[str, Any],
    *,
    precision: Precision | None = None,
    recorder: Recorder | None = None,
) -> StageContext:
    """A context in fp32 and static shapes; it records nothing unless a recorder is given."""
    run = RunDirectory(folder)
    place = run.stage(stage)
    return StageContext(
        build_config(values),
        accelerator,
        precision or accelerator.precision("fp32"),
        ShapePolicy("static"),
        distributed.world(),
        run,
        place,
        recorder or Recorder(place, enabled=False),
    )
