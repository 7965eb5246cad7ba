"""A trainer and a rollout server on two machines, that is in two network namespaces, which share no folder."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import sets
from tests.launchers.machines import Machines, namespaces_are_allowed
from tests.rollouts.test_runs import assert_same_run, copy, steps, wait_for_step

TOKEN = "a secret of both machines"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not namespaces_are_allowed(), reason="no network namespaces here"),
]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path, namespaces=True)
    yield machines
    machines.close()


def command(*arguments: object) -> list[object]:
    return [sys.executable, "-m", "rlhf", *arguments]


def start_server(machines: Machines, model: Path) -> Any:
    """Serve on the second machine, whose folder has a copy of the model, and wait until it is ready."""
    shutil.copytree(model, machines.own_folder(1) / "model")
    options = ["--rollouts", "--name", "tiny", "--host", "0.0.0.0", "--precision", "fp32"]
    variables = {"RLHF_SERVE_TOKEN": TOKEN, "RLHF_ACCELERATOR": "cpu"}
    server = machines.start(1, command("serve", machines.own / "model", *options), **variables)
    line = server.stdout.readline()  # type: ignore[union-attr]
    assert "http://0.0.0.0:8653/v1 serves" in line, server.communicate()
    return server


def start_trainer(machines: Machines, rlhf: Any, run: Path, *keys: str) -> Any:
    where = "ppo.rollout.where=http://10.213.0.2:8653"
    words = command("ppo", "--config", rlhf.recipe, "--output", run, *sets(where, *keys))
    return machines.start(0, words, RLHF_SERVE_TOKEN=TOKEN, RLHF_ACCELERATOR="cpu")


def test_run_is_that_of_one_machine(machines: Machines, rlhf: Any, begun: Path, tmp_path: Path) -> None:
    start_server(machines, begun / "sft" / "model")
    expected, run = copy(begun, tmp_path / "here"), copy(begun, tmp_path / "there")
    rlhf("ppo", "--output", expected)
    _, errors = (trainer := start_trainer(machines, rlhf, run)).communicate(timeout=300)
    assert trainer.returncode == 0, errors
    assert_same_run(run, expected)
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())


def test_cut_connection_ends_the_run_after_the_time_limit(
    machines: Machines, rlhf: Any, begun: Path, tmp_path: Path
) -> None:
    start_server(machines, begun / "sft" / "model")
    run = copy(begun, tmp_path / "there")
    trainer = start_trainer(machines, rlhf, run, "ppo.steps=500", "ppo.log_every=1", "ppo.rollout.timeout=4")
    wait_for_step(run, 3, trainer)
    machines.disconnect()
    start = time.monotonic()
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 2 and "no server is left (http://10.213.0.2:8653: " in errors
    assert time.monotonic() - start < 60 and "Traceback" not in errors
    assert len(steps(run)) >= 3
