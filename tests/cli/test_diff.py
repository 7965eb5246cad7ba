"""`rlhf accelerators diff`: usage errors, a backend that equals itself, and a golden file that does not."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import sets


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


FINDER = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rlhf.lockstep.side":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module.Side))
            return spec

sys.meta_path.insert(0, Finder())
"""
"""Calls `change` with the class of a side when a process imports it."""

STALE = """
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
"""
"""Makes the second step after a state was loaded wrong, as a stale buffer does: no single step shows it."""

WRONG_SILU = """
def change(Side):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Wrong(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 1.01 if func is torch.ops.aten.silu.default else result

    def wrongly(method):
        def run(*arguments, **options):
            with Wrong():
                return method(*arguments, **options)
        return run

    Side.take, Side.judge = wrongly(Side.take), wrongly(Side.judge)
"""
"""Makes one operator wrong."""


@pytest.fixture
def sabotage(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that makes a variable of a process with which it runs a change of its side."""

    def write(change: str) -> str:
        (tmp_path / "sitecustomize.py").write_text(change + FINDER)
        return f"PYTHONPATH={os.pathsep.join(filter(None, (str(tmp_path), os.environ.get('PYTHONPATH'))))}"

    return write


@pytest.mark.slow
@pytest.mark.parametrize("settings", [["engine.zero_stage=3"], ["lora.rank=2", "engine.zero_stage=0"]])
def test_diff_names_the_operator_with_sharded_weights_and_adapters(
    rlhf: Any, recipe: dict[str, Any], tmp_path: Path, sabotage: Callable[[str], str], settings: list[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    arguments = ("--config", path, *sets(*settings), "--stages", "sft", "--steps", 1, "--operators", "--json")
    options = {"check": False, "recipe": None, "timeout": 1800}
    done = rlhf("accelerators", "diff", "cpu", "cpu", *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["judged"] > 400
    done = rlhf("accelerators", "diff", "cpu", "cpu", *arguments, "--variable-b", sabotage(WRONG_SILU), **options)
    assert done.returncode == 3, done.stderr
    first, *_ = json.loads(done.stdout)["finding"]["faults"]
    assert (first["operator"], first["phase"], first["kind"]) == ("aten::silu", "scores", "wrong")
    assert first["module"] == "sft:model.layers.0.mlp.act_fn"
    assert first["value"] == pytest.approx(1.01 * first["truth"], rel=1e-4)
    assert first["other"] == pytest.approx(first["truth"], rel=1e-4)


@pytest.mark.slow
def test_diff_bisect_names_the_step_if_only_the_end_differs(
    rlhf: Any, recipe: dict[str, Any], tmp_path: Path, sabotage: Callable[[str], str]
) -> None:
    path, steps = tmp_path / "recipe.yaml", 3
    path.write_text(json.dumps(recipe))
    settings = sets("engine.zero_stage=0")  # with ZeRO 1 the optimizer's own weights would undo the change
    arguments = ("--config", path, *settings, "--stages", "sft", "--steps", steps, "--bisect", "--json")
    options = {"check": False, "recipe": None, "timeout": 1800}
    done = rlhf("accelerators", "diff", "cpu", "cpu", *arguments, **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["end"] is None
    done = rlhf("accelerators", "diff", "cpu", "cpu", *arguments, "--variable-b", sabotage(STALE), **options)
    assert done.returncode == 3, done.stderr
    outcome = json.loads(done.stdout)
    # A run from before step 2 has two steps, one from before step 3 only one.
    assert (outcome["end"]["stage"], outcome["end"]["step"]) == ("sft", steps - 1)
    assert outcome["steps"] == {"sft": steps} and max(outcome["ratios"]["sft"].values()) <= 1
    assert outcome["finding"]["step"] == steps - 1
    assert outcome["finding"]["faults"] == [] and outcome["judged"] > 500
