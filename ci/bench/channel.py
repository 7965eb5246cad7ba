"""The line between a benchmark and its workers: commands go out on stdin, JSON lines come back on stdout.

Imports nothing but the standard library, because the workers live in several environments.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Channel:
    """A worker's end. Whatever libraries print goes to stderr from here on."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(self, **values: Any) -> None:
        values["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(json.dumps(values), file=self._replies)

    def wait(self) -> bool:
        """Block until the next command; False when there will be none."""
        return sys.stdin.readline() != ""


class Worker:
    """The benchmark's end: a process that does one step each time it is told to, and meanwhile has the machine."""

    def __init__(self, command: Sequence[str], *, errors: Path, environment: Mapping[str, str]) -> None:
        common = {
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._errors = errors
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **common, **environment},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self.ready = self._read()
        self.seconds: list[float] = []

    def step(self, *, record: bool) -> dict[str, Any]:
        """Have one step done -> the worker's reply; its time goes to `seconds`."""
        begun = time.perf_counter()
        print("step", file=self._requests, flush=True)
        reply = self._read()
        if record:
            self.seconds.append(time.perf_counter() - begun)
        return reply

    def stop(self) -> None:
        self._requests.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            self._process.wait()
            sys.exit(f"{self._errors.stem} ended with {self._process.returncode}:\n{self._errors.read_text()[-4000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply
