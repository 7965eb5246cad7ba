"""Run a rollout server for a benchmark, in a separate process with one thread."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from machine import ROOT

from rlhf.rollouts.client import RolloutServer, ServerError

ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


@contextmanager
def serving(model: Path, options: Sequence[str], log: Path, environment: Mapping[str, str] = {}) -> Iterator[str]:
    """Serve a model for the duration of the block, and yield the server's address; exit if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rlhf", "serve", str(model), "--rollouts", "--port", str(port), *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **ONE_THREAD, **environment}, start_new_session=True
        )
    try:
        while not _answers(address):
            if process.poll() is not None:
                sys.exit(f"{' '.join(command)}\n{log.read_text()}")
            time.sleep(0.2)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _answers(address: str) -> bool:
    try:
        RolloutServer(address, 10).capabilities()
    except ServerError:
        return False
    return True
