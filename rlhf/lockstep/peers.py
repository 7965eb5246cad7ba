"""The two ends that the driver compares: a process that runs a backend, or a file with what one has reported."""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from rlhf.config.schema import Config, Stage
from rlhf.errors import RemoteRankError, RLHFError


class LiveSide:
    """The methods of `rlhf.lockstep.side.Side` in another process."""

    def __init__(self, connection: Any, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._connection, self.name, self._process, self._log = connection, name, process, log
        self.facts: dict[str, Any] = self._receive()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the side, and return its result.

        Raises:
            RLHFError: the call failed in a way that the user can fix.
            RemoteRankError: it failed otherwise.
        """
        self._connection.send_bytes(pickle.dumps((method, args, options)))
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            code = self._process.wait()
            raise RemoteRankError(
                f"{self.name}: its process ended with exit code {code}{_last_line(self._log)}"
            ) from error
        if "error" in answer:
            if answer["code"] == 2:
                raise RLHFError(f"{self.name}: {answer['error']}")
            raise RemoteRankError(f"{self.name}: {answer['error']}{_last_line(self._log)}")
        return answer["result"]


@contextmanager
def live_side(
    name: str, config: Config, stages: Sequence[Stage], folder: Path, variables: Mapping[str, str] = {}
) -> Iterator[LiveSide]:
    """Start a process for a backend, and end it after the block.

    Args:
        name: what messages call it.
        config: the recipe, with the backend and the output folder.
        stages: the stages that will be opened.
        folder: for the log and the address.
        variables: environment variables of the process, such as a mode of the backend.
    """
    key, address, log = secrets.token_bytes(32), str(folder / "address"), folder / "log"
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **variables}
    with Listener(address, "AF_UNIX", authkey=key) as listener, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhf.lockstep.worker", address],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(key)
            process.stdin.close()
            with listener.accept() as connection:
                connection.send_bytes(pickle.dumps((config, list(stages))))
                yield LiveSide(connection, name, process, log)
        finally:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return f" ({lines[-1][:200]})" if lines else ""
