"""Checks in separate processes: imports, ranks, DeepSpeed, and a whole run.

A process has a clean environment and a time limit; it runs a command, or a task of `accelerators.testing.worker`. The
output of libraries is read only if it fails.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import accelerators
from accelerators import hookspecs
from accelerators.testing import worker as tasks

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

LAUNCHER = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("DS_ACCELERATOR", "RLHF_ACCELERATOR", "RLHF_OUTCOMES"),
}
"""Variables that describe the process of the checks, and its choices."""

SECONDS = 600.0
"""Time limit of a process: a backend may compile on its first steps."""

_GRACE = 3.0  # seconds after a rank has failed, for another rank to report the cause

PROBE_SECONDS = 5.0
"""Time limit of a probe; every command waits for the probes of all plugins, and skips one after twice this time."""

STAGES = ("sft", "reward", "ppo")

RUN = {
    "data.max_completion_length": 16,
    "sft.max_steps": 4,
    "reward.max_steps": 4,
    "ppo.steps": 4,
    "ppo.minibatch_size": 2,
    **{f"{stage}.{key}": 4 for stage in STAGES for key in ("batch_size", "eval_rows")},
}
"""Settings of the whole run, on the embedded model and data."""

DEVICE = re.compile(r"pci:[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|/dev/.+")
DEVICE_WORDS = "a PCI address such as pci:0000:19:00.0, or a file in /dev"
"""Names of devices, so that two backends use the same name."""


@dataclass(frozen=True)
class Outcome:
    """The end of a process: its results so far, and the line of its error."""

    value: Any = None
    error: str | None = None
    kind: str = ""
    """The error's type, if the worker caught it."""


def _environment(**variables: str) -> dict[str, str]:
    """Return the environment for a process that is no rank and has chosen no backend."""
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    return clean | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | variables


def worker(task: str, *arguments: str) -> Outcome:
    """Run a task of `accelerators.testing.worker`."""
    return _workers([_environment()], task, arguments)[0]


def _two_ranks(task: str, *arguments: str) -> list[Outcome]:
    """Run a task as two ranks of one machine; if one fails, the other is stopped."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environments = [_environment(**shared, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    return _workers(environments, task, arguments)


def _workers(environments: list[dict[str, str]], task: str, arguments: Sequence[str]) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / str(rank) for rank in range(len(environments))]
        for folder in folders:
            folder.mkdir()
        call = ["-m", "accelerators.testing.worker", task]
        commands = [[*call, str(folder / "report.json"), *arguments] for folder in folders]
        return _run(commands, environments, folders)


def _run(commands: list[list[str]], environments: list[dict[str, str]], folders: list[Path]) -> list[Outcome]:
    processes = []
    for arguments, variables, folder in zip(commands, environments, folders):
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its child processes can be stopped with it
            )
        processes.append(process)
    try:
        _wait(processes)
        return [_outcome(process.poll(), folder) for process, folder in zip(processes, folders)]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended, until one has failed and the others had time to report, or until the time is over."""
    deadline = time.monotonic() + SECONDS
    failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.poll() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)


def _outcome(code: int | None, folder: Path) -> Outcome:
    report: dict[str, Any] = {}
    path = folder / "report.json"
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
    value = report.get("value")
    if "error" in report:
        return Outcome(value, report["error"], report["kind"])
    if code == 0:
        return Outcome(value)
    late = f"did not end within {SECONDS:.0f} s"
    how = late if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
    output = (folder / "output").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"([\w.]*(Error|Exception)|rlhf: error|terminate called)\b", line)]
    return Outcome(value, "; ".join([how, *(errors or lines)[-1:]]))


def check_discovery(name: str) -> None:
    """Check that loading the plugin does not import torch, in a process that has imported nothing else."""
    point = _entry_point(name)
    report = _value(worker("discovery", point.name, point.value))
    assert not report["torch"], f"{report['torch']} imports torch; expected torch only when the factory is imported"


def check_probe(name: str) -> None:
    """Check the probe in a new process, then use the device in a forked child: an open device would break it."""
    point = _entry_point(name)
    report = _value(worker("probe", point.name, point.value, name))
    assert not report["torch"], "the probe imports torch; expected a look at files or at a vendor's command-line tool"
    seconds = report["seconds"]
    assert seconds <= PROBE_SECONDS, f"the probe took {seconds:.1f} s, expected at most {PROBE_SECONDS:g} s"
    for device in report["devices"]:
        assert DEVICE.fullmatch(device), f"the probe names the device {device!r}, expected {DEVICE_WORDS}"
    assert not report["child"], f"after the probe, a forked child cannot use the device: {report['child']}"


