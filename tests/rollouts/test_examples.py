"""example_scripts/rollouts: the SLURM script on stand-ins for srun and scontrol, and what the compose file starts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlhf.cli.app import app
from tests.helpers import user_environment
from tests.rollouts.test_runs import assert_same_run, copy

EXAMPLES = Path(__file__).parents[2] / "example_scripts" / "rollouts"
SCONTROL = '#!/usr/bin/env bash\nprintf "%s\\n" ${MACHINES:-127.0.0.1 127.0.0.2 127.0.0.3}\n'
SRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys

options, words = {{}}, sys.argv[1:]
while words[0].startswith("--"):
    name = words.pop(0)
    options[name] = "" if name == "--overlap" else words.pop(0)
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([options, words]), file=file)
tasks = [
    (machine, local)
    for machine in options["--nodelist"].split(",")
    for local in range(int(options.get("--ntasks-per-node", 1)))
]
processes = []
for machine, local in tasks:
    own = [word.replace("0.0.0.0", machine) for word in words]  # each machine is an address of the loopback
    processes.append(subprocess.Popen(own, env=os.environ | {{"SLURM_LOCALID": str(local)}}))
signal.signal(signal.SIGTERM, lambda number, frame: [process.terminate() for process in processes])
sys.exit(max(process.wait() for process in processes))
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on stand-ins."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("rlhf", f'#!/bin/sh\nexec {sys.executable} -m rlhf "$@"'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return user_environment() | {
        "PATH": path, "SLURM_JOB_NODELIST": "node[1-3]", "CALLS": str(tmp_path / "calls"), "RLHF_ACCELERATOR": "cpu",
    }  # fmt: skip


@pytest.mark.slow
def test_slurm_script_trains_on_the_first_machine_and_draws_on_the_others(
    rlhf: Any, begun: Path, slurm: dict[str, str], tmp_path: Path
) -> None:
    expected, run = copy(begun, tmp_path / "here"), copy(begun, tmp_path / "there")
    rlhf("ppo", "--output", expected)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh"), str(rlhf.recipe), str(run), "--quiet"],
        env=slurm, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(run, expected)
    servers, trainer = (yaml.safe_load(line) for line in Path(slurm["CALLS"]).read_text().splitlines())
    assert servers[0]["--nodelist"] == "127.0.0.2,127.0.0.3" and servers[0]["--nodes"] == "2"
    assert trainer[0]["--nodelist"] == "127.0.0.1"
    assert "ppo.rollout.where=[http://127.0.0.2:8653,http://127.0.0.3:8653]" in trainer[1]


def test_slurm_script_names_a_server_on_each_device(slurm: dict[str, str], tmp_path: Path) -> None:
    """With stand-ins that start nothing, and a trainer that is not reached: the servers have ended."""
    (tmp_path / "bin" / "rlhf").write_text("#!/bin/sh\nexit 3\n")
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh"), "recipe.yaml", "runs/mine"],
        env=slurm | {"SLURM_GPUS_ON_NODE": "4"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "the servers have ended" in done.stderr
    (servers,) = (yaml.safe_load(line) for line in Path(slurm["CALLS"]).read_text().splitlines())
    assert servers[0]["--ntasks-per-node"] == "4" and servers[0]["--gpus-per-task"] == "1"
    alone = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh"), "recipe.yaml", "runs/mine"],
        env=slurm | {"MACHINES": "127.0.0.1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert alone.returncode == 2 and "ask for two or more" in alone.stderr


def test_compose_file_starts_commands_that_exist() -> None:
    document = yaml.safe_load((EXAMPLES / "compose.yml").read_text())
    services = document["services"]
    assert services["first"] == services["second"] and set(services["trainer"]["depends_on"]) == {"first", "second"}
    for service in services.values():
        words = shlex.split(service["command"])
        assert CliRunner().invoke(app, [words[0], "--help"]).exit_code == 0
        known = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"}).output
        assert all(word in known for word in words if word.startswith("--"))
        assert service["environment"] == ["RLHF_SERVE_TOKEN"]
    port = "8653"
    where = shlex.split(services["trainer"]["command"])[-1]
    assert where == f"ppo.rollout.where=[http://first:{port},http://second:{port}]"
    assert port in services["first"]["healthcheck"]["test"]
