"""`rlhf sweep` as a user meets it: small real runs, a table of their numbers, every kind of end, and resuming."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.contrib.sweep.directory import SweepDirectory
from rlhf.contrib.sweep.grid import load_grid
from rlhf.contrib.sweep.results import collect_results, select_columns
from rlhf.diagnosis.records import read_run
from rlhf.errors import RunError
from rlhf.utils.file_lock import lock_folder
from tests.helpers import assert_same_weights
from tests.run_folders import contents

GRID = """
recipe: {recipe}
output: out
base: {{sft.max_steps: 2, reward.max_steps: 4}}
share: [sft]
stages: [reward]
grid:
  reward.center: [0, 0.5]
names: {{reward.center: center}}
points:
  offload-at-zero2: {{lora.rank: 4, engine.zero_stage: 2, engine.offload: parameters}}
  elsewhere: {{reward.model: ./absent/model}}
  wild: {{reward.optimizer: {{learning_rate: 1.0e+30, max_grad_norm: 1.0e+30}}}}
"""
NAMES = ["center0", "center0.5", "offload-at-zero2", "elsewhere", "wild"]


def written(folder: Path, recipe: Path, text: str = GRID) -> Path:
    path = folder / "grid.yaml"
    path.write_text(text.format(recipe=recipe))
    return path


def error_of(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1].removeprefix("rlhf: error: ")


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """The rows of `--tsv`, by point."""
    return {row["point"]: row for row in csv.DictReader(done.stdout.splitlines(), delimiter="\t")}


@pytest.fixture(scope="module")
def swept(rlhf: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return a grid whose points ended in every way, and the finished command."""
    path = written(tmp_path_factory.mktemp("sweep"), rlhf.recipe)
    return path, rlhf("sweep", path, "--tsv", recipe=None, check=False)


def test_points_are_runs_and_table_and_page_have_their_numbers(swept: Any) -> None:
    path, done = swept
    table = shown(done)
    assert list(table) == NAMES
    recorded = json.loads((path.parent / "out/sweep.json").read_text())["points"]
    assert [point["status"] for point in recorded] == [row["status"] for row in table.values()]
    exported = {row["point"]: row for row in csv.DictReader((path.parent / "out/sweep.csv").open())}
    assert list(exported) == NAMES
    for name, center, point in zip(NAMES[:2], (0, 0.5), recorded):
        assert table[name]["status"] == exported[name]["status"] == point["status"] == "complete"
        stage = json.loads((path.parent / "out" / name / "reward/stage.json").read_text())
        for row in (table[name], exported[name]):
            assert float(row["reward accuracy"]) == stage["after"]["accuracy"]
            assert float(row["seconds"]) == stage["seconds"]
            assert int(row["peak_memory"]) == stage["peak_memory"]
        assert point["stages"]["reward"] == {key: stage[key] for key in point["stages"]["reward"]}
        assert exported[name]["reward.center"] == name
        settings = json.loads((path.parent / "out" / name / "run.json").read_text())["config"]
        assert settings["reward"]["center"] == center
        assert settings["reward"]["model"] == str(path.parent / "out/shared/sft/model")
    assert [stage.parent.parent.name for stage in path.parent.glob("out/*/sft/stage.json")] == ["shared"]
    page = (path.parent / "out/report.html").read_text(encoding="utf-8")
    for name in NAMES[:2]:
        accuracy = json.loads((path.parent / "out" / name / "reward/stage.json").read_text())["after"]["accuracy"]
        assert name in page and f">{accuracy:.1%}</td>" in page
    assert "gradients of the reward model are not finite at step 2" in page, "the page says why a point has no numbers"


def test_sweep_ends_with_its_files_and_best_point(swept: Any) -> None:
    path, done = swept
    best, files = done.stderr.splitlines()[-2:]
    numbers = {name: float(row["reward accuracy"]) for name, row in shown(done).items() if row["reward accuracy"]}
    name = max(numbers, key=lambda name: numbers[name])
    assert best.startswith(f"best reward accuracy: {name} (")
    assert files == "see " + ", ".join(str(path.parent / "out" / name) for name in ("report.html", "sweep.csv"))


def test_refused_and_failed_points_are_recorded_and_stop_none(swept: Any) -> None:
    path, done = swept
    assert done.returncode == 3
    table = shown(done)
    assert table["offload-at-zero2"]["status"] == table["elsewhere"]["status"] == "refused"
    assert table["offload-at-zero2"]["reason"].startswith(
        "engine.offload: parameters: offloading trained weights needs"
    )
    assert table["elsewhere"]["reason"].startswith(f"{path.parent}/absent/model: no such model folder")
    assert table["wild"]["status"] == "failed"
    assert "gradients of the reward model are not finite at step 2" in table["wild"]["reason"]
    assert not any(table[name]["reward accuracy"] or table[name]["seconds"] for name in NAMES[2:])
    console = (path.parent / "out/wild/console.log").read_text()
    assert console.startswith("$ rlhf --stages reward --config ") and table["wild"]["reason"] in console
    line_of_the_run = re.compile(r"^stages +reward$", re.MULTILINE)  # by the run itself
    assert line_of_the_run.search(console) and not line_of_the_run.search(done.stdout + done.stderr)


