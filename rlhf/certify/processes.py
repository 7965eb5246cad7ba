"""The processes of checks: commands and tasks with a time limit, their output in a log, and no secrets.

A process that crashes, hangs or is killed becomes a `CheckFailed` with one line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.certify.bundle import without_secrets

_DROPPED = {"RLHF_ACCELERATOR", "DS_ACCELERATOR", "RLHF_OUTCOMES", "RLHF_SECRET"}
"""Variables that choose a backend, or belong to a rank: each process of a check makes its choice itself."""

_ERROR = re.compile(r"([\w.]*(Error|Exception)|rlhf: error|rlhf: interrupted|terminate called)\b")


class CheckFailed(Exception):
    """A check's expectation is not met; the message is one line.

    Attributes:
        facts: what the failed process had found out.
        refused: True if the backend refused to run, before its device did any work.
    """

    def __init__(self, message: str, facts: Mapping[str, Any] | None = None, *, refused: bool = False) -> None:
        super().__init__(" ".join(message.split()))
        self.facts = dict(facts or {})
        self.refused = refused


@dataclass(frozen=True)
class Finished:
    """The end of a process; `code` is None if its time was over."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    """The time limit."""

    @property
    def error(self) -> str:
        """One line that says how the process failed."""
        if self.code is None:
            how = f"did not end within {self.seconds:.0f} s"
        else:
            how = signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"
        lines = [line.strip() for line in (self.stderr.strip() or self.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        message = "".join((errors or lines)[-1:]).removeprefix("rlhf: error: ")
        if self.code is None and message:
            message = f"its last line: {message}"
        return "; ".join(filter(None, [how if self.code != 2 else "", message])) or how


@dataclass
class Processes:
    """Starts processes, one at a time, and appends what they print to a log.

    Attributes:
        folder: for temporary files, and the cache of tokenized rows.
        log: file of the check that runs.
        seconds: time limit of each process.
        deadline: the time, by `time.monotonic`, at which the last of them ends; None without one.
    """

    folder: Path
    log: Path
    seconds: float
    deadline: float | None = None
    _number: int = field(default=0, repr=False)

    def python(self, *arguments: str, variables: Mapping[str, str] | None = None) -> Finished:
        """Run `python ARGUMENTS` to its end, or to its time limit.

        Raises:
            CheckFailed: the deadline is over.
        """
        limit = self.seconds if self.deadline is None else min(self.seconds, self.deadline - time.monotonic())
        if limit <= 0:
            raise CheckFailed("the time of the level was over before the check began; use a faster or an idle machine")
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "120"}
        environment = {name: value for name, value in without_secrets(os.environ).items() if name not in _DROPPED}
        environment |= offline | {"HF_DATASETS_CACHE": str(self.folder / "rows")} | dict(variables or {})
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # so that its ranks can be stopped with it
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):  # what a crash has left may still have the device
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # one that hangs in a broken driver does not end
                    process.wait(10)
            texts = []
            for stream in (stdout, stderr):
                stream.seek(0)
                texts.append(stream.read().decode("utf-8", "replace"))
        chosen = "".join(f"{name}={shlex.quote(value)} " for name, value in (variables or {}).items())
        self.write_log(f"$ {chosen}python {shlex.join(arguments)}\n{texts[0]}{texts[1]}[exit code {code}]\n\n")
        return Finished(code, texts[0], texts[1], limit)

    def write_log(self, text: str) -> None:
        """Append a text to the log."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(text)

    def rlhf(self, *arguments: str, variables: Mapping[str, str] | None = None) -> Finished:
        """Run an `rlhf` command."""
        return self.python("-m", "rlhf", *arguments, variables=variables)

    def task(self, name: str, *arguments: Any, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Run a task of `rlhf.certify.tasks`, and return the facts that it published.

        Raises:
            CheckFailed: the task, or its process, failed.
        """
        self._number += 1
        report = self.folder / f"task-{self._number}.json"
        command = ("-m", "rlhf.certify.tasks", name, str(report), json.dumps(arguments))
        finished = self.python(*command, variables=variables)
        document = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        facts: dict[str, Any] = document.get("facts", {})
        if error := document.get("error") or (finished.error if finished.code else ""):
            raise CheckFailed(error, facts, refused=document.get("refused", False))
        return facts
