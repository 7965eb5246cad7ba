"""`gaudi-sim shapes`: the verdict on a recipe, and the lines that are to blame."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from conftest import Run

RECIPE = [
    *("--set", "data.max_completion_length=16", "--set", "data.max_prompt_length=64"),
    *("--set", "sft.batch_size=48", "--set", "sft.micro_batch_size=16", "--set", "reward.batch_size=4"),
    *("--set", "ppo.batch_size=48", "--set", "ppo.minibatch_size=16", "--set", "ppo.micro_batch_size=2"),
]


def shapes(python: Run, *arguments: str, eager: bool = False) -> subprocess.CompletedProcess[str]:
    return python("-c", "from gaudi_sim.doctor import main; main()", "shapes", *arguments, simulated=False, eager=eager)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "lazy"])
def test_a_recipe_of_static_shapes_is_stable(python: Run, eager: bool) -> None:
    done = shapes(python, *RECIPE, "--json", eager=eager)
    assert done.returncode == 0, done.stdout + done.stderr
    for report in json.loads(done.stdout):
        assert report["stable"]
        assert report["compilations"][0] > 0
        assert report["compilations"][2:] == [0, 0, 0]
        assert report["unrecorded"] is None and report["uncompiled"] == []


@pytest.mark.slow
def test_dynamic_recipe_is_shown_the_lines_that_compile_late(python: Run) -> None:
    done = shapes(python, *RECIPE, "--set", "engine.shapes=dynamic")
    assert done.returncode == 1, done.stdout + done.stderr
    blamed = [line for line in done.stdout.splitlines() if "compiled after step 2" in line]
    assert any(line.startswith("sft: ") and "rlhf/trainers/supervised.py:" in line for line in blamed), done.stdout
    assert any(line.startswith("ppo: ") and "at the same place" in line for line in blamed), done.stdout
    assert done.stdout.splitlines()[-1].startswith("engine.shapes is dynamic; with static,")
    graphs, least, most = map(float, re.search(r"(\d+) graphs would take (\S+) to (\S+) minutes", done.stdout).groups())
    assert (least, most) == (round(graphs * 0.5 / 60, 1), round(graphs * 38 / 60))
    # Rows of a micro-batch: 16 become 4, and 2 stay.
    assert any(line.startswith("sft: ") and "was [4, " in line for line in blamed), done.stdout
    assert any(line.startswith("ppo: ") and "was [2, " in line for line in blamed), done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--config", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("--stage", "sgt"), "--stage sgt: no such stage; use one of sft, reward, dpo, ppo"),
        (("--set", "sft.epoch=2"), "did you mean 'epochs'?"),
        (("--set", "model.path=nowhere", "--set", "data.datasets=[{path: world}]"), "nowhere: no toy copy can be made"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_one_line(python: Run, arguments: tuple[str, ...], reason: str) -> None:
    done = shapes(python, *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert reason in line