def test_second_sweep_trains_nothing_and_report_is_the_same(rlhf: Any, swept: Any) -> None:
    path, first = swept
    before = [contents(path.parent / "out" / name) for name in ("shared", *NAMES)]
    again = rlhf("sweep", path, "--tsv", recipe=None, check=False)
    assert (again.stdout, again.returncode) == (first.stdout, 3)
    assert "point " not in again.stderr
    for name in ("sweep.csv", "report.html"):
        (path.parent / "out" / name).unlink()
    report = rlhf("sweep", path, "--report", "--json", recipe=None, check=False)
    assert json.loads(report.stdout) == json.loads((path.parent / "out/sweep.json").read_text())
    assert (path.parent / "out/sweep.csv").is_file() and (path.parent / "out/report.html").is_file()
    assert [contents(path.parent / "out" / name) for name in ("shared", *NAMES)] == before


def test_report_works_while_the_sweep_runs(rlhf: Any, swept: Any) -> None:
    path, first = swept
    before = contents(path.parent / "out")
    with lock_folder(path.parent / "out"), lock_folder(path.parent / "out/center0"):
        assert rlhf("sweep", path, "--report", "--tsv", recipe=None, check=False).stdout == first.stdout
        line = error_of(rlhf("sweep", path, recipe=None, check=False))
    assert f"out/center0: process {os.getpid()} on " in line and "is writing to this folder; let it end" in line
    assert contents(path.parent / "out") == before


@pytest.mark.slow
def test_refused_points_are_retried_on_request_or_if_changed(rlhf: Any, swept: Any) -> None:
    path, _ = swept
    shutil.copytree(path.parent / "out/shared/sft/model", path.parent / "absent/model")
    path.write_text(path.read_text().replace("engine.offload: parameters", "engine.offload: none"))
    changed = rlhf("sweep", path, "--tsv", recipe=None, check=False)
    assert re.findall(r"^point .*", changed.stderr, re.MULTILINE) == ["point 3 of 5: offload-at-zero2"]
    assert [row["status"] for row in shown(changed).values()] == [*["complete"] * 3, "refused", "failed"]
    retried = rlhf("sweep", path, "--retry", "--tsv", recipe=None, check=False)
    assert re.findall(r"^point .*", retried.stderr, re.MULTILINE) == ["point 4 of 5: elsewhere", "point 5 of 5: wild"]
    assert [row["status"] for row in shown(retried).values()] == [*["complete"] * 4, "failed"]


def test_point_with_other_settings_is_refused_and_unchanged(rlhf: Any, swept: Any) -> None:
    path, _ = swept
    before = contents(path.parent / "out")
    line = error_of(rlhf("sweep", path, "--set", "reward.margin=2", recipe=None, check=False))
    assert "out/center0: complete stages were trained with other settings: reward.margin (0.0 there, 2.0 now); " in line
    assert line.endswith("/center0 to train again, or choose another --output")
    assert contents(path.parent / "out") == before


@pytest.mark.slow
def test_points_of_a_replaced_shared_stage_are_refused(rlhf: Any, tmp_path: Path) -> None:
    """The table would mix points that started from different models."""
    path, out = written(tmp_path, rlhf.recipe, GRID.partition("points:")[0]), tmp_path / "out"
    rlhf("sweep", path, recipe=None)
    before = contents(out / "center0")
    other = error_of(rlhf("sweep", path, "--set", "sft.max_steps=3", recipe=None, check=False))
    assert other.startswith(f"{out}/shared: complete stages were trained with other settings: sft.max_steps (2 there, ")
    folders = [str(out / name) for name in ("shared", "center0", "center0.5")]
    assert other.endswith(f"; delete {', '.join(folders)} to train again, or choose another --output")
    shutil.rmtree(out / "shared")
    model = out / "shared/sft/model"
    gone = error_of(rlhf("sweep", path, "--set", "sft.max_steps=3", recipe=None, check=False))
    assert gone == (
        f"{model}: center0, center0.5 started from this model, which is gone; delete {folders[1]}, {folders[2]} to "
        "train again, or choose another --output"
    )
    assert contents(out / "center0") == before
    rlhf("sft", "--set", "sft.max_steps=3", "--output", out / "shared")
    changed = error_of(rlhf("sweep", path, "--set", "sft.max_steps=3", recipe=None, check=False))
    assert changed.startswith(f"{model}: center0, center0.5 started from this model, which is another one")


