"""The hook through which plugins offer sinks, which receive the records of a run while it runs.

A plugin is a distribution with an entry point in the group `rlhf.sinks` that names a module. It is loaded only if a
recipe has the key `sinks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pluggy

PROJECT = "rlhf_sinks"
GROUP = "rlhf.sinks"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class SinkStage:
    """The stage whose records a sink receives.

    Attributes:
        project: the name of the folder that contains the run's folder.
        run: the name of the run's folder.
        stage: sft, reward, dpo or ppo.
        config: the settings, as in `run.json`.
        folder: where the sink may write files; in a run, the stage's folder.
    """

    project: str
    run: str
    stage: str
    config: Mapping[str, Any]
    folder: Path


class Sink(Protocol):
    """Receiver of one stage's records; made from a `SinkStage` at the first record."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Receive one record, as docs/metrics.md defines a line of `metrics.jsonl`."""

    def close(self) -> None:
        """End; no record follows."""


@hookspec
def rlhf_sinks() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Return sinks as module:class, by the name in recipes (`sinks: [rewards]`).

    from rlhf.reporting.hookspecs import hookimpl

    @hookimpl
    def rlhf_sinks():
        return {"rewards": "my_sink:Rewards"}

    class Rewards:
        def __init__(self, stage):
            self.file = open(stage.folder / "rewards.txt", "a")

        def write(self, record):
            if "reward" in record:
                print(record["step"], record["reward"], file=self.file, flush=True)

        def close(self):
            self.file.close()
    """
