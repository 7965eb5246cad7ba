"""Start and end the processes of a run together: each keeps a connection to a coordinator in the first one.

The workers, which are the ranks of a run or the launchers of its machines, report how they end. The coordinator, a
thread of the first worker, sends one verdict to all: the message of the worker that failed first, without the errors
that its failure caused elsewhere. Messages are lines of JSON on plain TCP connections. The kernel closes the connection
of a killed process and drops that of an unreachable machine. A process that is alive but silent, for example in a long
compilation, may keep others waiting for as long as the run's timeout allows.

The first message of a connection contains the secret that all workers of a run share (RLHF_SECRET). A connection
without it, or with a message of another form, is closed, and has no effect on the run.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhf.errors import ConfigError
from rlhf.launchers.exit_status import INTERNAL_ERROR, INTERRUPTED, USER_ERROR, ExitStatus, find_root_cause
from rlhf.utils.process_info import SECRET_VARIABLE

_SECONDS_FOR_VERDICT = 30.0  # for the verdict to reach a worker that has ended
_SECONDS_BETWEEN_BEATS = 1.0
_SECONDS_OF_SILENCE = 20.0  # of silence, after which a process counts as stopped if others wait for it
_SECONDS_FOR_CAUSES = 1.5  # for further root causes to arrive, once one is known
_SECONDS_FOR_FIRST_CAUSE = 6.0  # for a root cause to arrive, once only a consequence is known
_SECONDS_TO_NAME_HANGING = 5.0  # for the coordinator to name the hanging worker, before it counts as hanging itself
_SECONDS_TO_DESCRIBE = 5.0  # without progress, after which a process says what it is doing
_SEE_STACKS = "; the stacks of ranks are in the run's folder, in stacks"
_MAX_LINE = 2**20  # bytes of a message
_MAX_HELLO = 2**14  # bytes of the first one, whose sender is not known
_MAX_STRANGERS = 128  # open connections that have not said who they are, in addition to the awaited workers


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # a bool is an int, too


def _is_status(value: Any, *types: type) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == list(types)


_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "secret": lambda value: isinstance(value, str),
    "number": lambda value: type(value) is int,
    "name": lambda value: isinstance(value, str),
    "facts": lambda value: isinstance(value, dict),
    "progress": _is_count,
    "is_waiting": lambda value: isinstance(value, bool),
    "activity": lambda value: isinstance(value, str),
    "end": lambda value: value is None or _is_status(value, int, str, bool),
    "beat": lambda value: value is True,
    "connected": lambda value: isinstance(value, list) and all(isinstance(facts, dict) for facts in value),
    "verdict": lambda value: value is None or _is_status(value, int, str, bool),
}
"""The parts of messages, and the form of each."""


@dataclass
class _Worker:
    """The coordinator's state of one worker."""

    connection: socket.socket
    name: str
    facts: dict[str, Any]
    progress: int = 0
    activity: str = ""  # once it has made no progress for some seconds
    since: float = field(default_factory=time.monotonic)
    last_message: float = field(default_factory=time.monotonic)
    has_ended: bool = False


