"""How processes on several machines begin together and end together: plain connections to one of them, the hub.

Members - the ranks of a run, or the launchers of its machines - each keep a connection to the hub, which is a thread of
the first. How a member ends flows in; one verdict flows out to all: the cause, in the words of the one that met it, and
not the noise of those that it brought down. The kernel closes the connection of a process that is killed, and gives up
on that of a machine that is gone. A process that only does not answer, as in a long compilation, is waited for, until
others have waited for it longer than the run allows.
"""

from __future__ import annotations

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

from rlhf.launchers.exit_status import DEFECT, INTERRUPTED, USER, ExitStatus, find_root_cause
from rlhf.launchers.sockets import JSONLineReader, connect_with_retry, keep_alive, send

_BEAT = 1.0  # seconds between two words of a member
_SILENT = 20.0  # of a process that is stopped, where others wait for it
_SECONDS_TO_FAIL = 1.5  # for the causes of a failure to arrive, once one is known
_SECONDS_TO_FOLLOW = 6.0  # and once a consequence is
_SECONDS_TO_SAY = 5.0  # for the hub to find out who hangs, before it is taken for the one itself
SECONDS_TO_END = 30.0
"""For a verdict to arrive once a member has ended."""


@dataclass
class _Worker:
    connection: socket.socket
    name: str
    facts: dict[str, Any]
    place: int = 0
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    concluded: bool = False


