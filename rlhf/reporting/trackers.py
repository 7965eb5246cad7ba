"""Sinks for trackio and Weights & Biases, which are packages that need not be installed.

Both record on this machine alone, one of their runs for each stage, with TensorBoard's names of the numbers.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from rlhf.reporting.hookspecs import SinkStage, hookimpl
from rlhf.reporting.recorder import tag_numbers

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Variables that would make trackio send records to another machine."""


@hookimpl
def rlhf_sinks() -> Mapping[str, str]:
    """Return the built-in sinks."""
    return {"trackio": f"{__name__}:TrackioSink", "wandb": f"{__name__}:WandbSink"}


class TrackioSink:
    """Record numbers in trackio's folder: TRACKIO_DIR, which trackio reads when it is imported, or its default."""

    package = "trackio"

    def __init__(self, stage: SinkStage) -> None:
        for variable in _REMOTE:
            os.environ.pop(variable, None)
        import trackio

        with redirect_stdout(io.StringIO()):  # instructions of several lines
            self._run = trackio.init(
                _clean(stage.project),
                name=f"{stage.run}/{stage.stage}",
                group=stage.run,
                config=dict(stage.config),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def write(self, record: Mapping[str, Any]) -> None:
        """Record the numbers of `record`."""
        if numbers := tag_numbers(record):
            self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        """Wait until everything is on disk."""
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # not the run's own method, after which it would be finished again at exit


class WandbSink:
    """Record numbers in an offline run of Weights & Biases, in a folder `wandb` in the sink's folder."""

    package = "wandb"

    def __init__(self, stage: SinkStage) -> None:
        import wandb

        self._run = wandb.init(
            project=_clean(stage.project),
            group=stage.run,
            name=f"{stage.run}/{stage.stage}",
            job_type=stage.stage,
            config=dict(stage.config),
            dir=str(stage.folder),
            mode="offline",
            reinit="create_new",
            settings=wandb.Settings(
                console="off", silent=True, symlink=False, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Record the numbers of `record`; numbers of one step, such as a held-out evaluation's, become one row."""
        if numbers := tag_numbers(record):
            self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._run.finish()


def _clean(project: str) -> str:
    """Return the name of a project without characters that trackers refuse."""
    return re.sub(r"[^\w.-]+", "-", project).strip("-") or "rlhf"
