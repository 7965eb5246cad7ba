"""Pass the records of a run to TensorBoard, trackio or Weights & Biases, under the tags that the run itself would use.

Everything is written to one folder, and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.diagnosis.records import RunRecords
from rlhf.errors import RLHFError, RunError, summarize_error
from rlhf.reporting.hookspecs import SinkStage
from rlhf.reporting.recorder import add_events
from rlhf.reporting.sinks import describe_stage, find_sink
from rlhf.utils.jsonl import read_records


class TensorBoardSink:
    """Write TensorBoard events to a folder for each stage."""

    def __init__(self, stage: SinkStage) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(stage.folder / stage.stage))

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the numbers or the text of a record."""
        add_events(self._events, record)

    def close(self) -> None:
        """Write what is buffered."""
        self._events.close()


def find_target(name: str) -> type[Any]:
    """Return the class that receives the records for `--to NAME`.

    Raises:
        ConfigError: it needs a package that is not installed.
    """
    return TensorBoardSink if name == "tensorboard" else find_sink(name, f"--to {name}")


def replay(run: RunRecords, name: str, folder: Path) -> None:
    """Pass all records of a run to the program `name`, which writes to `folder`.

    Raises:
        ConfigError: it needs a package that is not installed.
        RunError: it failed.
    """
    target = find_target(name)
    if name == "trackio":  # which has no argument for its folder
        os.environ["TRACKIO_DIR"] = str(folder.resolve())
    try:
        for stage in run.stages:
            sink = target(replace(describe_stage(stage.directory, run.config), folder=folder))
            try:
                for record in read_records(stage.directory.metrics):
                    sink.write({"stage": stage.name, **record})
            finally:
                sink.close()
    except (RLHFError, OSError):
        raise
    except Exception as error:
        raise RunError(
            f"--to {name}: {name} failed ({summarize_error(error, 160)}); try another version of it, or another format"
        ) from error
