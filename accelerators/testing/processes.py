"""Starts the processes that some checks need: clean environments, time limits, and one line about what went wrong.

They run a command or a task of `accelerators.testing.worker`. The output of libraries is read only if a process fails.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCHER = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("DS_ACCELERATOR", "RLHF_ACCELERATOR", "RLHF_OUTCOMES"),
}
"""Variables that describe the process of the checks, and its choices."""

SECONDS = 600.0
"""Time limit of a process: a backend may compile on its first steps."""

_GRACE = 3.0  # seconds after a rank has failed, for another rank to report the cause


@dataclass(frozen=True)
class Outcome:
    """The end of a process: its results so far, and the line of its error."""

    value: Any = None
    error: str | None = None
    kind: str = ""
    """The error's type, if the worker caught it."""


def environment(**variables: str) -> dict[str, str]:
    """Return the environment for a process that is no rank and has chosen no backend."""
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    return clean | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | variables


def command(arguments: Sequence[str], seconds: float = SECONDS, **variables: str) -> Outcome:
    """Run Python with these arguments and further variables of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        return _run([list(arguments)], [environment(**variables)], [Path(folder)], seconds)[0]


def worker(task: str, *arguments: str, seconds: float = SECONDS) -> Outcome:
    """Run a task of `accelerators.testing.worker`."""
    return _workers([environment()], task, arguments, seconds)[0]


def ranks(count: int, task: str, *arguments: str, seconds: float = SECONDS) -> list[Outcome]:
    """Run a task as `count` ranks of one machine; if one fails, the others are stopped."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    environments = [environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    return _workers(environments, task, arguments, seconds)


def _workers(environments: list[dict[str, str]], task: str, arguments: Sequence[str], seconds: float) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / str(rank) for rank in range(len(environments))]
        for folder in folders:
            folder.mkdir()
        call = ["-m", "accelerators.testing.worker", task]
        commands = [[*call, str(folder / "report.json"), *arguments] for folder in folders]
        return _run(commands, environments, folders, seconds)


def _run(
    commands: list[list[str]], environments: list[dict[str, str]], folders: list[Path], seconds: float
) -> list[Outcome]:
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
        _wait(processes, seconds)
        late = f"did not end within {seconds:.0f} s"
        return [_outcome(process.poll(), folder, late) for process, folder in zip(processes, folders)]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended, until one has failed and the others had time to report, or until the time is over."""
    deadline = time.monotonic() + seconds
    failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.poll() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)


def _outcome(code: int | None, folder: Path, late: str) -> Outcome:
    report: dict[str, Any] = {}
    path = folder / "report.json"
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
    value = report.get("value")
    if "error" in report:
        return Outcome(value, report["error"], report["kind"])
    if code == 0:
        return Outcome(value)
    how = late if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
    line = meaningful_line((folder / "output").read_text(encoding="utf-8", errors="replace"))
    return Outcome(value, f"{how}; {line}" if line else how)


def meaningful_line(output: str) -> str:
    """Return the last line that names an error, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"([\w.]*(Error|Exception)|rlhf: error|terminate called)\b", line)]
    return (errors or lines or [""])[-1]
