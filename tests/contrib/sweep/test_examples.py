"""The grids of example_scripts have the points that they promise, and run at toy size."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.contrib.sweep.grid import load_grid
from rlhf.contrib.sweep.results import PointResult, describe_best
from tests.forks import Forks
from tests.recipes import toys

GRIDS = sorted((toys.EXAMPLES / "sweeps").glob("*.yaml"))
STAGES = {
    "step1": ["sft"],
    "dpo": ["dpo"],
    "step2": ["reward"],
    "step3": ["ppo"],
    "world": ["ppo"],
    "kl": ["ppo"],
    "matrix": ["ppo"],
}
PLACEMENTS = ("zero2", "zero2-offload", "zero3", "zero3-offload")
POINTS = {
    "step1": list(itertools.product(PLACEMENTS, ("", "lora128"))),
    "step2": list(itertools.product(PLACEMENTS)),
    "dpo": list(itertools.product(PLACEMENTS)),
    "step3": list(itertools.product(PLACEMENTS, ("recorded", "plain"), ("", "lora128"))),
}
"""DeepSpeed-Chat's."""


def dry(forks: Forks, grid: Path, *arguments: str) -> dict[str, dict[str, str]]:
    done = forks.run("sweep", str(grid), "--dry-run", "--tsv", *arguments, timeout=120)
    assert done.returncode == 0, done.stderr
    return {row["point"]: row for row in csv.DictReader(done.stdout.splitlines(), delimiter="\t")}


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toys")


@pytest.mark.parametrize("grid", GRIDS, ids=lambda path: path.stem)
def test_grid_has_its_points_and_refuses_only_int8_in_full(grid: Path, forks: Forks, tmp_path: Path) -> None:
    sweep = load_grid(grid)
    assert list(sweep.stages) == STAGES[grid.stem]
    assert sweep.output.resolve() == toys.ROOT / "runs" / f"sweep-{grid.stem}"
    names = [point.name for point in sweep.points]
    for parts in POINTS.get(grid.stem, ()):
        assert "-".join(filter(None, parts)) in names
    table = dry(forks, grid, "--output", str(tmp_path / "out"))
    refused = {name for name, row in table.items() if row["status"] == "refused"}
    assert refused == {name for name in names if name.endswith("int8-full")}
    assert all(row["status"] in ("waiting", "refused") for row in table.values())
    assert not (tmp_path / "out").exists()


def test_names_of_points_tell_zero_offload_and_lora() -> None:
    for point in load_grid(toys.EXAMPLES / "sweeps/step3.yaml").points[:16]:
        config = point.config
        assert config.engine.zero_stage == (3 if point.name.startswith("zero3") else 2)
        assert (config.engine.offload != "none") == ("offload" in point.name)
        assert (config.roles.actor.lora_rank == 128) == ("lora128" in point.name)
        assert (config.engine.kernels == {"graph_capture": "none"}) == ("plain" in point.name)
        assert config.ppo.ema is None and config.roles.reward.zero_stage is None


@pytest.mark.slow
def test_world_sweep_runs_unchanged(forks: Forks, tmp_path: Path) -> None:
    done = forks.run(
        "sweep", str(toys.EXAMPLES / "sweeps/world.yaml"), "--output", str(tmp_path / "out"), "--tsv", timeout=900
    )
    assert done.returncode == 0, done.stderr
    table = {row["point"]: row for row in csv.DictReader(done.stdout.splitlines(), delimiter="\t")}
    assert [row["status"] for row in table.values()] == [*["complete"] * 4, "refused"]
    for name in list(table)[:4]:
        after = json.loads((tmp_path / "out" / name / "ppo/stage.json").read_text())["after"]
        for measure in ("reward", "kl", "approved_share"):
            assert float(table[name][f"ppo {measure}"]) == after[measure]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["step1", "step2", "dpo", "step3"])
def test_step_sweep_runs_at_toy_size_on_two_ranks(step: str, forks: Forks, toy_folder: Path, tmp_path: Path) -> None:
    """DeepSpeed-Chat leaves one of the sixteen points of step 3 out; here all train."""
    recipe = toys.EXAMPLES / "opt/1.3b-node.yaml"
    short = [f"{key}={value}" for key, value in SHORT.items()]
    if step == "dpo":
        model = toys.toy_model(toys.shape(recipe, "facebook/opt-350m"), toy_folder)
        short += [f"{key}={model}" for key in ("model.path", "dpo.model")]
    wishes = [*toys.overrides(recipe, toy_folder), *(part for wish in short for part in ("--set", wish))]
    grid = toys.EXAMPLES / f"sweeps/{step}.yaml"
    done = forks.run(
        "sweep", str(grid), "--output", str(tmp_path / "out"), "--ranks", "2", "--tsv", *wishes, timeout=1800
    )
    table = {row["point"]: row for row in csv.DictReader(done.stdout.splitlines(), delimiter="\t")}
    assert done.returncode == 0, done.stdout + done.stderr
    for name, row in table.items():
        assert row["status"] == "complete", (name, row["reason"])


SHORT = {
    "data.max_prompt_length": 24,
    "data.max_completion_length": 8,
    "precision": "fp32",
    "sft.max_steps": 1,
    "reward.max_steps": 1,
    "dpo.max_steps": 1,
    "ppo.epochs": "null",
    "ppo.steps": 1,
    "sft.eval_rows": 4,
    "reward.eval_rows": 4,
    "dpo.eval_rows": 4,
    "ppo.eval_rows": 4,
}


def test_seconds_and_memory_of_a_point_cover_all_stages() -> None:
    sft = {"seconds": 2.0, "peak_memory": 7, "after": {"perplexity": 3.0}}
    ppo = {"seconds": 5.0, "peak_memory": 4, "after": {"reward": -1.0}}
    row = PointResult("a", {}, {}, "complete", "", {"sft": sft, "ppo": ppo})
    assert (row.value("seconds"), row.value("peak_memory")) == (7.0, 7)
    assert (row.value("sft perplexity"), row.value("ppo reward"), row.value("ppo kl")) == (3.0, -1.0, None)
    assert PointResult("b", {}, {}, "out of memory", "", {"sft": sft}, lost_peak=9).value("peak_memory") == 9
    assert PointResult("c", {}, {}, "waiting", "", {}).value("seconds") is None


def ppo_result(name: str, reward: float, kl: float, status: Any = "complete") -> PointResult:
    after = {"reward": reward, "kl": kl}
    return PointResult(name, {}, {}, status, "", {"ppo": {"seconds": 1.0, "peak_memory": 1, "after": after}})


def test_best_point_is_complete_and_has_the_best_result_of_the_last_stage() -> None:
    grid = load_grid(toys.EXAMPLES / "sweeps/kl.yaml")
    results = [ppo_result("a", 1.0, 0.1), ppo_result("b", 2.5, 9.0), ppo_result("c", 7.0, 0.1, "not complete")]
    assert describe_best(grid, results) == "best ppo reward: b (2.5)"
    assert describe_best(grid, results[2:]) == ""
    losses = [
        PointResult(name, {}, {}, "complete", "", {"sft": {"after": {"perplexity": value}}})
        for name, value in (("low", 2.0), ("high", 3.0))
    ]
    assert describe_best(load_grid(toys.EXAMPLES / "sweeps/step1.yaml"), losses) == "best sft perplexity: low (2)"