def check_collectives(unbound: Accelerator) -> None:
    """Check the collectives of two ranks; skipped if they would have to share one device and cannot."""
    outcomes = _two_ranks("collectives", unbound.name)
    refused = next((outcome for outcome in outcomes if outcome.kind == tasks.UnboundError.__name__), None)
    if refused and unbound.info().count < 2:
        raise SkipTest(f"one device here, and a second rank cannot share it: {refused.error}")
    expected = {
        "all_reduce": [3.0] * 4,
        "all_gather": [1.0, 1.0, 2.0, 2.0],
        "broadcast": [10.0] * 3,
        "all_gather_object": [{"rank": 0}, {"rank": 1}],
        "all_reduce on the host": [3.0] * 2,
    }
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error]
    # The rank with an error message comes first; others were stopped, or saw the connection close.
    failed.sort(key=lambda pair: not pair[1].kind)
    assert not failed, f"two ranks: rank {failed[0][0]}: {failed[0][1].error}"
    for rank, outcome in enumerate(outcomes):
        for collective, result in outcome.value.items():
            value = expected[collective]
            assert result == value, f"{collective}: rank {rank} got {result}, expected {value}"


def check_deepspeed(deepspeed_report: Outcome) -> None:
    """Check that `prepare_deepspeed` makes DeepSpeed use the backend's device."""
    assert deepspeed_report.value, f"prepare_deepspeed() failed: {deepspeed_report.error}"
    device, expected = deepspeed_report.value["device"], deepspeed_report.value["expected"]
    assert device == expected, f"after prepare_deepspeed(), DeepSpeed's device is {device!r}, expected {expected!r}"


def check_deepspeed_step(deepspeed_report: Outcome, stage: int) -> None:
    """Compare losses of a few steps in the backend's precision with plain PyTorch in fp32 on the CPU."""
    from accelerators.testing import reference

    report = deepspeed_report
    value = report.value or {"losses": {}, "errors": {}}
    losses = value["losses"].get(str(stage))
    assert losses, f"ZeRO {stage}: {value['errors'].get(str(stage), report.error)}"
    precision = value["precision"]
    expected = reference.losses()
    # A step that overflowed in fp16 changed nothing: the next loss has the same weights.
    assert losses[-1][0] > 0, f"ZeRO {stage}: no step was taken in {len(losses)}, loss scaling skipped them all"
    for step, (updates, loss) in enumerate(losses, start=1):
        off = abs(loss - expected[updates]) / expected[0]
        close = off <= reference.TOLERANCES[precision]
        what = f"ZeRO {stage} in {precision}: loss {loss:.4f} at step {step}"
        assert close, f"{what}, expected {expected[updates]:.4f} (plain PyTorch, fp32)"
    assert not report.error, f"DeepSpeed's process failed at its end: {report.error}"


def check_run(unbound: Accelerator) -> str:
    """Check a run of the three stages through the command line; return a note about compilations."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        settings = [part for key, value in RUN.items() for part in ("--set", f"{key}={value}")]
        command = ["-m", "rlhf", "--accelerator", unbound.name, "--output", str(output), *settings]
        variables = _environment(HF_DATASETS_CACHE=str(Path(folder, "rows")))
        (outcome,) = _run([command], [variables], [Path(folder)])
        # Without the path of a traceback in this folder, which is deleted.
        error = (outcome.error or "").partition("; its traceback is in")[0]
        assert not error, f"rlhf --accelerator {unbound.name}: {error}"
        compiled = {stage: list(_compilations(unbound, output / stage / "metrics.jsonl")) for stage in STAGES}
    for stage, counts in compiled.items():
        late = counts[2:]
        flat = len(set(late)) <= 1
        assert flat, (
            f"{stage}: compilations rose from {late[0]} to {late[-1]} after step 3, expected no late compilation"
        )
    if not any(compiled.values()):
        return "nothing is compiled here"
    return "compilations: " + ", ".join(f"{stage} {counts[-1]}" for stage, counts in compiled.items() if counts)


def _compilations(accelerator: Accelerator, path: Path) -> Iterator[int]:
    """Yield compilations by step; every recorded number must be finite."""
    scaled = accelerator.precision().loss_scaling
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "learning_rate" in record]
    assert len(steps) == 4, f"{path.parent.name}: metrics.jsonl has {len(steps)} steps, expected 4"
    for record in records:
        # A gradient that overflows is no error if loss scaling skips its step.
        bad = [key for key, value in record.items() if value is None and not (scaled and key.endswith("grad_norm"))]
        assert not bad, f"{path.parent.name}: {bad[0]} is not finite at step {record['step']}"
        if "compilations" in record:
            yield int(record["compilations"])


def _entry_point(name: str) -> EntryPoint:
    """Return the entry point of the plugin that offers a backend; no other plugin is loaded."""
    report = next(report for report in accelerators.available() if report.name == name and report.available)
    points = entry_points(group=hookspecs.ENTRY_POINT_GROUP)
    candidates = [point for point in points if point.dist and point.dist.name == report.distribution]
    return next(point for point in candidates if name in [spec.name for spec in tasks.offers(point)])


def _value(outcome: Outcome) -> Any:
    assert outcome.error is None, f"the check's process failed: {outcome.error}"
    return outcome.value
