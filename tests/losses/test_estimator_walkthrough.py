"""CONTRIBUTING.md's recipe for an advantage estimator, followed step by step in a copy of this repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# One step of PPO with it: every advantage is the completion's score less the median of the three others'.
STEP = """
import statistics
import sys
from pathlib import Path

import accelerators
import rlhf
from rlhf.engine import distributed
from tests.optimum.test_optimum import build

assert Path(rlhf.__file__).is_relative_to(Path.cwd())
with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
    ppo = build(accelerator, Path(sys.argv[1]), {"estimator": "median", "batch_size": 16, "minibatch_size": 16,
                                                 "kl_coef": 0.0, "steps": 1}, seed=0)
    ppo.step(0)
    actual = ppo.experience
    scores = actual.reward.tolist()
    for row, score in enumerate(scores):
        group = range(row - row % 4, row - row % 4 + 4)
        wanted = score - statistics.median(scores[other] for other in group if other != row)
        for advantage, action in zip(actual.advantages[row].tolist(), actual.action_mask[row].tolist()):
            assert abs(advantage - wanted * action) < 1e-5, (row, advantage, wanted)
    assert actual.advantages.any() and ppo.critic is None
"""


def blocks(language: str) -> list[str]:
    """The recipe's blocks of code, in order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Add an advantage estimator")[1].split("\n## ")[0]
    return [textwrap.dedent(block) for block in re.findall(rf"^ *```{language}\n(.*?)^ *```$", section, re.M | re.S)]


def added(file: Path, before: str, text: str) -> None:
    """Put `text` before the first line `before`."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    lines.insert(lines.index(before), text)
    file.write_text("".join(lines), encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository after the first two steps."""
    folder = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so")
    for name in ("rlhf", "accelerators", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    function, entry, _ = blocks("python")
    with (folder / "rlhf/losses/advantages.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{function}")
    added(folder / "rlhf/config/estimators.py", "}\n", textwrap.indent(entry, "    "))
    return folder


def run(copy: Path, *command: str, timeout: float = 300) -> str:
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


@pytest.mark.slow
def test_command_accepts_it_and_a_step_has_its_advantages(copy: Path, tmp_path: Path) -> None:
    (command,) = blocks("bash")
    program, stage, *options = command.split()
    assert (program, stage) == ("rlhf", "ppo")
    assert "estimator: median" in run(copy, sys.executable, "-m", "rlhf", "config", *options)
    run(copy, sys.executable, "-c", STEP, str(tmp_path / "run"))


@pytest.mark.slow
def test_it_finds_the_best_policy(copy: Path) -> None:
    tests = copy / "tests/optimum/test_optimum.py"
    added(tests, "]\n", f"    {blocks('python')[2].strip()},\n")
    chosen = ["-k", "median", "-m", "", "-q", "-p", "no:cacheprovider", "-n0"]
    assert "1 passed" in run(copy, sys.executable, "-m", "pytest", str(tests), *chosen)
