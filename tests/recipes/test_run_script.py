"""example_scripts/run.sh: a recipe by name, options that variables mean below those given, one line where it fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.recipes import toys

STUB = """#!/bin/sh
[ "$1" = -c ] && exit $WITHOUT_RLHF
[ "$2" = rlhf ] && shift && shift && printf '%s\\n' "$@" && exit
[ "$HL_GBS" = bad ] && echo "error: HL_GBS" >&2 && exit 2
printf '%s\\n' --set "$3.batch_size=$HL_GBS"
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Prints the arguments of rlhf, or for rlhf.contrib.deepspeed_chat.variables an option that shows its own."""
    path = tmp_path / "python"
    path.write_text(STUB)
    path.chmod(0o755)
    return path


def start(python: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    command = ["bash", str(toys.EXAMPLES / "run.sh"), *arguments]
    whole = environment | {"PYTHON": str(python)} | variables
    return subprocess.run(command, capture_output=True, text=True, env=whole, cwd=python.parent)


def test_a_name_is_a_recipe_and_the_rest_is_for_rlhf(python: Path) -> None:
    done = start(python, "opt/13b", "--ranks", "8", "--set", "data.datasets.0.path=with space")
    recipe = str(toys.EXAMPLES / "opt/13b.yaml")
    assert done.stdout.splitlines() == ["--config", recipe, "--ranks", "8", "--set", "data.datasets.0.path=with space"]
    assert start(python, "opt/13b.yaml").stdout.splitlines() == ["--config", recipe]


def test_the_variables_of_a_stage_stand_before_what_is_given(python: Path) -> None:
    done = start(python, "opt/1.3b", "reward", "--set", "reward.batch_size=8", HL_GBS="64")
    options = ["--set", "reward.batch_size=64", "reward", "--set", "reward.batch_size=8"]
    assert done.stdout.splitlines()[2:] == options and done.returncode == 0


def test_a_variable_that_cannot_be_read_starts_nothing(python: Path) -> None:
    done = start(python, "opt/1.3b", HL_GBS="bad")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: HL_GBS\n")


@pytest.mark.parametrize("name", ["opt/14b", "opt", "../rlhf", "sweeps/step1"])
def test_another_name_is_one_line_that_lists_the_recipes(python: Path, name: str) -> None:
    done = start(python, name)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"run.sh: {name}: no such recipe; use one of ")
    assert set(line.partition("one of ")[2].split(", ")) == {toys.name_of(recipe) for recipe in toys.recipes()}


def test_help_has_a_line_for_each_recipe_which_is_its_own_first(python: Path) -> None:
    done = start(python, "--help")
    assert done.returncode == 0 and done.stdout == start(python).stdout
    for recipe in toys.recipes():
        first = recipe.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert f"{toys.name_of(recipe):24} {first}" in done.stdout
    assert "set -euo" not in done.stdout


def test_a_python_without_rlhf_is_one_line_with_the_remedy(python: Path) -> None:
    """No other Python takes the place of the one that was named."""
    for done in (start(python, "opt/125m", WITHOUT_RLHF="1"), start(python, "opt/125m", PYTHON="absent")):
        assert done.returncode == 2 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert "this Python has no rlhf; run quickstart.sh" in line


@pytest.mark.slow
def test_it_starts_rlhf_itself() -> None:
    """With the Python of this environment, from any folder."""
    import sys

    done = start(Path(sys.executable), "opt/125m", "plan", "--memory", "8GiB", "--stage", "sft", "--json")
    assert done.returncode == 0, done.stderr
    assert '"fits": true' in done.stdout
