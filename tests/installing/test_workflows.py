"""The workflows of continuous integration: they parse, and what they run is here and takes the options that it gets."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.loader import parse_yaml
from tests.installing.places import ROOT

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))


def workflow(path: Path) -> dict[Any, Any]:
    document = parse_yaml(path.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def commands(path: Path) -> list[str]:
    """Every `run:` of a workflow."""
    return [step["run"] for job in workflow(path)["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_jobs_have_a_machine_an_end_and_no_hub(path: Path) -> None:
    document = workflow(path)
    assert document["env"]["HF_HUB_OFFLINE"] == "1"
    assert document["permissions"] == {"contents": "read"}
    for job in document["jobs"].values():
        assert job["runs-on"] and 0 < job["timeout-minutes"] <= 360
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        assert all("@v" in step["uses"] for step in job["steps"] if "uses" in step)


@pytest.mark.parametrize("command", [command for path in FILES for command in commands(path)])
def test_what_they_run_is_here_and_takes_these_options(command: str) -> None:
    subprocess.run(["bash", "-n", "-c", command], check=True)
    words = [word for word in shlex.split(command) if word not in {"bash", "source", "&&"}]
    if "-m" in words:  # an installed module
        return
    scripts = [ROOT / word for word in words if "/" in word and not word.startswith(".venv/")]
    assert scripts, command
    assert all(script.is_file() for script in scripts), command
    text = scripts[0].read_text(encoding="utf-8")
    assert all(
        re.search(rf"^\s*{re.escape(word)}\)|\"{word}\"", text, re.MULTILINE) for word in words if word.startswith("--")
    )
    functions = [word for word in words if word.endswith("_environment")]
    assert all(f"{function}() {{" in text for function in functions)


def test_change_runs_the_required_checks_and_night_the_rest() -> None:
    ci, nightly = (commands(FOLDER / f"{name}.yml") for name in ("ci", "nightly"))
    assert ci == ["bash .ci/run"]
    assert {"bash ci/test.sh --all", "bash ci/test.sh --lowest"} <= set(nightly)
    assert any(command.endswith("python ci/mutants.py") for command in nightly)


def test_a_gpu_is_asked_for_only_by_hand() -> None:
    nightly = workflow(FOLDER / "nightly.yml")
    waiting = {name: job for name, job in nightly["jobs"].items() if "self-hosted" in job["runs-on"]}
    assert list(waiting) == ["gpu"] and "workflow_dispatch" in waiting["gpu"]["if"]
    *_, certify, upload = waiting["gpu"]["steps"]
    assert certify["run"].endswith(f"rlhf accelerators certify cuda --output {upload['with']['path']}")


# the workflow that authors of plugins call

KIT = FOLDER / "plugin-kit.yml"


def kit_inputs() -> dict[str, Any]:
    inputs = workflow(KIT)["on"]["workflow_call"]["inputs"]
    assert isinstance(inputs, dict)
    return inputs


def test_kit_uses_each_of_its_inputs() -> None:
    text = KIT.read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(kit_inputs())
    assert not any("inputs." in command for command in commands(KIT))  # a caller's text is no part of a command


def test_documented_caller_of_kit_is_complete() -> None:
    page = (ROOT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(jobs:.*?)```", page, re.DOTALL)
    assert len(block.splitlines()) == 4
    job = parse_yaml(block)["jobs"]["kit"]  # type: ignore[index]
    assert job["uses"].endswith(f"/{KIT.relative_to(ROOT)}@main")
    required = {name for name, settings in kit_inputs().items() if settings.get("required")}
    assert required == set(job["with"])


@pytest.mark.slow
def test_kit_checks_template(tmp_path: Path) -> None:
    """The last two commands, as a runner gets them; pip installs aside and without a network."""
    ignored = shutil.ignore_patterns("*.egg-info", "build")
    shutil.copytree(ROOT / "plugins" / "rlhf-example", tmp_path / "plugin" / "chip", ignore=ignored)
    site = tmp_path / "site"
    variables = {"PIP_TARGET": str(site), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    variables |= {"PYTHONPATH": f"{site}:{ROOT}", "FOLDER": "chip", "BACKEND": "example"}
    for command in commands(KIT)[1:]:
        done = subprocess.run(
            ["bash", "-euc", command.replace(".venv/bin/python", sys.executable)],
            cwd=tmp_path,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed; it conforms to the accelerator interface" in done.stdout
