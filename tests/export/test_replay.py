"""TensorBoard, trackio and Weights & Biases receive the records of a run under the tags of a live run."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf.diagnosis.records import read_run
from rlhf.errors import ConfigError, RunError
from rlhf.export import replay
from rlhf.export.formats import export_run, parse_format
from rlhf.reporting import sinks
from rlhf.reporting.recorder import Recorder, metric_group
from rlhf.runs.directory import RunDirectory
from tests.export.conftest import PPO, SFT
from tests.helpers import user_environment

STAGES = {"sft": SFT, "ppo": PPO}


def truth(stage: str) -> dict[tuple[int, str], float]:
    """Return the finite numbers of a stage by step and tag."""
    return {
        (record["step"], f"{stage}{metric_group(key)}/{key}"): value
        for record in STAGES[stage]
        if "tag" not in record
        for key, value in record.items()
        if key not in ("stage", "step", "time") and value is not None
    }


def load_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(events: EventAccumulator) -> dict[tuple[int, str], float]:
    return {(event.step, tag): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def test_tensorboard_has_the_records_at_their_times(run: Path) -> None:
    [folder] = export_run(read_run(run), "tensorboard")
    assert folder == run / "export/tensorboard"
    for stage in STAGES:
        assert scalars(load_events(folder / stage)) == pytest.approx(truth(stage))
    [event] = load_events(folder / "sft").Scalars("sft/loss")[:1]
    assert (event.step, event.wall_time) == (1, 101.0)


def test_tensorboard_has_the_tags_of_a_live_run(run: Path, tmp_path: Path) -> None:
    live = RunDirectory(tmp_path / "live").stage("sft")
    with Recorder(live) as recorder:
        for record in SFT:
            values = {key: value for key, value in record.items() if key not in ("stage", "step", "time")}
            if "tag" in record:
                recorder.text(record["tag"], record["step"], record["text"])
            else:
                recorder.log(record["step"], {key: value for key, value in values.items() if value is not None})
    [folder] = export_run(read_run(run), "tensorboard")
    assert load_events(folder / "sft").Tags() == load_events(live.tensorboard).Tags()


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_missing_package_is_one_line_that_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"^--to {name}: {name} is not installed; run: pip install {name}$"):
        parse_format(name)


def test_failure_of_a_program_is_one_line_and_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, stage: Any) -> None:
            (stage.folder / "half").write_text("x")

        def write(self, record: Any) -> None:
            raise ValueError("no such field")

        def close(self) -> None:
            pass

    monkeypatch.setattr(replay, "find_target", lambda name: Failing)
    monkeypatch.setenv("TRACKIO_DIR", "unchanged")
    with pytest.raises(RunError, match=r"^--to wandb: wandb failed \(ValueError: no such field\)"):
        export_run(read_run(run), "wandb")
    assert list((run / "export").iterdir()) == [] and os.environ["TRACKIO_DIR"] == "unchanged"


def export_as_a_user(run: Path, name: str) -> Path:
    """Export in a separate process, whose settings of trackers are not this one's; return the folder."""
    environment = user_environment() | {"WANDB_MODE": "online", "TRACKIO_SPACE_ID": "nobody/nothing"}
    command = [sys.executable, "-m", "rlhf", "export", str(run), "--to", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"wrote {run}/export/{name}" in done.stdout and "please wait" not in done.stdout + done.stderr
    return run / "export" / name


def test_trackio_has_the_records_in_the_folder(run: Path) -> None:
    pytest.importorskip("trackio")
    database = sqlite3.connect(export_as_a_user(run, "trackio") / "runs.db")
    for stage in STAGES:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", [f"mine_1/{stage}"])
        assert {(step, tag): value for step, row in rows for tag, value in json.loads(row).items()} == truth(stage)


def read_wandb(path: Path) -> tuple[str, dict[tuple[int, str], float]]:
    """Return the name and the numbers of an offline run: records in the format of LevelDB's logs, after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, name, numbers = path.read_bytes(), 7, b"", "", {}
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # a header does not cross the end of a block
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(whole)
            name = record.run.display_name or name
            for item in record.history.item:
                tag = item.key or "/".join(item.nested_key)
                if not tag.startswith("_"):
                    numbers[record.history.step.num, tag] = json.loads(item.value_json)
            whole = b""
    return name, numbers


def test_wandb_has_the_records_in_offline_runs(run: Path) -> None:
    pytest.importorskip("wandb")
    folder = export_as_a_user(run, "wandb") / "wandb"
    runs = dict(read_wandb(path) for path in folder.glob("offline-run-*/*.wandb"))
    assert runs == {f"mine_1/{stage}": truth(stage) for stage in STAGES}
