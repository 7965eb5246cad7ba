"""`rlhf accelerators diff`: usage errors, a backend that equals itself, and a golden file that does not."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["cpu"], "name A and B, or A with either --record FILE or --against FILE"),
        (["cpu", "cpu", "--variable-b", "LAZY"], "--variable-b LAZY: is no variable; write NAME=VALUE"),
        (["cpu", "--record", "g.tar", "--variable-b", "A=1"], "--variable-b: needs two backends; name A and B"),
        (["cpu", "--record", "g.tar", "--operators"], "--operators: needs two backends; name A and B"),
        (["cpu", "--against", "g.tar", "--bisect"], "--bisect: needs two backends; name A and B"),
        (["cpu", "--against", "g.tar", "--set", "seed=1"], "--set: cannot be used with --against g.tar, which has its"),
        (["cpu", "--against", "g.tar", "--stages", "sft"], "--stages: cannot be used with --against g.tar"),
        (["cpu", "--record", "absent/g.tar"], "--record absent/g.tar: its folder is missing"),
        (["cpu", "--against", "golden.tar"], "golden.tar: is no golden file"),
    ],
)
def test_diff_wrong_arguments_end_with_one_line(rlhf: Any, arguments: list[str], line: str) -> None:
    done = rlhf("accelerators", "diff", *arguments, check=False, recipe=None)
    assert done.returncode == 2
    assert line in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_diff_against_golden_file_names_what_differs(rlhf: Any, recipe: dict[str, Any], tmp_path: Path) -> None:
    path, golden = tmp_path / "recipe.yaml", tmp_path / "golden.tar"
    path.write_text(json.dumps(recipe))

    def diff(*arguments: object) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = rlhf(
            "accelerators", "diff", "cpu", *arguments, check=False, recipe=None, timeout=900
        )
        assert done.returncode in (0, 3), done.stderr
        return done

    assert diff("--config", path, "--stages", "sft,reward,ppo", "--steps", 1, "--record", golden).returncode == 0
    done = diff("--against", golden, "--json")
    same = json.loads(done.stdout)
    assert done.returncode == 0
    assert same["equal"] and same["steps"] == {"sft": 1, "reward": 1, "ppo": 1}
    assert set(same["ratios"]["ppo"]) == {"rollout", "scores", "advantages", "loss", "gradients", "update"}
    assert max(ratio for ratios in same["ratios"].values() for ratio in ratios.values()) <= 1

    folder = tmp_path / "unpacked"
    with tarfile.open(golden) as archive:
        archive.extractall(folder, filter="data")
    file = folder / "ppo" / "step-0" / "observed.pt"
    content = torch.load(file, weights_only=True)
    number = next(i for i, item in enumerate(content["items"]) if item[:3] == ("scores", "critic", "values"))
    content["items"][number][5][0, 0] += 0.5
    torch.save(content, file)
    with tarfile.open(golden, "w") as archive:
        archive.add(folder, arcname=".")
    done = diff("--against", golden, "--json")
    other = json.loads(done.stdout)
    assert done.returncode == 3
    first = other["finding"]["differences"][0]
    assert (first["phase"], first["role"], first["name"], first["element"]) == ("scores", "critic", "values", [0, 0])
    assert first["value_a"] - first["value_b"] == pytest.approx(0.5, abs=1e-5)
    assert other["finding"]["faults"] == [] and other["judged"] > 500


SABOTAGE = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rlhf.lockstep.side":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module.Side))
            return spec

def change(Side):
    load, take = Side.load_state, Side._take

    def load_state(self, source):
        self.taken = 0
        load(self, source)

    def _take(self, *arguments, **options):
        observed = take(self, *arguments, **options)
        self.taken += 1
        if self.taken == 2:
            for engine in self._trainer.engines.values():
                for weight in engine.module.parameters():
                    weight.data.mul_(1.05)
        return observed

    Side.load_state, Side._take = load_state, _take

sys.meta_path.insert(0, Finder())
"""
"""Makes the second step after a state was loaded wrong, as a stale buffer does: no single step shows it."""


@pytest.mark.slow
def test_diff_bisect_names_the_step_if_only_the_end_differs(rlhf: Any, recipe: dict[str, Any], tmp_path: Path) -> None:
    path, steps = tmp_path / "recipe.yaml", 3
    path.write_text(json.dumps(recipe))
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    folders = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    arguments = ("--config", path, "--stages", "sft", "--steps", steps, "--bisect", "--json")
    options = {"check": False, "recipe": None, "timeout": 1800}
    done = rlhf("accelerators", "diff", "cpu", "cpu", *arguments, **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["end"] is None
    done = rlhf("accelerators", "diff", "cpu", "cpu", *arguments, "--variable-b", f"PYTHONPATH={folders}", **options)
    assert done.returncode == 3, done.stderr
    outcome = json.loads(done.stdout)
    # A run from before step 2 has two steps, one from before step 3 only one.
    assert (outcome["end"]["stage"], outcome["end"]["step"]) == ("sft", steps - 1)
    assert outcome["steps"] == {"sft": steps} and max(outcome["ratios"]["sft"].values()) <= 1
    assert outcome["finding"]["step"] == steps - 1
    assert outcome["finding"]["faults"] == [] and outcome["judged"] > 500
