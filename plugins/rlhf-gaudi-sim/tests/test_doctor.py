"""`gaudi-sim shapes`: the verdict on a recipe, and the lines that are to blame."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from conftest import Run
from gaudi_sim import doctor

from rlhf.config.schema import load_config

RECIPE = [
    *("--set", "data.max_completion_length=16", "--set", "data.max_prompt_length=64"),
    *("--set", "sft.batch_size=48", "--set", "sft.micro_batch_size=16", "--set", "reward.batch_size=4"),
    *("--set", "ppo.batch_size=48", "--set", "ppo.minibatch_size=16", "--set", "ppo.micro_batch_size=2"),
]


def shapes(python: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-c", "from gaudi_sim.doctor import main; main()", "shapes", *arguments, simulated=False)


@pytest.mark.slow
def test_a_recipe_of_static_shapes_is_stable_in_both_modes(python: Run) -> None:
    done = shapes(python, *RECIPE, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {(report["mode"], report["stage"]): report for report in json.loads(done.stdout)}
    assert list(reports) == [(mode, stage) for mode in ("eager", "lazy") for stage in ("sft", "reward", "ppo")]
    assert [part.partition(" at ")[0] for part in reports["eager", "reward"]["graphs"]] == [
        "inference",
        "forward",
        "backward",
    ]
    # A step's first micro-batch, and one that adds to its gradients.
    assert reports["lazy", "ppo"]["graphs"]["actor/backward"] == 2
    for report in reports.values():
        assert report["stable"]
        assert sum(report["graphs"].values()) == sum(report["compilations"])
        assert report["compilations"][0] > 0
        assert report["compilations"][2:] == [0, 0, 0]
        assert report["unrecorded"] is None and report["uncompiled"] == []


@pytest.mark.slow
def test_dynamic_recipe_is_shown_the_lines_that_compile_late(python: Run) -> None:
    done = shapes(python, *RECIPE, "--set", "engine.shapes=dynamic", "--mode", "lazy")
    assert done.returncode == 1, done.stdout + done.stderr
    blamed = [line for line in done.stdout.splitlines() if "compiled after step 2" in line]
    assert any(line.startswith("sft: ") and "rlhf/trainers/supervised.py:" in line for line in blamed), done.stdout
    assert any(line.startswith("ppo: ") and "at the same place" in line for line in blamed), done.stdout
    assert done.stdout.splitlines()[-1].startswith("engine.shapes is dynamic; with static,")
    # Rows of a micro-batch: 16 become 4, and 2 stay.
    assert any(line.startswith("sft: ") and "was [4, " in line for line in blamed), done.stdout
    assert any(line.startswith("ppo: ") and "was [2, " in line for line in blamed), done.stdout


def test_output_has_graphs_by_part_and_published_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    for mode, graphs in (("eager", {"forward at a.py:1": 1, "inference at b.py:2": 3}), ("lazy", {"sft/loss": 20})):
        compilations = [sum(graphs.values()), 0, 0, 0, 0]
        doctor._print([doctor.StageReport(mode, "sft", compilations, graphs, 2, [], [], None, [])])
    lines = capsys.readouterr().out.splitlines()
    titles = [line.strip() for line in lines if line.startswith("New graphs")]
    assert titles == [f"New graphs on a simulated Gaudi2, {mode} mode" for mode in ("eager", "lazy")]
    assert "sft: 4 graphs by pass and line: 1 forward at a.py:1, 3 inference at b.py:2" in lines
    assert "sft: 20 graphs by the boundary that ends them: 20 sft/loss" in lines
    pattern = r"(\w+) mode: (\d+) graphs .* take (\S+) to (\S+) minutes .* vLLM's published logs .* not measured here"
    found = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    assert found == [("eager", "4", "0.0", "3"), ("lazy", "20", "0.2", "13")]


def test_zero_3_runs_in_eager_mode_alone() -> None:
    for zero_stage, modes in ((2, ["eager", "lazy"]), (3, ["eager"])):
        assert doctor._modes("both", load_config(None, [f"engine.zero_stage={zero_stage}"])) == modes
        assert doctor._modes("lazy", load_config(None, [f"engine.zero_stage={zero_stage}"])) == ["lazy"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--mode", "fast"), "--mode fast: no such mode; use one of eager, lazy, both"),
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
