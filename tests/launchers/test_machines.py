"""Runs on two machines: what they leave, and that the end of one rank is the end of all, in its own words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.launchers.coordinator import find_free_port
from tests.helpers import assert_same_weights, wait_for
from tests.launchers.machines import Machines, deepspeed, mpirun, namespaces_are_allowed, rlhf, srun, torchrun

LAUNCHERS = {"rlhf": rlhf, "torchrun": torchrun, "deepspeed": deepspeed}
LIMIT = 30.0  # seconds in which a failure anywhere ends all processes everywhere


@pytest.fixture(params=["namespaces" if namespaces_are_allowed() else "loopback"])
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path, namespaces=request.param == "namespaces")
    yield machines
    machines.close()


def start(
    machines: Machines, launcher: str, ranks: int, recipe: Path, *arguments: object, **variables: str
) -> list[subprocess.Popen[str]]:
    """Start a stage on both machines."""
    port = find_free_port()
    words = ["sft", "--config", recipe, "--accelerator", "cpu", *arguments]
    commands = [LAUNCHERS[launcher](machines, machine, ranks, *words, port=port) for machine in range(2)]
    return [machines.start(machine, command, **variables) for machine, command in enumerate(commands)]


def ends(processes: list[subprocess.Popen[str]], seconds: float = 240) -> list[tuple[int, str, str]]:
    """Exit code, output and the last line of rlhf's on standard error, of each."""
    results = []
    for process in processes:
        output, errors = process.communicate(timeout=seconds)
        lines = [line for line in errors.splitlines() if line.startswith("rlhf: ")]
        results.append((process.returncode, output, lines[-1] if lines else errors[-2000:]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_machines_that_share_a_folder(machines: Machines, rlhf: Any, tmp_path: Path, launcher: str, ranks: int) -> None:
    output = machines.shared / "run"
    results = ends(start(machines, launcher, ranks, rlhf.recipe, "--output", output))
    assert [code for code, _, _ in results] == [0, 0], results
    if launcher == "rlhf":
        assert "supervised fine-tuning" in results[0][1] and results[1][1] == "", "one machine talks"
    rlhf("sft", "--output", tmp_path / "alone")
    assert_same_weights(output / "sft" / "model", tmp_path / "alone" / "sft" / "model", atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("task", [srun, mpirun])
def test_processes_that_srun_and_mpirun_start_train_together(
    machines: Machines, rlhf: Any, tmp_path: Path, task: Any
) -> None:
    output, meeting = machines.shared / "run", {"MASTER_ADDR": machines.first, "MASTER_PORT": str(find_free_port())}
    command = [sys.executable, "-m", "rlhf", "sft", "--config", rlhf.recipe, "--accelerator", "cpu", "--output", output]
    places = [(machine, local) for machine in range(2) for local in range(2)]
    results = ends([machines.start(place[0], command, **meeting, **task(*place, 2)) for place in places])
    assert [code for code, _, _ in results] == [0, 0, 0, 0], results
    rlhf("sft", "--output", tmp_path / "alone")
    assert_same_weights(output / "sft" / "model", tmp_path / "alone" / "sft" / "model", atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["rlhf", "torchrun"])
def test_machines_with_different_folders_are_refused(
    machines: Machines, rlhf: Any, tmp_path: Path, launcher: str
) -> None:
    if not machines.namespaces:
        pytest.skip("network namespaces are not allowed here, and two loopback addresses see one file system")
    arguments = "--output", machines.own / "run"
    results = ends(start(machines, launcher, 1, rlhf.recipe, *arguments, RLHF_SECRET="a text"))
    refusal = f"{machines.own}/run: machine-1 sees a different folder than machine-0; choose an --output that all"
    for code, _, line in results:
        assert refusal in line
        assert launcher == "torchrun" or code == 2
    assert not list(tmp_path.glob("rlhf-*/run"))


def until_training(processes: list[subprocess.Popen[str]], output: Path) -> None:
    metrics = output / "sft" / "metrics.jsonl"
    wait_for(metrics, processes[0])
    while "tokens_per_second" not in metrics.read_text():
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "failure", "rank"),
    [
        ("rlhf", "exception", 3),
        ("torchrun", "exception", 0),
        ("rlhf", "kill", 0),
        ("torchrun", "kill", 3),
        ("rlhf", "stop", 3),
        ("rlhf", "stop", 0),
        ("torchrun", "stop", 3),
    ],
)
def test_failure_of_one_rank_ends_all_with_its_message(
    machines: Machines, rlhf: Any, launcher: str, failure: str, rank: int
) -> None:
    output, timeout = machines.shared / "run", 15
    keys = ["sft.max_steps=100000", f"engine.timeout={timeout}", "sft.checkpoint_every=0"]
    options = [word for key in keys for word in ("--set", key)]
    processes = start(machines, launcher, 2, rlhf.recipe, "--output", output, *options, PLANTED_RANK=str(rank))
    until_training(processes, output)
    if failure == "exception":
        machines.plant()
        message = "ValueError: planted"
    elif failure == "kill":
        os.kill(machines.process(rank), signal.SIGKILL)
        # rlhf has started the rank and knows its exit status; under torchrun a connection ends
        message = "was ended by SIGKILL" if launcher == "rlhf" else "exited and reported no error"
    else:
        os.kill(machines.process(rank), signal.SIGSTOP)
        message = "the others waited for it for 15 s" if rank else "does not answer"
    limit = LIMIT + (timeout if failure == "stop" else 0)
    if failure == "stop" and launcher == "torchrun":  # it does not end what does not end by itself
        ends([processes[0 if rank else 1]], limit)
        return
    seconds = machines.wait_for_all(limit)
    print(f"{launcher}, {failure} of rank {rank}: all ended after {seconds:.1f} s")
    for code, _, line in ends(processes):
        assert code == 1, line
        assert f"rank {rank} on {machines.name(rank // 2)}" in line and message in line
    if launcher == "rlhf":
        assert not (output / ".rlhf.lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("machine", [0, 1])
def test_a_signal_to_one_machine_ends_all_after_their_step(machines: Machines, rlhf: Any, machine: int) -> None:
    output = machines.shared / "run"
    options = ["--set", "sft.max_steps=100000", "--output", output]
    processes = start(machines, "rlhf", 1, rlhf.recipe, *options)
    until_training(processes, output)
    processes[machine].send_signal(signal.SIGTERM)
    results = ends(processes)
    for number, (code, _, line) in enumerate(results):
        assert code == 130
        assert re.search(
            rf"sft is saved up to step-\d+; to continue: rlhf sft --output {output} --resume --ranks 1", line
        )
        assert f"--nodes 2 --node-rank {number} --rendezvous {machines.first}:" in line
    step = sorted((output / "sft" / "checkpoints").iterdir())[-1].name
    again = start(
        machines, "rlhf", 1, rlhf.recipe, "--output", output, "--resume", "--set", f"sft.max_steps={int(step[5:]) + 1}"
    )
    assert [code for code, _, _ in ends(again)] == [0, 0]
    assert json.loads((output / "sft" / "stage.json").read_text())["steps"] == int(step[5:]) + 1


@pytest.mark.slow
def test_end_of_a_launcher_ends_all(machines: Machines, rlhf: Any) -> None:
    output = machines.shared / "run"
    processes = start(machines, "rlhf", 1, rlhf.recipe, "--output", output, "--set", "sft.max_steps=100000")
    until_training(processes, output)
    processes[1].kill()
    machines.wait_for_all(LIMIT)
    code, _, line = ends(processes)[0]
    assert code == 1 and machines.name(1) in line and "exited and reported no error" in line


@pytest.mark.slow
def test_lost_machine_ends_all(machines: Machines, rlhf: Any) -> None:
    if not machines.namespaces:
        pytest.skip("network namespaces are not allowed here, and a loopback address cannot be cut off")
    output = machines.shared / "run"
    processes = start(machines, "rlhf", 1, rlhf.recipe, "--output", output, "--set", "sft.max_steps=100000")
    until_training(processes, output)
    machines.disconnect()
    print(f"cut off: all ended after {machines.wait_for_all(LIMIT):.1f} s")
    for (code, _, line), other in zip(ends(processes), (1, 0)):
        assert code == 1 and machines.name(other) in line and "exited and reported no error" in line