class Coordinator(threading.Thread):
    """The server that all workers connect to; it decides how the run ends (see the module).

    Args:
        listener: the socket that workers connect to; closed at the end.
        secret: the secret that workers must send.
        count: number of workers; they are numbered from 0.
        noun: what to call a worker that has not connected: `rank` or `machine`.
        timeout: seconds that workers wait for each other: to connect, and, with `track_progress`, to get equally far.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        count: int,
        noun: str,
        timeout: float,
        *,
        track_progress: bool = False,
    ) -> None:
        super().__init__(name="coordinator", daemon=True)
        self._listener, self._count, self._noun, self._timeout = listener, count, noun, timeout
        self._secret, self._track_progress = secret, track_progress
        self._strangers: list[socket.socket] = []  # oldest first
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._start_time = time.monotonic()
        self._failures: list[ExitStatus] = []  # in order of arrival
        self._first_failure: float | None = None  # time of arrival

    def run(self) -> None:
        """Serve the workers until the verdict is sent."""
        beat, has_verdict = time.monotonic(), False
        while not has_verdict:
            for key, _ in self._selector.select(0.2):
                if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # a new connection may have replaced it
                    key.data()
            if time.monotonic() - beat > _SECONDS_BETWEEN_BEATS:
                beat = time.monotonic()
                self._broadcast({"beat": True})
            has_verdict = self._decide()
        self._hang_up()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all are sockets
        self._selector.close()

    def _hang_up(self) -> None:
        """Close connections once the verdict has arrived: closing one with unread data may discard the last message."""
        deadline = time.monotonic() + _SECONDS_BETWEEN_BEATS
        connections = [worker.connection for worker in self._workers.values()]
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        for connection in connections:
            with suppress(OSError):
                while time.monotonic() < deadline and connection.recv(65536):
                    pass

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(_SECONDS_BETWEEN_BEATS)
            _keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._greet, _JSONLineReader(connection)))
            self._strangers.append(connection)
            if len(self._strangers) > self._count + _MAX_STRANGERS:  # they would use up this process's open files
                self._disconnect(self._strangers[0])

    def _greet(self, reader: _JSONLineReader) -> None:
        """Read the first line of a connection, which names the worker; close the connection if it is not a worker's."""
        messages = reader.read(_MAX_HELLO)
        if messages == []:
            return
        hello = messages[0] if messages else {}
        if not {"secret", "number", "name", "facts"} <= hello.keys():
            self._disconnect(reader.connection)
            return
        number, message = hello["number"], ""
        if not hmac.compare_digest(hello["secret"].encode(errors="replace"), self._secret.encode(errors="replace")):
            message = f"{SECRET_VARIABLE} is not the one of {self._noun} 0; set it to the same text for all of them"
        elif number not in range(self._count) or number in self._workers:  # usually another run's
            reason = "already connected" if number in self._workers else f"there are {self._count}, numbered from 0"
            message = (
                f"unexpected {self._noun} {number}: {reason}; "
                f"give each process a unique {self._noun} and each run its own port"
            )
        if message:
            with suppress(OSError):
                _send_line(reader.connection, {"verdict": [USER_ERROR, f"rlhf: error: {message}", False]})
            self._disconnect(reader.connection)
            return
        self._strangers.remove(reader.connection)
        worker = self._workers[number] = _Worker(reader.connection, hello["name"], hello["facts"])
        self._selector.modify(reader.connection, selectors.EVENT_READ, partial(self._read, worker, reader))
        if len(self._workers) == self._count:
            self._broadcast({"connected": [self._workers[number].facts for number in range(self._count)]})
        self._handle(worker, (messages or [])[1:])  # a worker that ends at once sends its status along

    def _read(self, worker: _Worker, reader: _JSONLineReader) -> None:
        messages = reader.read()
        if messages is None:
            self._disconnect(worker.connection)
            if not worker.has_ended:
                line = f"rlhf: error: {worker.name} exited and reported no error"
                self._record_failure(worker, ExitStatus(INTERNAL_ERROR, line, 0.0))
        self._handle(worker, messages or [])

    def _handle(self, worker: _Worker, messages: list[Any]) -> None:
        for message in messages:
            worker.last_message = time.monotonic()
            progress = message.get("progress", worker.progress)
            if progress != worker.progress or message.get("is_waiting"):
                worker.progress, worker.since = progress, worker.last_message
                worker.activity = ""
            worker.activity = message.get("activity", worker.activity)
            if "end" in message and message["end"] is None:
                worker.has_ended = True
            elif "end" in message:
                code, line, follows = message["end"]
                status = ExitStatus(code, line, math.inf if follows else time.time())
                # Launchers name their ranks themselves.
                self._record_failure(worker, status.prefix_with(worker.name) if self._track_progress else status)

    def _disconnect(self, connection: socket.socket) -> None:
        if connection in self._strangers:
            self._strangers.remove(connection)
        self._selector.unregister(connection)
        connection.close()

    def _record_failure(self, worker: _Worker, status: ExitStatus) -> None:
        worker.has_ended = True
        self._failures.append(status)
        self._first_failure = self._first_failure or time.monotonic()

    def _decide(self) -> bool:
        """Return whether the end of the run is known; if so, it was sent to all."""
        now = time.monotonic()
        all_ended = len(self._workers) == self._count and all(worker.has_ended for worker in self._workers.values())
        if all_ended and not self._failures:
            return self._broadcast({"verdict": None})
        if self._first_failure is not None:
            causes = [status for status in self._failures if status.time < math.inf]
            if causes and causes[0].code != INTERRUPTED:  # launchers may send signals after a failure
                causes = [status for status in causes if status.code != INTERRUPTED]
            patience = _SECONDS_FOR_CAUSES if causes else _SECONDS_FOR_FIRST_CAUSE
            if all_ended or now - self._first_failure > patience:
                # If all reports are consequences (a lost or late worker), a worker without a report is the cause.
                silent = [worker for worker in self._workers.values() if not worker.has_ended]
                hanging = self._hanging_status(silent) if self._track_progress and not causes else None
                mutual = self._mutual_wait_status(now) if self._track_progress and not (causes or silent) else None
                return self._send_verdict(hanging or mutual or find_root_cause(causes or self._failures))
        elif len(self._workers) < self._count:
            if now - self._start_time > self._timeout:
                missing = [str(number) for number in range(self._count) if number not in self._workers]
                line = (
                    f"rlhf: error: {self._noun} {', '.join(missing)} of {self._count} did not connect within "
                    f"{self._timeout:.0f} s; start all of them, and check that they can reach the first"
                )
                return self._send_verdict(ExitStatus(USER_ERROR, line, 0))
        elif self._track_progress and (status := self._find_hanging(now)):
            return self._send_verdict(status)
        return False

    def _find_hanging(self, now: float) -> ExitStatus | None:
        """Return the error of the worker that all others have waited too long for; None if there is none.

        Its progress is behind the others'; or it is equal, and the worker is silent while others are not.
        """
        if any(now - worker.since < self._timeout for worker in self._workers.values()):
            return None
        farthest = max(worker.progress for worker in self._workers.values())
        behind = [worker for worker in self._workers.values() if worker.progress < farthest]
        silent = [worker for worker in self._workers.values() if now - worker.last_message > _SECONDS_OF_SILENCE]
        if not behind and len(silent) == self._count:
            return None
        return self._hanging_status(behind or silent)

    def _hanging_status(self, workers: list[_Worker]) -> ExitStatus | None:
        """Return the error of the one of `workers` with the least progress; None if there are none."""
        if not workers:
            return None
        worker = min(workers, key=lambda worker: worker.progress)
        place = f" at {worker.activity}" if worker.activity else ""
        message = f"{worker.name} hangs{place}: the others waited for it for {self._timeout:.0f} s (engine.timeout)"
        return ExitStatus(INTERNAL_ERROR, f"rlhf: error: {message}{_SEE_STACKS}", 0.0)

    def _mutual_wait_status(self, now: float) -> ExitStatus | None:
        """Return the error of workers that waited for each other in different places; None if they did not."""
        workers = [self._workers[number] for number in sorted(self._workers)]
        activities = [worker.activity for worker in workers]
        if any(now - worker.since < self._timeout for worker in workers) or len(set(activities)) < 2:
            return None
        places = "; ".join(f"{worker.name} at {worker.activity or 'an unknown place'}" for worker in workers)
        message = f"the {self._noun}s waited for each other for {self._timeout:.0f} s (engine.timeout): {places}"
        return ExitStatus(INTERNAL_ERROR, f"rlhf: error: {message}{_SEE_STACKS}", 0.0)

    def _send_verdict(self, status: ExitStatus) -> bool:
        """Send the verdict with whether a worker hangs, for whose report no process needs to wait."""
        return self._broadcast({"verdict": [status.code, status.line, status.line.endswith(_SEE_STACKS)]})

    def _broadcast(self, message: Any) -> bool:
        for number in sorted(self._workers, reverse=True):  # the coordinator ends with the process of the first worker
            with suppress(OSError):
                _send_line(self._workers[number].connection, message)
        return True


