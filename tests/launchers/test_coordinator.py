"""Workers of a run receive one verdict: the root cause, without its consequences."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from rlhf.errors import ConfigError
from rlhf.launchers import coordinator
from rlhf.launchers.coordinator import Coordinator, WorkerClient, listen
from rlhf.launchers.exit_status import INTERNAL_ERROR, INTERRUPTED, USER_ERROR, ExitStatus

SECRET = "the secret of this run"


def encode(*messages: object) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_SECONDS_BETWEEN_BEATS": 0.05,
        "_SECONDS_OF_SILENCE": 0.5,
        "_SECONDS_FOR_CAUSES": 0.2,
        "_SECONDS_FOR_FIRST_CAUSE": 0.6,
    }.items():
        monkeypatch.setattr(coordinator, name, value)


class Run:
    """Three ranks in this process, connected as separate processes would be."""

    def __init__(self, count: int = 3, timeout: float = 30.0, absent: tuple[int, ...] = ()) -> None:
        listener = listen("127.0.0.1")
        self.address = ("127.0.0.1", listener.getsockname()[1])
        self.coordinator = Coordinator(listener, SECRET, count, "rank", timeout, track_progress=True)
        self.coordinator.start()
        self.verdicts: list[ExitStatus] = []
        self.members = [
            WorkerClient(
                self.address,
                SECRET,
                number,
                f"rank {number} on host-{number}",
                {},
                timeout,
                on_verdict=self.verdicts.append,
            )
            for number in range(count)
            if number not in absent
        ]

    def together(self, *outcomes: ExitStatus | None) -> list[ExitStatus | None]:
        """Return the verdicts for members that end with these outcomes at the same time."""
        verdicts: dict[int, ExitStatus | None] = {}

        def conclude(number: int, outcome: ExitStatus | None) -> None:
            verdicts[number] = self.members[number].conclude(outcome)

        threads = [threading.Thread(target=conclude, args=arguments) for arguments in enumerate(outcomes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [verdicts[number] for number in sorted(verdicts)]

    def verdict(self, number: int, seconds: float = 10.0) -> ExitStatus:
        """Wait for the verdict of a member that has not ended."""
        deadline = time.monotonic() + seconds
        while not (verdict := self.members[number].verdict):
            assert time.monotonic() < deadline, "no verdict"
            time.sleep(0.01)
        return verdict


@pytest.fixture
def run() -> Run:
    run = Run()
    assert [facts["name"] for facts in run.members[0].wait_for_all() or []] == [
        f"rank {n} on host-{n}" for n in range(3)
    ]
    return run


def error(message: str, code: int = INTERNAL_ERROR, *, follows: bool = False) -> ExitStatus:
    return ExitStatus(code, f"rlhf: error: {message}", math.inf if follows else time.time())


def test_failed_member_is_named_to_the_others(run: Run) -> None:
    verdict = run.members[1].conclude(error("KeyError: 'x'"))
    assert verdict and verdict.line == "rlhf: error: rank 1 on host-1: KeyError: 'x'"
    assert run.verdict(0).line == run.verdict(2).line == verdict.line
    assert len(run.verdicts) == 2


def test_cause_is_reported_instead_of_its_consequences(run: Run) -> None:
    lost = error("connection closed by peer", follows=True)
    verdicts = run.together(lost, error("no rows", USER_ERROR), lost)
    assert [(verdict.code, verdict.message) for verdict in verdicts if verdict] == 3 * [
        (USER_ERROR, "rank 1 on host-1: no rows")
    ]


def test_killed_member_is_the_cause_though_others_report_first(run: Run) -> None:
    lost = error("connection closed by peer", follows=True)
    run.members[2]._connection.shutdown(socket.SHUT_RDWR)  # as the kernel does with the connection of a process
    assert [verdict and verdict.message for verdict in run.together(lost, lost)] == 2 * [
        "rank 2 on host-2 exited and reported no error"
    ]


def test_interrupted_member_interrupts_the_others(run: Run) -> None:
    run.members[1].conclude(ExitStatus(INTERRUPTED, "rlhf: interrupted; saved", time.time()))
    assert (run.verdict(0).code, run.verdict(0).line) == (INTERRUPTED, "rlhf: interrupted; saved")


def test_member_that_ends_at_once_is_reported() -> None:
    run = Run(2, absent=(1,))
    hello = encode({"secret": SECRET, "number": 1, "name": "rank 1 on host-1", "facts": {}})
    with socket.create_connection(run.address) as other:
        other.sendall(hello + b'{"end": [2, "rlhf: error: no rows", false]}\n')
    assert run.verdict(0).message == "rank 1 on host-1: no rows"


def test_signal_after_a_failure_is_not_the_cause(run: Run) -> None:
    run.members[2]._connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.05)
    verdict = run.members[1].conclude(ExitStatus(INTERRUPTED, "rlhf: interrupted; by a signal", time.time()))
    assert verdict and verdict.message == "rank 2 on host-2 exited and reported no error"


def test_hanging_member_is_named_instead_of_those_that_waited(run: Run) -> None:
    timed_out = error("Timed out waiting 1800000ms for recv operation", follows=True)
    assert {verdict and verdict.message for verdict in run.together(timed_out, timed_out)} == {
        "rank 2 on host-2 hangs: the others waited for it for 30 s (engine.timeout); the stacks of ranks are in the "
        "run's folder, in stacks"
    }


def test_activity_of_the_hanging_member_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_SECONDS_TO_DESCRIBE", 0.1)
    run = Run(timeout=0.7)
    for number, member in enumerate(run.members):
        member._describe = lambda number=number: f"ppo step {number}"
    run.members[0].wait_for_all()
    run.members[0].progress = run.members[2].progress = 6
    message = run.verdict(0).message
    assert message.startswith(
        "rank 1 on host-1 hangs at ppo step 1: the others waited for it for 1 s (engine.timeout); "
    )
    assert run.verdict(0).time == 0, "its report is not waited for"


@pytest.mark.parametrize("places", [("a:1", "b:2", "b:2"), ("a:1", "a:1", "a:1")])
def test_members_that_wait_for_each_other_are_all_named(
    monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...]
) -> None:
    """Each is in another collective, which ends with a timeout; in one place, the network is to blame."""
    monkeypatch.setattr(coordinator, "_SECONDS_TO_DESCRIBE", 0.1)
    run = Run(timeout=0.5)
    for member, place in zip(run.members, places):
        member._describe = lambda place=place: place
    run.members[0].wait_for_all()
    time.sleep(0.8)
    timed_out = error("Timed out waiting 500ms for recv operation", follows=True)
    messages = {
        verdict and verdict.message.partition(";")[0] for verdict in run.together(timed_out, timed_out, timed_out)
    }
    (message,) = messages
    if len(set(places)) == 1:
        assert message == "Timed out waiting 500ms for recv operation"
    else:
        assert message == "the ranks waited for each other for 0 s (engine.timeout): rank 0 on host-0 at a:1"


def test_member_behind_the_others_hangs() -> None:
    run = Run(timeout=0.7)
    for member in run.members:
        member.progress = 5
    time.sleep(0.3)
    run.members[0].progress = run.members[2].progress = 6
    assert run.verdict(0).message.startswith("rank 1 on host-1 hangs: the others waited for it")


def test_stopped_process_hangs_though_it_is_not_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(timeout=0.5)
    run.members[0].wait_for_all()
    monkeypatch.setattr(run.members[1], "_send", lambda message: None)
    assert run.verdict(0).message.startswith("rank 1 on host-1 hangs")


@pytest.mark.parametrize("waits", [False, True])
def test_members_with_equal_progress_may_take_long(waits: bool) -> None:
    """All compile, or one works while the others wait without a limit."""
    run = Run(timeout=0.3)
    if waits:
        run.members[0].progress, run.members[1].is_waiting, run.members[2].is_waiting = 1, True, True
    time.sleep(1.0)
    assert run.verdicts == []
    assert run.together(None, None, None) == [None, None, None]


def test_missing_member_is_named() -> None:
    run = Run(timeout=0.5, absent=(1, 2))
    assert run.members[0].wait_for_all() is None
    verdict = run.members[0].verdict
    assert verdict and verdict.code == USER_ERROR
    assert (
        verdict.message
        == "rank 1, 2 of 3 did not connect within 0 s; start all of them, and check that they can reach the first"
    )


def test_missing_coordinator_is_an_error_after_the_timeout() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: no answer within 0 s"):
        WorkerClient(("127.0.0.1", port), SECRET, 1, "rank 1", {}, 0.3)


def test_lost_coordinator_is_reported() -> None:
    listener = listen("127.0.0.1")
    member_side: list[WorkerClient] = []
    connecting = threading.Thread(
        target=lambda: member_side.append(
            WorkerClient(("127.0.0.1", listener.getsockname()[1]), SECRET, 1, "rank 1", {}, 5, on_verdict=judged.append)
        )
    )
    judged: list[ExitStatus] = []
    connecting.start()
    connection, _ = listener.accept()
    connecting.join()
    connection.sendall(b'{"connected": [{"name": "rank 0 on host-0"}, {"name": "rank 1"}]}\n')
    assert member_side[0].wait_for_all()
    connection.close()
    deadline = time.monotonic() + 10
    while not judged:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert judged[0].message == "rank 0 on host-0 exited and reported no error"


def test_connection_of_another_program_is_closed(run: Run) -> None:
    for message in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"number": "1"}\n'):
        with socket.create_connection(run.address) as stranger:
            stranger.sendall(message)
            stranger.settimeout(5)
            assert not stranger.recv(10)
    assert run.together(None, None, None) == [None, None, None]


@pytest.mark.parametrize(
    ("number", "why"),
    [(1, "already connected"), (3, "there are 3, numbered from 0"), (-1, "there are 3, numbered from 0")],
)
def test_unexpected_member_is_refused_with_the_reason(number: int, why: str) -> None:
    """It may belong to another run at the same port; this run continues."""
    run = Run()
    assert all(member.wait_for_all() for member in run.members)
    other = WorkerClient(run.address, SECRET, number, "another", {}, 5.0)
    assert other.wait_for_all() is None
    assert other.verdict and other.verdict.code == USER_ERROR
    assert other.verdict.message == (
        f"unexpected rank {number}: {why}; give each process a unique rank and each run its own port"
    )
    assert run.together(None, None, None) == [None, None, None]


HELLO = {"secret": SECRET, "number": 1, "name": "rank 1", "facts": {}}
HOSTILE = {
    "deep JSON": b"[" * 60_000 + b"\n",
    "deep JSON in a message": b'{"facts": ' * 30_000 + b"\n",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "invalid UTF-8": b"\xff\xfe\n",
    "huge integer": b'{"number": ' + b"9" * 5000 + b"}\n",
    "endless line": b" " * (2**20 + 70_000),
    "a list": encode([1]),
    "end of wrong form": encode({"end": 5}),
    "end of wrong types": encode({"end": ["2", None, 0]}),
    "no progress": encode({"is_waiting": True}),
    "progress of wrong type": encode({"progress": "x"}),
    "a verdict": encode({"verdict": [2, "rlhf: error: do this"]}),
    "number of wrong type": encode({**HELLO, "number": [1]}),
    "number is true": encode({**HELLO, "number": True}),
    "facts of wrong type": encode({**HELLO, "facts": 1}),
    "name of wrong type": encode({**HELLO, "name": None}),
    "no secret": encode({name: value for name, value in HELLO.items() if name != "secret"}),
    "another secret": encode({**HELLO, "secret": "guessed"}),
    "lone surrogate": encode({**HELLO, "secret": "\ud800"}),
    "a hello without an end": b"x" * (coordinator._MAX_HELLO + 1),
    "another secret, and an end": encode({**HELLO, "secret": ""}, {"end": [2, "rlhf: error: do this", False]}),
}


def test_hostile_connections_do_not_take_part() -> None:
    """Not before the workers connect, when a place is free, and not later; a killed worker is still noticed."""
    run = Run(absent=(1,))
    for message in HOSTILE.values():
        attack(run.address, message)
    run.members.insert(
        1, WorkerClient(run.address, SECRET, 1, "rank 1 on host-1", {}, 5, on_verdict=run.verdicts.append)
    )
    assert all(member.wait_for_all(limit=10) for member in run.members)
    for message in HOSTILE.values():
        attack(run.address, message)
    assert run.coordinator.is_alive() and run.verdicts == []
    run.members[1]._connection.shutdown(socket.SHUT_RDWR)
    assert run.verdict(0).message == "rank 1 on host-1 exited and reported no error"


def test_ten_thousand_hostile_connections_change_nothing() -> None:
    """One after the other; the run ends as it would have."""
    run = Run()
    assert all(member.wait_for_all(limit=10) for member in run.members)
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(10_000 // len(HOSTILE) + 1):
        for message in HOSTILE.values():
            attack(run.address, message)
        for member in run.members:
            member.progress = number
    assert run.coordinator.is_alive() and run.verdicts == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + coordinator._MAX_STRANGERS
    assert run.together(None, None, None) == [None, None, None]


def attack(address: tuple[str, int], message: bytes) -> None:
    """Send a message to the coordinator, which closes the connection."""
    with socket.create_connection(address) as stranger:
        stranger.settimeout(5)
        try:
            stranger.sendall(message)
            while stranger.recv(4096):
                pass
        except ConnectionError:  # closed before the message was read
            pass


@pytest.mark.parametrize("message", [b"[" * 60_000 + b"\n", encode({"end": 5}), encode({"progress": "x"})])
def test_worker_with_invalid_messages_is_lost(run: Run, message: bytes) -> None:
    run.members[1]._connection.sendall(message)
    assert run.verdict(0).message == "rank 1 on host-1 exited and reported no error"


def test_worker_with_another_secret_is_told_so(run: Run) -> None:
    other = WorkerClient(run.address, "another", 1, "another", {}, 5.0)
    assert other.wait_for_all(limit=10) is None
    assert other.verdict == ExitStatus(
        USER_ERROR,
        "rlhf: error: RLHF_SECRET is not the one of rank 0; set it to the same text for all of them",
        math.inf,
    )
    assert run.together(None, None, None) == [None, None, None]


def test_silent_connections_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_MAX_STRANGERS", 10)
    strangers = [socket.create_connection(run.address) for _ in range(200)]
    for stranger in strangers[: -3 - 10]:
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
    assert run.together(None, None, None) == [None, None, None]
    for stranger in strangers:
        stranger.close()


def test_listen_uses_the_given_address_only() -> None:
    with listen("127.0.0.1") as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.getsockname()[1]), timeout=5)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads the open files of Linux")
def test_nothing_stays_open_or_running() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    run = Run()
    assert run.together(None, None, None) == [None, None, None]
    deadline = time.monotonic() + 5
    while True:
        # Negative if files or threads of earlier tests have closed since.
        more = len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1]
        if max(more) <= 0 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert max(more) <= 0, f"{more[0]} files and {more[1]} threads"
