"""Call the user's reward functions: samples go in, one number per function and sample comes out.

The functions run in a separate process (`rlhf.rewards.worker`), so that nothing they do can harm this process and its
device. The worker ends with this process, even if this process is killed.

The worker is not a `multiprocessing` process: that would import the run's main module and the package rlhf a second
time, and its connections block while both sides send.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.config import paths
from rlhf.config.schema import Config, RewardFunctionConfig
from rlhf.config.types import short_repr
from rlhf.errors import ConfigError, RewardError
from rlhf.rewards import worker

_POLL_SECONDS = 0.2  # between checks whether the process has exited while others hold its pipe open
_CHUNK = 1 << 16  # bytes


class Sample(NamedTuple):
    """The arguments of a reward function."""

    prompt: str
    completion: str
    row: dict[str, Any]


def check_reward_functions(config: Config, ranks: int) -> None:
    """Check that the functions can be imported and called.

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
    RewardProcess(settings.reward_functions, settings.reward_timeout).close()


class RewardProcess:
    """The process of a rank that runs reward functions; it ends with this object.

    It also ends if a function fails, and the next batch starts a new one, so that a notebook can continue with fixed
    code.

    Args:
        functions: the functions to import.
        timeout: seconds for a batch, and for the imports.

    Raises:
        RewardError: a function does not exist, cannot be imported in time, or takes other arguments.
    """

    def __init__(self, functions: Sequence[RewardFunctionConfig], timeout: float) -> None:
        self._functions, self._timeout = functions, timeout
        self._start()

    def _start(self) -> None:
        for function in self._functions:
            file = function.function.rpartition(":")[0]
            if file.endswith(".py") and not Path(file).is_file():
                raise RewardError(
                    f"ppo.reward_functions: {file}: no such file; check its path{paths.missing_path_hint(file)}"
                )
        self._current: tuple[int, int | None]  # index of the function, and of the sample
        pipes = [os.pipe() for _ in range(3)]
        (requests, self._requests), (self._replies, replies), (lifeline, held_end) = pipes
        self._process = subprocess.Popen(
            [sys.executable, worker.__file__, *map(str, (requests, replies, lifeline))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # its output goes to standard error
            pass_fds=(requests, replies, lifeline),
            start_new_session=True,  # Ctrl-C reaches this process only
        )
        for descriptor in (requests, replies, lifeline):
            os.close(descriptor)
        self.close = weakref.finalize(self, _kill, self._process, (self._requests, self._replies, held_end))
        os.set_blocking(self._requests, False)
        self._exchange(([os.getcwd(), *sys.path], [function.function for function in self._functions]), ())

    def __call__(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Return, for each function, its value for each sample.

        Raises:
            RewardError: a function raised, took too long, returned no finite number, or ended its process.
        """
        if not self.close.alive:
            self._start()
        try:
            values: list[list[float]] = self._exchange([tuple(sample) for sample in samples], samples)
        except BaseException:  # Ctrl-C in a notebook: a late reply would be taken for the next one
            self.close()
            raise
        return values

    def _exchange(self, message: Any, samples: Sequence[Sample]) -> Any:
        """Send a message, and return the reply."""
        unsent, arrived = memoryview(worker.pack_message(message)), bytearray()
        self._current = 0, None
        deadline = time.monotonic() + self._timeout
        while (seconds := deadline - time.monotonic()) > 0:
            exited = self._process.poll() is not None  # checked first, so that all its replies have arrived
            poll = select.poll()
            poll.register(self._replies, select.POLLIN)
            if unsent:
                poll.register(self._requests, select.POLLOUT)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * min(seconds, _POLL_SECONDS))}
            if self._requests in ready:
                try:
                    unsent = unsent[os.write(self._requests, unsent[:_CHUNK]) :]
                except BrokenPipeError:  # it has exited, but its replies can still be read
                    unsent = unsent[:0]
            received = os.read(self._replies, _CHUNK) if self._replies in ready else None
            if received == b"" or (received is None and exited):
                raise self._error(_describe_exit(self._process), samples)
            arrived += received or b""
            for kind, *content in _take_messages(arrived):
                if kind == "at":
                    self._current = content[0], content[1]
                elif kind == "failed":
                    raise self._error(content[0], samples)
                else:
                    return content[0]
        took = "took" if samples else "importing it took"
        raise self._error(f"{took} more than {self._timeout:g} s (ppo.reward_timeout)", samples)

    def _error(self, problem: str, samples: Sequence[Sample]) -> RewardError:
        self.close()
        index, number = self._current
        name = self._functions[index].function
        if number is None:
            return RewardError(f"ppo.reward_functions: {name}: {problem}")
        sample = samples[number]
        where = f" ({source})" if isinstance(source := sample.row.get("source"), str) else ""
        return RewardError(
            f"reward function {name}: {problem}; for the prompt {short_repr(sample.prompt)} with the completion "
            f"{short_repr(sample.completion)}{where}; fix the function, then repeat this command with --resume"
        )


def _take_messages(arrived: bytearray) -> list[tuple[Any, ...]]:
    """Remove the complete messages from `arrived`, and return them."""
    messages = []
    head = worker.LENGTH.size
    while len(arrived) >= head and len(arrived) >= (end := head + worker.LENGTH.unpack(arrived[:head])[0]):
        messages.append(pickle.loads(arrived[head:end]))
        del arrived[:end]
    return messages


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended that sent no more messages."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_SECONDS)
    code = process.returncode
    if code is None:
        return "closed the connection of its process to the run"
    if code >= 0:
        return f"ended its process with exit code {code}"
    hint = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-code).name}{hint}"


def _kill(process: subprocess.Popen[bytes], descriptors: Sequence[int]) -> None:
    """Kill a process and all processes that it started."""
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