class WorkerClient:
    """This process's connection to the coordinator.

    Attributes:
        progress: a counter of the main thread's progress; equal numbers mean the same point on all workers.
        is_waiting: the main thread waits for another worker, however long that takes.
        verdict: the status that ended the run; None until another worker has failed.

    Args:
        secret: the secret of the run.
        number, name, facts: which worker this is, its name, and what all workers are to know about it.
        timeout: seconds to wait for the coordinator.
        on_verdict: called, in a thread, with the verdict that another worker's failure brought.
        describe: returns what the main thread is doing.

    Raises:
        ConfigError: no process listens there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        number: int,
        name: str,
        facts: Mapping[str, Any],
        timeout: float,
        *,
        on_verdict: Callable[[ExitStatus], None] = lambda verdict: None,
        describe: Callable[[], str] = lambda: "",
    ) -> None:
        self.progress = 0
        self._describe = describe
        self.is_waiting = False
        self.verdict: ExitStatus | None = None
        self._decided = threading.Event()
        self._all_connected = threading.Event()
        self._has_ended = False
        self._facts: list[dict[str, Any]] = []
        self._on_verdict = on_verdict
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connection = connect_with_retry(address, timeout)
        self._send({"secret": secret, "number": number, "name": name, "facts": {**facts, "name": name}})
        threading.Thread(target=self._listen, name="worker client", daemon=True).start()

    def wait_for_all(self, limit: float | None = None) -> list[dict[str, Any]] | None:
        """Return the facts of each worker once all are connected; None if they are not, within `limit` seconds."""
        deadline = time.monotonic() + (math.inf if limit is None else limit)
        while not self._all_connected.wait(0.2):  # in short waits, so that signals are handled
            if self._decided.is_set() or time.monotonic() > deadline:
                return None
        return self._facts

    def conclude(self, status: ExitStatus | None) -> ExitStatus | None:
        """Report this worker's exit status (None: success); return the verdict, None for success or if none arrives."""
        if not self._has_ended and not self._decided.is_set():
            self._has_ended = True
            self._send({"end": status and [status.code, status.line, status.time == math.inf]})
        self._decided.wait(_SECONDS_FOR_VERDICT)
        return self.verdict

    def _listen(self) -> None:
        reader, progress = _JSONLineReader(self._connection), self.progress
        last_message = since = time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        while not self._decided.is_set():
            messages = reader.read() if selector.select(_SECONDS_BETWEEN_BEATS) else []
            now = time.monotonic()
            last_message = now if messages else last_message
            if progress != self.progress or self.is_waiting:
                progress, since = self.progress, now
            if messages is None:
                self._end_with_coordinator("exited and reported no error")
            elif (
                self._all_connected.is_set()
                and now - max(since, last_message) > self._timeout + _SECONDS_TO_NAME_HANGING
            ):
                self._end_with_coordinator("does not answer", is_known=True)
            for message in messages or ():
                if "connected" in message:
                    self._facts = message["connected"]
                    self._all_connected.set()
                if "verdict" in message:
                    verdict = message["verdict"]
                    code, line, is_known = verdict or (0, "", False)
                    self._accept_verdict(ExitStatus(code, line, 0.0 if is_known else math.inf) if verdict else None)
            activity = self._describe() if now - since > _SECONDS_TO_DESCRIBE else ""
            progress_now = {"progress": self.progress, "is_waiting": self.is_waiting}
            self._send(progress_now | ({"activity": activity} if activity else {}))
        selector.close()
        with self._lock:
            self._connection.close()

    def _end_with_coordinator(self, what: str, *, is_known: bool = False) -> None:
        name = self._facts[0].get("name", "the first process") if self._facts else "the first process"
        line = f"rlhf: error: {name} {what}"
        self._accept_verdict(ExitStatus(INTERNAL_ERROR, line, 0.0 if is_known else math.inf))

    def _accept_verdict(self, verdict: ExitStatus | None) -> None:
        if self._decided.is_set():
            return
        self.verdict = verdict
        self._decided.set()
        if verdict and not self._has_ended:
            self._on_verdict(verdict)

    def _send(self, message: Any) -> None:
        with self._lock, suppress(OSError):
            _send_line(self._connection, message)


