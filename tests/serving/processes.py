"""A process of `rlhf serve`."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai

from rlhf.launchers.coordinator import find_free_port
from tests.forks import Forks

NAME = "tiny"


class Server:
    """A server in a process.

    Attributes:
        address: with the port, without a path.
    """

    def __init__(
        self, forks: Forks, folder: Path, *options: str, port: int = 0, seconds: float = 120, **environment: str
    ) -> None:
        port = port or find_free_port()
        self.address = f"http://127.0.0.1:{port}"
        command = ["-m", "rlhf", "serve", str(folder), "--name", NAME, "--precision", "fp32", "--port", str(port)]
        environment = {"RLHF_ACCELERATOR": "cpu"} | environment
        self.process: Any = forks.start(*command, *options, environment=environment)
        deadline = time.monotonic() + seconds
        while self.get("/health")[0] != 200:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        return self.send(urllib.request.Request(self.address + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
        status, text = self.send(urllib.request.Request(self.address + path, data, headers))
        return status, json.loads(text)

    def send(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, TimeoutError):  # its port is open before it answers
            return 0, ""

    def client(self, token: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=token, max_retries=0, timeout=60)

    def end(self) -> tuple[int, str]:
        """End it with SIGTERM, and return the exit code and what it has written to stderr."""
        os.kill(self.process.pid, signal.SIGTERM)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors
