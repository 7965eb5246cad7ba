"""The two ends that the driver compares: a process that runs a backend, or a file with what one has reported."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf.config.schema import Config, Stage
from rlhf.errors import RemoteRankError, RLHFError
from rlhf.launchers.exit_status import USER_ERROR

Request = tuple[Config, list[Stage]]
"""The first message to a side's process: the recipe, and the stages that will be opened."""


class LiveSide:
    """The methods of `rlhf.lockstep.side.Side` in another process."""

    def __init__(
        self, connection: Connection, name: str, process: subprocess.Popen[bytes], log: Path, request: Request
    ) -> None:
        self._connection, self.name, self._process, self._log = connection, name, process, log
        self.facts: dict[str, Any] = self._ask(request)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the side, and return its result.

        Raises:
            RLHFError: the call failed in a way that the user can fix.
            RemoteRankError: it failed otherwise.
        """
        return self._ask((method, args, options))

    def _ask(self, content: Any) -> Any:
        try:
            self._connection.send_bytes(pickle.dumps(content))
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            code = self._process.wait()
            raise self._fail(f"its process ended with exit code {code}") from error
        if "error" in answer:
            if answer["code"] == USER_ERROR:
                raise RLHFError(f"{self.name}: {answer['error']}")
            raise self._fail(answer["error"])
        return answer["result"]

    def _fail(self, text: str) -> RemoteRankError:
        """Return an error that names a copy of the process's log, because the log's folder will be deleted."""
        kept = Path(tempfile.mkdtemp(prefix="rlhf-"), "log")
        shutil.copyfile(self._log, kept)
        return RemoteRankError(f"{self.name}: {text}; what it printed is in {kept}")


@contextmanager
def live_side(
    name: str, config: Config, stages: Sequence[Stage], folder: Path, variables: Mapping[str, str] = {}
) -> Iterator[LiveSide]:
    """Start a process for a backend, and end it after the block.

    Args:
        name: what messages call it.
        config: the recipe, with the backend and the output folder.
        stages: the stages that will be opened.
        folder: for the log.
        variables: environment variables of the process, such as a mode of the backend.
    """
    log = folder / "log"
    folder.mkdir(parents=True, exist_ok=True)
    here, there = Pipe()
    with here, log.open("wb") as output:
        with there:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlhf.lockstep.worker", str(there.fileno())],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[there.fileno()],
            )
        try:
            yield LiveSide(here, name, process, log, (config, list(stages)))
        finally:
            here.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