class _JSONLineReader:
    """Reader of the messages on a connection, one per line; any process may have written them."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._rest = connection, b""

    def read(self, limit: int = _MAX_LINE) -> list[Any] | None:
        """Return the messages that have arrived, without waiting for more; None if the connection must be closed.

        It has ended, or what has arrived is no message or one of more than `limit` bytes.
        """
        try:
            received = self.connection.recv(65536)
        except OSError:
            received = b""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if not received or max(map(len, [*lines, self._rest])) > limit:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(map(_is_message, messages)) else None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(name in _IS_VALID and _IS_VALID[name](part) for name, part in value.items())


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at this address of this machine; on a free port by default."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can use the address `host`; no name is looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connect_with_retry(address: tuple[str, int], timeout: float) -> socket.socket:
    """Return a connection to `address`, where a process may start to listen later.

    Raises:
        ConfigError: none does within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection(address, timeout=5)
            connection.settimeout(None)
            _keep_alive(connection)
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{address[0]}:{address[1]}: no answer within {timeout:.0f} s ({error.strerror or error}); "
                    "start the first process there, and check the address and that the port is open"
                ) from error
        time.sleep(0.2)


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within about 15 seconds that the machine at the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send_line(connection: socket.socket, message: Any) -> None:
    """Send a message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def find_free_port() -> int:
    """Return a port of this machine that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
