"""`rlhf accelerators diff`: usage errors, a backend that equals itself, and a golden file that does not."""

from __future__ import annotations

import json
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
        (["cpu", "--against", "golden.tar", "--set", "seed=1"], "the golden file has its recipe"),
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
    assert other["finding"]["faults"] == [] and other["finding"]["judged"] > 500
