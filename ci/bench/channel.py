"""Connect a benchmark with its worker processes: commands arrive on a worker's stdin, JSON lines return on its stdout.

This module imports only the standard library, because the workers run in different environments.
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
    """A worker's end of the connection. Once it exists, everything that libraries print goes to stderr."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(self, **values: Any) -> None:
        """Send a JSON line with the values and the peak memory of this process, in GiB."""
        values["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(json.dumps(values), file=self._replies)

    def wait(self) -> bool:
        """Wait for the next command; return False if there are no more."""
        return sys.stdin.readline() != ""


class Worker:
    """The benchmark's end of the connection: a process that runs one step per command and idles between steps."""

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
        """Run one step and return the worker's reply; if `record`, append the step's time to `seconds`."""
        start = time.perf_counter()
        print("step", file=self._requests, flush=True)
        reply = self._read()
        if record:
            self.seconds.append(time.perf_counter() - start)
        return reply

    def stop(self) -> None:
        """Close the worker's stdin and wait until the process has ended."""
        self._requests.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            self._process.wait()
            log = self._errors.read_text()[-4000:]
            sys.exit(f"{self._errors.stem} failed with exit code {self._process.returncode}:\n{log}")
        reply: dict[str, Any] = json.loads(line)
        return reply