class Coordinator(threading.Thread):
    """Knows all members; see the module.

    Args:
        listener: where they connect; closed at the end.
        count: how many there are, from 0.
        noun: what a member is called before it has come: `rank`.
        patience: seconds that members wait for another: to come, and, where `places` count, to get as far as they have.
    """

    def __init__(
        self, listener: socket.socket, count: int, noun: str, patience: float, *, places: bool = False
    ) -> None:
        super().__init__(name="hub", daemon=True)
        self._listener, self._count, self._noun, self._patience = listener, count, noun, patience
        self._places = places
        self._members: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._begun = time.monotonic()
        self._outcomes: list[ExitStatus] = []  # of those that did not end well, as they came
        self._first: float | None = None  # when there was one

    def run(self) -> None:
        beat, decided = time.monotonic(), False
        while not decided:
            for key, _ in self._selector.select(0.2):
                key.data()
            if time.monotonic() - beat > _BEAT:
                beat = time.monotonic()
                self._tell({"here": True})
            decided = self._decide()
        self._hang_up()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all are sockets
        self._selector.close()

    def _hang_up(self) -> None:
        """Let the verdict arrive: closing a connection with something unread may take back what was sent last."""
        deadline = time.monotonic() + _BEAT
        connections = [member.connection for member in self._members.values()]
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
            connection.settimeout(_BEAT)
            keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._greet, JSONLineReader(connection)))

    def _greet(self, lines: JSONLineReader) -> None:
        """The first line of a connection says who it is; whoever says something else is no member."""
        messages = lines.read()
        if messages == []:
            return
        hello = messages[0] if messages else {}
        number, facts = hello.get("number"), hello.get("facts")
        if not isinstance(number, int) or not isinstance(facts, dict):
            self._leave(lines.connection)
            return
        if number not in range(self._count) or number in self._members:  # another run's, as a rule
            why = "it has come already" if number in self._members else f"there are {self._count}, from 0"
            line = f"{self._noun} {number} is not awaited: {why}; give each its own number, and each run its own port"
            with suppress(OSError):
                send(lines.connection, {"verdict": [USER, f"rlhf: error: {line}"]})
            self._leave(lines.connection)
            return
        member = self._members[number] = _Worker(lines.connection, str(hello.get("name")), facts)
        self._selector.modify(lines.connection, selectors.EVENT_READ, partial(self._read, member, lines))
        if len(self._members) == self._count:
            self._tell({"met": [self._members[number].facts for number in range(self._count)]})
        self._take(member, (messages or [])[1:])  # of one that ends at once, its end

    def _read(self, member: _Worker, lines: JSONLineReader) -> None:
        messages = lines.read()
        if messages is None:
            self._leave(member.connection)
            if not member.concluded:
                self._conclude(member, ExitStatus(DEFECT, f"rlhf: error: {member.name} ended without a word", 0.0))
        self._take(member, messages or [])

    def _take(self, member: _Worker, messages: list[Any]) -> None:
        for message in messages:
            member.heard = time.monotonic()
            if message.get("place", member.place) != member.place or message.get("waits"):
                member.place, member.since = message["place"], member.heard
            if "end" in message:
                self._conclude(member, self._told(member, *message["end"]) if message["end"] else None)

    def _told(self, member: _Worker, code: int, line: str, follows: bool) -> ExitStatus:
        outcome = ExitStatus(code, line, math.inf if follows else time.time())
        return outcome.prefix_with(member.name) if self._places else outcome  # launchers name their ranks themselves

    def _leave(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _conclude(self, member: _Worker, outcome: ExitStatus | None) -> None:
        member.concluded = True
        if outcome:
            self._outcomes.append(outcome)
            self._first = self._first or time.monotonic()

    def _decide(self) -> bool:
        """Whether the end of all is known; all are told."""
        now = time.monotonic()
        outcomes = self._outcomes
        everybody = len(self._members) == self._count and all(member.concluded for member in self._members.values())
        if everybody and not outcomes:
            return self._tell({"verdict": None})
        if self._first is not None:
            sure = [outcome for outcome in outcomes if outcome.time < math.inf]
            if sure and sure[0].code != INTERRUPTED:  # launchers may send signals where one has failed
                sure = [outcome for outcome in sure if outcome.code != INTERRUPTED]
            if everybody or now - self._first > (_SECONDS_TO_FAIL if sure else _SECONDS_TO_FOLLOW):
                return self._judge(self._missed() if self._places and not sure else find_root_cause(sure or outcomes))
        elif len(self._members) < self._count:
            if now - self._begun > self._patience:
                absent = [str(number) for number in range(self._count) if number not in self._members]
                line = f"{self._noun} {', '.join(absent)} of {self._count} did not come within {self._patience:.0f} s"
                return self._judge(
                    ExitStatus(USER, f"rlhf: error: {line}; start all, and check that they see the first", 0)
                )
        elif self._places and (outcome := self._stuck(now)):
            return self._judge(outcome)
        return False

    def _stuck(self, now: float) -> ExitStatus | None:
        """The member for which all others wait too long, if there is one.

        It has not come as far as they have; or it is silent, while they are as far as it is, and not.
        """
        if any(now - member.since < self._patience for member in self._members.values()):
            return None
        farthest = max(member.place for member in self._members.values())
        behind = [member for member in self._members.values() if member.place < farthest]
        silent = [member for member in self._members.values() if now - member.heard > _SILENT]
        if not behind and len(silent) == self._count:
            return None
        late = behind or silent
        return self._hang(min(late, key=lambda member: member.place)) if late else None

    def _missed(self) -> ExitStatus:
        """What is wrong with the member that says nothing, where others say that they have waited or lost somebody."""
        silent = [member for member in self._members.values() if not member.concluded]
        if silent:
            return self._hang(min(silent, key=lambda member: member.place))
        return find_root_cause(self._outcomes)

    def _hang(self, member: _Worker) -> ExitStatus:
        line = f"{member.name} hangs: the others waited for it for {self._patience:.0f} s (engine.timeout)"
        return ExitStatus(DEFECT, f"rlhf: error: {line}", 0.0)

    def _judge(self, outcome: ExitStatus) -> bool:
        return self._tell({"verdict": [outcome.code, outcome.line]})

    def _tell(self, message: Any) -> bool:
        for number in sorted(self._members, reverse=True):  # the hub ends with the process of the first
            with suppress(OSError):
                send(self._members[number].connection, message)
        return True


class WorkerClient:
    """This process's connection to the hub.

    Args:
        number, name, facts: which member this is, what it is called, and what all are to know of it.
        patience: seconds to wait for the hub.
        judged: called, in a thread, with the verdict that another one's failure brought.

    Raises:
        ConfigError: nobody listens there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        number: int,
        name: str,
        facts: Mapping[str, Any],
        patience: float,
        *,
        judged: Callable[[ExitStatus], None] = lambda verdict: None,
    ) -> None:
        self.place = 0
        """How far the main thread has come; the same number means the same point on all members."""
        self.waits = False
        """Whether the main thread waits for another as long as that may take."""
        self.verdict: ExitStatus | None = None
        self._decided = threading.Event()
        self._met = threading.Event()
        self._concluded = False
        self._facts: list[dict[str, Any]] = []
        self._judged = judged
        self._patience = patience
        self._lock = threading.Lock()
        self._connection = connect_with_retry(address, patience)
        self._say({"number": number, "name": name, "facts": {**facts, "name": name}})
        threading.Thread(target=self._listen, name="companion", daemon=True).start()

    def met(self, limit: float | None = None) -> list[dict[str, Any]] | None:
        """What is known of each member, once all have come; None where they do not, within `limit` seconds if given."""
        deadline = time.monotonic() + (math.inf if limit is None else limit)
        while not self._met.wait(0.2):  # not for longer: a signal is to be heard
            if self._decided.is_set() or time.monotonic() > deadline:
                return None
        return self._facts

    def conclude(self, outcome: ExitStatus | None) -> ExitStatus | None:
        """Say how this member ended, None for well, and learn how all did; None for well, or where nobody says."""
        if not self._concluded and not self._decided.is_set():
            self._concluded = True
            end = outcome and [outcome.code, outcome.line, outcome.time == math.inf]
            self._say({"end": end})
        try:
            self._decided.wait(SECONDS_TO_END)
        except KeyboardInterrupt:  # some launchers send a signal where one has failed; a second one counts
            self._decided.wait(SECONDS_TO_END)
        return self.verdict

    def _listen(self) -> None:
        lines, heard, since, place = JSONLineReader(self._connection), time.monotonic(), time.monotonic(), self.place
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        while not self._decided.is_set():
            messages = lines.read() if selector.select(_BEAT) else []
            now = time.monotonic()
            heard = now if messages else heard
            place, since = (place, since) if place == self.place and not self.waits else (self.place, now)
            if messages is None:
                self._decide(ExitStatus(DEFECT, f"rlhf: error: {self._first} ended without a word", math.inf))
            elif self._met.is_set() and now - max(since, heard) > self._patience + _SECONDS_TO_SAY:
                self._decide(ExitStatus(DEFECT, f"rlhf: error: {self._first} does not answer", math.inf))
            for message in messages or ():
                if "met" in message:
                    self._facts = message["met"]
                    self._met.set()
                if "verdict" in message:
                    verdict = message["verdict"]
                    self._decide(ExitStatus(verdict[0], verdict[1], math.inf) if verdict else None)
            self._say({"place": self.place, "waits": self.waits})
        selector.close()
        with self._lock:
            self._connection.close()

    def _decide(self, verdict: ExitStatus | None) -> None:
        if self._decided.is_set():
            return
        self.verdict = verdict
        self._decided.set()
        if verdict and not self._concluded:
            self._judged(verdict)

    @property
    def _first(self) -> str:
        """What the member with the hub is called."""
        return str(self._facts[0].get("name", "the first")) if self._facts else "the first"

    def _say(self, message: Any) -> None:
        with self._lock, suppress(OSError):
            send(self._connection, message)