def test_points_of_a_replaced_model_outside_of_the_sweep_are_refused(
    rlhf: Any, finished_run: Path, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(finished_run / "sft/model", base)
    (base / "manifest.json").unlink()  # as in a folder that rlhf did not write
    grid = (
        "recipe: {recipe}\noutput: out\nstages: [reward]\nbase: {{reward.max_steps: 2, reward.model: ./base}}\n"
        "grid: {{reward.center: [0, 0.5]}}\nnames: {{reward.center: center}}\n"
    )
    path = written(tmp_path, rlhf.recipe, grid)
    rlhf("sweep", path, recipe=None)
    before, original = contents(out / "center0"), (base / "model.safetensors").read_bytes()
    changed = bytearray(original)
    changed[-1] ^= 1
    (base / "model.safetensors").write_bytes(changed)
    assert error_of(rlhf("sweep", path, recipe=None, check=False)) == (
        f"{out}/center0: this run was made with other models: {base} (other weights); restore the original models, "
        f"delete {out}/center0, {out}/center0.5 to train again, or choose another --output"
    )
    assert contents(out / "center0") == before
    (base / "model.safetensors").write_bytes(original)
    rlhf("sweep", path, recipe=None)


def test_rows_that_changed_since_a_point_was_trained_are_refused(rlhf: Any, data_file: Path, tmp_path: Path) -> None:
    """The table would compare points that were trained on different rows."""
    shutil.copy(data_file, tmp_path / "rows.jsonl")
    grid = (
        "recipe: {recipe}\noutput: out\nstages: [sft]\nbase: {{sft.max_steps: 2, data.datasets: ./rows.jsonl}}\n"
        "grid: {{sft.batch_size: [2]}}\n"
    )
    path, out = written(tmp_path, rlhf.recipe, grid), tmp_path / "out"
    rlhf("sweep", path, recipe=None)
    rows = (tmp_path / "rows.jsonl").read_text()
    count = len(rows.splitlines())
    (tmp_path / "rows.jsonl").write_text("".join(rows.splitlines(keepends=True)[:-1]))
    assert rlhf("sweep", path, "--tsv", recipe=None).returncode == 0, "a complete sweep needs no rows"
    path.write_text(path.read_text().replace("[2]", "[2, 4]"))
    before, (point,) = contents(out), [folder.name for folder in out.glob("*2") if folder.is_dir()]
    assert error_of(rlhf("sweep", path, recipe=None, check=False)) == (
        f"{out}/{point}: this run was made with other rows: {tmp_path}/rows.jsonl ({count} rows there, {count - 1} "
        f"now); restore the original data, delete {out}/{point} to train again, or choose another --output"
    )
    assert contents(out) == before
    (tmp_path / "rows.jsonl").write_text(rows)
    rlhf("sweep", path, recipe=None)


@pytest.mark.parametrize("name", ["recipes", "center0/console.log", "shared/console.log"])
def test_link_in_a_sweep_is_refused(name: str, tmp_path: Path) -> None:
    home, link = tmp_path / "home", tmp_path / "out" / name
    home.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(home / "new" if name.endswith(".log") else home)
    (tmp_path / "out/sweep.json").write_text('{"points": []}')
    grid = load_grid(written(tmp_path, tmp_path / "recipe.yaml", GRID.replace("recipe: {recipe}\noutput: out", "")))
    with pytest.raises(RunError, match=f"{name}: is a link to"):
        SweepDirectory(tmp_path / "out").check(grid)
    assert not list(home.iterdir())


def test_dry_run_lists_points_and_refusals_and_writes_nothing(rlhf: Any, tmp_path: Path) -> None:
    path = written(tmp_path, rlhf.recipe)
    before = contents(tmp_path)
    table = shown(rlhf("sweep", path, "--dry-run", "--tsv", recipe=None))
    assert [row["status"] for row in table.values()] == ["waiting", "waiting", "refused", "refused", "waiting"]
    assert table["center0.5"]["sets"] == "reward.center=0.5"
    assert table["offload-at-zero2"]["reason"].startswith("engine.offload: parameters: ")
    assert contents(tmp_path) == before and not (tmp_path / "out").exists()


def test_dry_run_refuses_points_that_exceed_the_memory(rlhf: Any, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("base: {data.datasets: x.jsonl}\ngrid: {model.path: [opt-125m, opt-13b]}\nstages: [sft]\n")
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    done = rlhf("sweep", path, "--dry-run", "--memory", "24GiB", "--json", recipe=None)
    small, large = json.loads(done.stdout)["points"]
    assert small["status"] == "waiting"
    assert large["status"] == "refused"
    assert (
        large["reason"].startswith("sft does not fit: peak about ") and " of 24.0 GiB on each device" in large["reason"]
    )


def test_other_folders_and_launchers_are_refused(forks: Any, rlhf: Any, tmp_path: Path) -> None:
    path = written(tmp_path, rlhf.recipe)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letter.txt").write_text("x")
    line = error_of(rlhf("sweep", path, recipe=None, check=False))
    assert "out: not empty, and not the folder of a sweep (no sweep.json)" in line
    file = error_of(rlhf("sweep", path, "--output", tmp_path / "out/letter.txt", recipe=None, check=False))
    assert "letter.txt: expected a folder, got a file" in file
    report = error_of(rlhf("sweep", path, "--report", "--output", tmp_path / "absent", recipe=None, check=False))
    assert report.endswith("absent: contains no sweep to report; omit --report to start it")
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    launched = error_of(forks.run("sweep", str(path), timeout=60, environment=environment))
    assert launched.startswith("rlhf sweep starts the processes of each point itself; start it without ")


LONG = """
recipe: {recipe}
output: out
stages: [sft]
base: {{sft: {{max_steps: 30, checkpoint_every: 4}}}}
grid: {{seed: [1, 2]}}
"""


class SignalSender(threading.Thread):
    """Sends a signal to the sweep in a folder as soon as `path` is there."""

    def __init__(self, folder: Path, pattern: str, number: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._pattern, self._number = folder, pattern, number
        self.start()

    def run(self) -> None:
        while not list(self._folder.glob(self._pattern)):
            time.sleep(0.005)
        owner = (self._folder / ".rlhf.lock.owner").read_text()
        os.kill(int(owner.split()[1]), self._number)


def test_sweep_resumes_after_ctrl_c_and_after_a_kill(rlhf: Any, tmp_path: Path) -> None:
    path, out = written(tmp_path, rlhf.recipe, LONG), tmp_path / "out"
    SignalSender(out, "seed1/sft/checkpoints/step-*", signal.SIGINT)
    stopped = rlhf("sweep", path, recipe=None, check=False)
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    last = stopped.stderr.splitlines()[-1]
    assert last.startswith(
        f"rlhf: interrupted; 0 of 2 points of {out} are complete; in {out}/seed1, sft is saved up to "
    )
    assert last.endswith(f"; to continue: rlhf sweep {path}")
    assert not (out / "seed2").exists() and not (out / ".rlhf.lock").exists()

    SignalSender(out, "seed2/sft/checkpoints/step-*", signal.SIGKILL)
    killed = rlhf("sweep", path, recipe=None, check=False)
    assert killed.returncode == -signal.SIGKILL
    states = {point["name"]: point["status"] for point in json.loads((out / "sweep.json").read_text())["points"]}
    assert states["seed1"] == "complete"
    grid, folder = load_grid(path), SweepDirectory(out)
    assert [row.status for row in collect_results(grid, folder, {})] == ["complete", "not complete"]
    wait_for_end_of(out / "seed2/.rlhf.lock.owner")  # the point's process ends with the sweep's

    complete = contents(out / "seed1")
    rlhf("sweep", path, recipe=None)
    assert contents(out / "seed1") == complete
    for seed in (1, 2):
        run = json.loads((out / f"seed{seed}/run.json").read_text())
        assert len(run["invocations"]) == 2 and " --resume" in run["invocations"][1]["command"]
    plain = tmp_path / "plain"
    wishes = ("--set", "sft.max_steps=30", "--set", "sft.checkpoint_every=4", "--seed", 2)
    rlhf("sft", *wishes, "--output", plain)
    assert_same_weights(plain / "sft/model", out / "seed2/sft/model")
    alone = [json.loads(line) for line in (plain / "sft/metrics.jsonl").read_text().splitlines()]
    losses = [(record["step"], record["loss"]) for record in alone if "loss" in record]
    curve = read_run(out / "seed2").stages[0].curve("loss")
    assert [*zip(*curve)] == losses and len(losses) > 5
    results = collect_results(grid, folder, {})
    assert select_columns(grid, results) == ["sft perplexity", "seconds", "peak_memory"]
    assert select_columns(replace(grid, stages=("sft", "reward")), results) == [
        "sft perplexity",
        "seconds",
        "peak_memory",
    ]


def wait_for_end_of(lock: Path) -> None:
    """Wait until the process has ended that a lock names."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int(lock.read_text().split()[1]), 0)
            time.sleep(0.02)
        raise AssertionError(f"{lock} is still held")
