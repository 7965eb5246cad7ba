"""Call the user's reward functions and metrics: samples go in, one number per function and sample comes out.

The functions run in a separate process (`rlhf.rewards.worker`), so that nothing they do can harm this process and its
device. The worker ends with this process, even if this process is killed.

The worker is not a `multiprocessing` process: that would import the run's main module and the package rlhf a second
time.
"""

from __future__ import annotations

import ast
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.config import paths
from rlhf.config.schema import Config, RewardFunctionConfig
from rlhf.config.types import short_repr
from rlhf.errors import ConfigError, RewardError
from rlhf.rewards import worker
from rlhf.rewards.hookspecs import METRICS_GROUP, REWARDS_GROUP
from rlhf.utils.process_info import SECRET_VARIABLE

_MARK = "RLHF_REWARD_PROCESS"  # environment variable by which processes that functions start are found
_POLL_SECONDS = 0.2  # between checks if the process has exited, because other processes may keep its connection open


class Sample(NamedTuple):
    """The arguments of a reward function."""

    prompt: str
    completion: str
    row: dict[str, Any]


class FunctionUse(NamedTuple):
    """The names in messages for one use of functions, and the entry point group of plugins that offer them."""

    noun: str
    key: str
    timeout_key: str
    remedy: str
    group: str


REWARDS = FunctionUse(
    "reward function",
    "ppo.reward_functions",
    "ppo.reward_timeout",
    "fix the function, then repeat this command, with --resume if the run has completed a step",
    REWARDS_GROUP,
)
METRICS = FunctionUse(
    "metric", "--metric", "--metric-timeout", "fix the function, then repeat this command", METRICS_GROUP
)


def check_reward_functions(config: Config, ranks: int, *, run_code: bool = True) -> None:
    """Check that the functions can be imported and called; without `run_code`, only read their files.

    Raises:
        RewardError: a function cannot be imported or called.
        ConfigError: the functions may take longer than other ranks wait.
    """
    settings = config.ppo
    if not settings.reward_functions:
        return
    if ranks > 1 and settings.reward_timeout >= config.engine.timeout:
        raise ConfigError(
            f"ppo.reward_timeout: must be less than engine.timeout, {config.engine.timeout:g} s, got "
            f"{settings.reward_timeout:g} s; lower it, or raise engine.timeout"
        )
    trees = {}
    for file in _find_files(settings.reward_functions, REWARDS):
        try:
            trees[str(file)] = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            raise RewardError(f"ppo.reward_functions: {file}: is not valid Python ({error}); correct it") from error
    if not run_code:
        for function in settings.reward_functions:
            file_name, _, name = function.function.rpartition(":")
            tree = trees.get(str(Path(file_name)))
            if tree and not _may_define(tree, name):
                raise RewardError(f"ppo.reward_functions: {file_name} has no {name}; check the name")
    if run_code:
        RewardProcess(settings.reward_functions, settings.reward_timeout).close()


