"""Make the records of a run by hand: `run.json`, `metrics.jsonl` and `heldout.jsonl`, as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.config.schema import build_config
from rlhf.diagnosis.records import RunRecords, read_run
from rlhf.reporting.recorder import Recorder
from rlhf.runs.directory import RunDirectory


def write_run(
    folder: Path,
    stages: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    steps: Mapping[str, Sequence[int]] | None = None,
    heldout: Mapping[str, Mapping[int, list[dict[str, Any]]]] | None = None,
    settings: dict[str, Any] | None = None,
    precision: str | None = "fp32",
    summaries: Mapping[str, dict[str, Any]] | None = None,
) -> RunRecords:
    """Write a run and read it again.

    Args:
        stages: the values of each number of each stage. Numbers of training begin at step 1, those of held-out rows at
            step 0, both in steps of one unless `steps` names theirs.
        steps: the steps of single numbers, by name.
    """
    directory, steps = RunDirectory(folder), steps or {}
    folder.mkdir(parents=True)
    config = build_config({"output": str(folder), **(settings or {})})
    description = {
        "config": config.model_dump(mode="json"),
        "stages": {name: {"precision": precision} for name in stages},
        "invocations": [{"command": "rlhf", "stages": list(stages), "started": "2026-01-02T03:04:05+00:00"}],
        "versions": {"rlhf": "0.1.0"},
        "data": {},
        "accelerator": None,
    }
    directory.description.write_text(json.dumps(description))
    for name, numbers in stages.items():
        stage = directory.stage(name)
        records: dict[int, dict[str, float]] = {}
        for key, values in numbers.items():
            first = 0 if key.startswith("heldout_") else 1
            for step, value in zip(steps.get(key, range(first, first + len(values))), values, strict=True):
                records.setdefault(step, {})[key] = value
        with Recorder(stage) as recorder:
            for step, record in sorted(records.items()):
                recorder.log(step, record)
            for step, rows in (heldout or {}).get(name, {}).items():
                recorder.heldout(step, rows)
        if summary := (summaries or {}).get(name):
            stage.finish(summary)
    return read_run(folder)
