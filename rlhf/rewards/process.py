"""Reward functions of the user, called from the run: samples flow in, a number of each function for each flows out.

The functions run in a process of their own (`rlhf.rewards.worker`), so that whatever they do, this process and its
device go on or end with one line. The other process ends with this one, however that is ended.
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
from rlhf.config.validation_errors import short_repr
from rlhf.errors import ConfigError, RewardError
from rlhf.rewards import worker

_OFTEN = 0.2  # seconds after which a process that has ended is noticed, though others hold its pipe
_AT_ONCE = 1 << 16  # bytes


class Sample(NamedTuple):
    """What a function is called with."""

    prompt: str
    completion: str
    row: dict[str, Any]


def check(config: Config, ranks: int) -> None:
    """Find out beforehand whether the functions can be imported and called.

    Raises:
        RewardError: one cannot.
        ConfigError: they may take longer than other ranks wait.
    """
    settings = config.ppo
    if not settings.reward_functions:
        return
    if ranks > 1 and settings.reward_timeout >= config.engine.timeout:
        raise ConfigError(
            f"ppo.reward_timeout: {settings.reward_timeout:g} s, but ranks wait for each other no longer than "
            f"{config.engine.timeout:g} s (engine.timeout); lower it, or raise that"
        )
    RewardProcess(settings.reward_functions, settings.reward_timeout).close()


class RewardProcess:
    """The process of a rank in which reward functions are kept; it ends with this object.

    Where a function has failed, it ends too, and the next batch is another one's: a notebook goes on with mended code.

    Args:
        timeout: seconds for a batch, and for the imports.

    Raises:
        RewardError: a function is not there, cannot be imported in time, or takes other arguments.
    """

    def __init__(self, functions: Sequence[RewardFunctionConfig], timeout: float) -> None:
        self._functions, self._timeout = functions, timeout
        self._begin()

    def _begin(self) -> None:
        for function in self._functions:
            file = function.function.rpartition(":")[0]
            if file.endswith(".py") and not Path(file).is_file():
                raise RewardError(
                    f"ppo.reward_functions: {file}: no such file; check its path{paths.missing_path_hint(file)}"
                )
        self._at: tuple[int, int | None]  # function, and sample
        pipes = [os.pipe() for _ in range(3)]
        (asked, self._requests), (self._replies, answers), (lifeline, held) = pipes
        self._process = subprocess.Popen(
            [sys.executable, worker.__file__, *map(str, (asked, answers, lifeline))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it prints to standard error
            pass_fds=(asked, answers, lifeline),
            start_new_session=True,  # Ctrl-C is for this process
        )
        for descriptor in (asked, answers, lifeline):
            os.close(descriptor)
        self.close = weakref.finalize(self, _end, self._process, (self._requests, self._replies, held))
        os.set_blocking(self._requests, False)
        self._exchange(([os.getcwd(), *sys.path], [function.function for function in self._functions]), ())

    def __call__(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Of each function, its value for each sample.

        Raises:
            RewardError: a function raised, was too slow, gave no finite number, or ended its process.
        """
        if not self.close.alive:
            self._begin()
        try:
            found: list[list[float]] = self._exchange([tuple(sample) for sample in samples], samples)
        except BaseException:  # Ctrl-C in a notebook: what is still to come would be taken for the next answer
            self.close()
            raise
        return found

    def _exchange(self, message: Any, samples: Sequence[Sample]) -> Any:
        """Send a message, and wait for what becomes of it."""
        unsent, arrived = memoryview(worker.packed(message)), bytearray()
        self._at = 0, None
        deadline = time.monotonic() + self._timeout
        while (left := deadline - time.monotonic()) > 0:
            ended = self._process.poll() is not None  # asked first: what it said before it ended is then there
            poll = select.poll()
            poll.register(self._replies, select.POLLIN)
            if unsent:
                poll.register(self._requests, select.POLLOUT)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * min(left, _OFTEN))}
            if self._requests in ready:
                try:
                    unsent = unsent[os.write(self._requests, unsent[:_AT_ONCE]) :]
                except BrokenPipeError:  # it has ended, but what it said is still to be read
                    unsent = unsent[:0]
            received = os.read(self._replies, _AT_ONCE) if self._replies in ready else None
            if received == b"" or (received is None and ended):
                raise self._error(_ending(self._process), samples)
            arrived += received or b""
            for kind, *content in _complete(arrived):
                if kind == "at":
                    self._at = content[0], content[1]
                elif kind == "failed":
                    raise self._error(content[0], samples)
                else:
                    return content[0]
        what = "took" if samples else "importing it took"
        raise self._error(f"{what} more than {self._timeout:g} s (ppo.reward_timeout)", samples)

    def _error(self, what: str, samples: Sequence[Sample]) -> RewardError:
        self.close()
        place, number = self._at
        name = self._functions[place].function
        if number is None:
            return RewardError(f"ppo.reward_functions: {name}: {what}")
        sample = samples[number]
        where = f" ({source})" if isinstance(source := sample.row.get("source"), str) else ""
        return RewardError(
            f"reward function {name}: {what}; for the prompt {short_repr(sample.prompt)} with the completion "
            f"{short_repr(sample.completion)}{where}; mend it, then give this command with --resume"
        )


def _complete(arrived: bytearray) -> list[tuple[Any, ...]]:
    """The messages that have arrived whole, taken out of `arrived`."""
    found = []
    head = worker.LENGTH.size
    while len(arrived) >= head and len(arrived) >= (end := head + worker.LENGTH.unpack(arrived[:head])[0]):
        found.append(pickle.loads(arrived[head:end]))
        del arrived[:end]
    return found


def _ending(process: subprocess.Popen[bytes]) -> str:
    """How a process has ended that says nothing more."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_OFTEN)
    code = process.returncode
    if code is None:
        return "closed its process's connection with the run"
    if code >= 0:
        return f"ended its process with exit code {code}"
    hint = ", which may be for lack of memory" if -code == signal.SIGKILL else ""
    return f"its process was ended by {signal.Signals(-code).name}{hint}"


def _end(process: subprocess.Popen[bytes], descriptors: Sequence[int]) -> None:
    """End a process and all that it has started."""
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
