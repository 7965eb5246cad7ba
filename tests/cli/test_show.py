"""`rlhf show`: finished runs, runs in progress, and folders without a run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf.cli.app import app
from rlhf.cli.show import draw_curve
from rlhf.utils.printable import make_printable


def show(*arguments: object):
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def test_show_of_finished_run_has_curves_results_and_texts(finished_run: Path) -> None:
    done = show(finished_run)
    assert done.exit_code == 0, done.exception
    records = [json.loads(line) for line in (finished_run / "ppo/metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward"] for record in records if "reward" in record]
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("  reward  "))
    assert [float(row[1]), float(row[3])] == pytest.approx([rewards[0], rewards[-1]], rel=1e-3, abs=1e-3)
    assert row[2] == draw_curve(rewards)
    assert "supervised fine-tuning  complete" in done.stdout
    last = [record["text"] for record in records if record.get("tag") == "heldout_0"][-1]
    assert make_printable(last).split()[0] in done.stdout


def test_show_of_run_in_progress_reads_up_to_cut_line(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "ppo/stage.json").unlink()
    whole = (run / "ppo/metrics.jsonl").read_bytes().splitlines(keepends=True)
    last = next(place for place, line in enumerate(whole) if json.loads(line)["step"] == 2)
    (run / "ppo/metrics.jsonl").write_bytes(b"".join(whole[:last]) + whole[last][:20])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = show(run)
    assert done.exit_code == 0, done.exception
    assert "PPO  not complete, step 1" in done.stdout and "ago" in done.stdout
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    document = json.loads(show(run, "--json").stdout)
    assert [stage["stage"] for stage in document["stages"] if stage["summary"]] == ["sft", "reward"]


def test_show_of_run_in_progress_has_its_warnings_apart_from_completions(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "ppo/stage.json").unlink()
    for stage, tag, text in [("reward", "heldout_warning", "of 13 rows only"), ("ppo", "warning", "KL is too high")]:
        line = {"stage": stage, "step": 1, "time": 0.0, "tag": tag, "text": text}
        with (run / stage / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    printed = show(run, "--samples", 99).stdout
    assert re.search(r"^  warning  KL is too high *$", printed, re.MULTILINE)
    assert not re.search(r"step 1 .*(of 13 rows only|KL is too high)", printed)
    stages = {stage["stage"]: stage for stage in json.loads(show(run, "--json").stdout)["stages"]}
    assert stages["reward"]["warnings"][-1] == "of 13 rows only" and "heldout_warning" not in stages["reward"]["texts"]


def test_show_of_epochs_states_no_total(finished_run: Path, tmp_path: Path) -> None:
    """The rollouts of an epoch depend on the number of prompts."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "ppo/stage.json").unlink()
    record = json.loads((run / "run.json").read_text())
    record["config"]["ppo"] |= {"epochs": 1}
    (run / "run.json").write_text(json.dumps(record))
    assert re.search(r"PPO  not complete, step \d+, last record", show(run).stdout)


def test_show_of_folder_without_run_is_an_error(tmp_path: Path) -> None:
    assert "contains no run.json; name the folder of a run" in str(show(tmp_path).exception)


@pytest.mark.parametrize(
    ("values", "curve"),
    [([0, 1, 2, 7], "▁▂▃█"), ([3.0, 3.0], "▁▁"), ([float(number) for number in range(80)], 40)],
)
def test_curve_has_heights_of_values(values: list[float], curve: str | int) -> None:
    drawn = draw_curve(values)
    assert drawn == curve if isinstance(curve, str) else (len(drawn) == curve and list(drawn) == sorted(drawn))