def _may_define(tree: ast.AST, name: str) -> bool:
    """Return False only if the code does not mention `name` where it could define it."""
    wanted = {name, "__getattr__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            mentioned: object = name if node.name == "*" else node.asname or node.name
        else:  # a definition, a variable, or a text that names one
            mentioned = getattr(node, "name", getattr(node, "id", getattr(node, "value", None)))
        if isinstance(mentioned, str) and mentioned in wanted:
            return True
    return False


def _find_files(functions: Sequence[RewardFunctionConfig], use: FunctionUse) -> list[Path]:
    """Return the files among the functions.

    Raises:
        RewardError: one does not exist.
    """
    files = [file for function in functions if (file := function.function.rpartition(":")[0]).endswith(".py")]
    for file in files:
        if not Path(file).is_file():
            raise RewardError(f"{use.key}: {file}: no such file; check its path{paths.missing_path_hint(file)}")
    return [Path(file) for file in files]


class RewardProcess:
    """The process of a rank that runs reward functions; it ends with this object.

    It also ends if a function fails, and the next batch starts a new one, so that a notebook can continue with fixed
    code.

    Args:
        functions: the functions to import.
        timeout: seconds for a batch, and for the imports.
        use: what the functions are for.

    Raises:
        RewardError: a function does not exist, cannot be imported in time, or takes other arguments.
    """

    def __init__(self, functions: Sequence[RewardFunctionConfig], timeout: float, use: FunctionUse = REWARDS) -> None:
        self._functions, self._timeout, self._use = functions, timeout, use
        self._mark = secrets.token_hex()
        self._start()

    def _start(self) -> None:
        _find_files(self._functions, self._use)
        self._connection, worker_end = Pipe()
        lifeline, held_end = Pipe(duplex=False)
        descriptors = worker_end.fileno(), lifeline.fileno()
        self._process = subprocess.Popen(
            [sys.executable, worker.__file__, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # its output goes to standard error
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C reaches this process only
            env={name: value for name, value in os.environ.items() if name != SECRET_VARIABLE} | {_MARK: self._mark},
        )
        worker_end.close()
        lifeline.close()
        self.close = weakref.finalize(self, _end, self._process, self._mark, (self._connection, held_end))
        names = [function.function for function in self._functions]
        # The working directory comes last: its random.py must not replace Python's.
        self._exchange(([*sys.path, os.getcwd()], names, self._use.group), ())

    def __call__(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Return the values of each function, one for each sample.

        Raises:
            RewardError: a function raised, took too long, returned no finite number, or ended its process.
        """
        if not self.close.alive:
            self._start()
        try:
            values: list[list[float]] = self._exchange([tuple(sample) for sample in samples], samples)
        except BaseException:  # after Ctrl-C in a notebook, a late reply would be mistaken for the next one
            self.close()
            raise
        return values

    def _exchange(self, message: Any, samples: Sequence[Sample]) -> Any:
        """Send a message, and return the reply; the timeout ends both."""
        place: tuple[int, int | None] = 0, None  # index of the function, and of the sample
        deadline = time.monotonic() + self._timeout
        exited_before = False

        def stop() -> None:
            nonlocal exited_before
            exited_before = self._process.poll() is not None
            _stop(self._process, self._connection)

        timer = threading.Timer(self._timeout, stop)
        timer.daemon = True
        timer.start()
        try:
            # Children of a process that has exited may hold its end open: nothing would read the message.
            if self._process.poll() is None:
                self._connection.send(message)
            while True:
                exited = self._process.poll() is not None  # checked first, so that all its replies have arrived
                if not self._connection.poll(_POLL_SECONDS):
                    if exited:
                        raise EOFError
                    continue
                kind, *content = _parse_reply(self._connection.recv_bytes())
                if kind == "at":
                    place = content[0], content[1]
                elif time.monotonic() >= deadline:
                    raise EOFError
                elif kind == "failed":
                    problem = content[0]
                    break
                else:
                    return content[0]
        except (EOFError, ConnectionError):
            verb = "took" if samples else "importing it took"
            problem = f"{verb} more than {self._timeout:g} s ({self._use.timeout_key})"
            if time.monotonic() < deadline or exited_before:
                problem = _describe_exit(self._process)
        except (ValueError, RecursionError):
            problem = "wrote to the connection of its process to the run"
        finally:
            timer.cancel()
            timer.join()  # it uses the connection
        raise self._error(problem, place, samples)

    def _error(self, problem: str, place: tuple[int, int | None], samples: Sequence[Sample]) -> RewardError:
        self.close()
        index, number = place
        name = self._functions[index].function
        if number is None:
            return RewardError(f"{self._use.key}: {name}: {problem}")
        sample = samples[number]
        where = f" ({source})" if isinstance(source := sample.row.get("source"), str) else ""
        return RewardError(
            f"{self._use.noun} {name}: {problem}; for the prompt {short_repr(sample.prompt)} with the completion "
            f"{short_repr(sample.completion)}{where}; {self._use.remedy}"
        )


def _parse_reply(message: bytes) -> list[Any]:
    """Return the parts of a worker's message.

    Raises:
        ValueError, RecursionError: it is none: code of a function has written it.
    """
    reply: list[Any] = json.loads(message)
    match reply:
        case ["at", int(), int() | None] | ["failed", str()] | ["done", None]:
            return reply
        case ["done", [*values]] if all(isinstance(row, list) and all(map(_is_number, row)) for row in values):
            return reply
    raise ValueError("no reply")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    """Return a description of how the process ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_SECONDS)
    code = process.returncode
    if code is None:
        return "closed the connection of its process to the run"
    if code >= 0:
        return f"ended its process with exit code {code}"
    hint = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-code).name}{hint}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill_marked(mark: str) -> None:
    """Kill the processes that functions have started and that left the group, which `mark` in their environment shows.

    Where the system does not show environments, they stay.
    """
    entry = f"{_MARK}={mark}".encode()
    for _ in range(10):  # they may start others meanwhile
        marked = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                if entry in path.read_bytes().split(b"\0"):
                    marked.append(int(path.parent.name))
        if not marked:
            return
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
    """Kill a process, and end its connection, which a child that has left its process group may hold open."""
    _kill(process)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _end(process: subprocess.Popen[bytes], mark: str, connections: Sequence[Connection[Any, Any]]) -> None:
    _kill(process)
    process.wait()
    _kill_marked(mark)
    for connection in connections:
        connection.close()
