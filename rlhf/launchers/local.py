"""Several processes of one run on this machine: what `--ranks N` does, on each of several machines too.

A command line flows in; N processes of it run, each with its rank in the environment. They end together, and
the one that failed first decides how: its line is reported, not the noise of those that it brought down. After a
signal they have all the time that their step and its checkpoint take; a second one ends them at once. They do not
outlive this process, however it ends.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rlhf.errors import ConfigError
from rlhf.launchers.coordinator import WorkerClient
from rlhf.launchers.exit_status import DEFECT, INTERRUPTED, ExitStatus, find_root_cause, rank_name
from rlhf.launchers.multinode import NodeSpec, Rendezvous, free_port
from rlhf.utils import signals
from rlhf.utils.process_info import FOLDER_VARIABLE, RENDEZVOUS_VARIABLE, ProcessInfo, current_process

_SECONDS_TO_FAIL = 3.0  # for a cause to show on another rank, once one has failed
_SECONDS_TO_FOLLOW = 30.0  # for the others to end, once one has ended as it should after a signal
_SECONDS_TO_TIDY = 20.0  # for the cause to end, once another rank says that it only followed
_SECONDS_TO_LEAVE = 8.0  # for the ranks of this machine to end, once another machine's have failed
# Exit codes of a rank that was asked to end: after its step, or by a signal before anything was started.
_STOPPED = {INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP}


def should_spawn(ranks: int | None) -> bool:
    """Whether `ranks` processes have to be started, rather than this one being a rank already.

    Raises:
        ConfigError: a launcher started another number of them.
    """
    place = current_process()
    if not place.launcher:
        return ranks is not None and ranks > 1
    if place.launcher != "rlhf" and ranks is not None and ranks != place.size:
        raise ConfigError(f"--ranks {ranks}: a launcher has started {place.size} already; leave --ranks out")
    return False


def spawn_ranks(
    ranks: int,
    command: Sequence[str],
    *,
    debug: bool = False,
    among: tuple[NodeSpec, Rendezvous] | None = None,
    console: IO[bytes] | None = None,
) -> ExitStatus | None:
    """Run `command` as `ranks` processes and wait for them; signals that arrive here are passed on.

    Rank 0 talks; what the others print is shown with `debug` only.

    Args:
        among: which of several machines this is, which have met.
        console: takes what ranks print, in place of this process's output.

    Returns:
        None if all succeeded, else how the run ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="rlhf-ranks-"))
    places = _places(ranks, *among) if among else _places(ranks)
    shared = {FOLDER_VARIABLE: str(folder)}
    if among:
        shared[RENDEZVOUS_VARIABLE] = f"{among[0].host}:{among[0].port}"
    quiet = [bool(place.rank) and not debug for place in places]
    processes = [_start_rank(*each, command, folder, shared, console) for each in zip(places, quiet)]
    with _passing_signals_to(processes) as arrived:
        ended = _wait(processes, [place.rank for place in places], arrived, folder, among and among[1].member)
    for process in processes:
        assert process.stdin
        process.stdin.close()
    names = {place.rank: rank_name(place.rank) if among else f"rank {place.rank}" for place in places}
    left = {rank: ExitStatus.read(folder, rank) for rank in names if ended.get(rank) != 0}
    outcomes = [outcome.prefix_with(names[rank]) if among else outcome for rank, outcome in left.items() if outcome]
    silent = [rank for rank, outcome in left.items() if not outcome and rank in ended]
    if not silent:
        shutil.rmtree(folder, ignore_errors=True)
    outcomes += [_unexplained(names[rank], ended[rank], folder / f"{rank}.log") for rank in silent]
    if not outcomes and len(ended) < ranks:
        return ExitStatus(INTERRUPTED, "rlhf: interrupted at once; checkpoints that were there stay", time.time())
    return find_root_cause(outcomes) if outcomes else None


def rank_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a rank of `rlhf` with these arguments.

    Unlike with `python -m rlhf`, modules of the user's working directory are not found before those of Python: a
    random.py there would be imported for Python's own.
    """
    home = str(Path(__file__).parents[2])
    start = (
        f"import sys; sys.path[:] = [path for path in sys.path if path] + [{home!r}]; "
        "from rlhf.launchers.local import end_with_launcher; end_with_launcher(); from rlhf.cli import main; main()"
    )
    return [sys.executable, "-c", start, *arguments]


def end_with_launcher() -> None:
    """End this rank when the process that started it has ended, however that was.

    Standard input is a pipe that nobody writes to; the kernel closes it with the launcher's last breath.
    """

    def watch() -> None:
        os.read(0, 1)
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _places(ranks: int, machine: NodeSpec | None = None, meeting: Rendezvous | None = None) -> list[ProcessInfo]:
    """Those of the processes to start on this machine."""
    number, count = (machine.number, machine.count) if machine else (0, 1)
    host, port = (machine.host, meeting.port) if machine and meeting else ("127.0.0.1", free_port())
    first, size = number * ranks, count * ranks
    return [ProcessInfo(first + local, size, local, ranks, number, host, port, "rlhf") for local in range(ranks)]


def _start_rank(
    place: ProcessInfo,
    quiet: bool,
    command: Sequence[str],
    folder: Path,
    shared: dict[str, str],
    console: IO[bytes] | None,
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **place.variables(), **shared}
    log = (folder / f"{place.rank}.log").open("wb") if quiet else None
    output = log or console
    try:
        # A session of their own: Ctrl-C then reaches the ranks once, through this process.
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    finally:
        if log:
            log.close()


def _wait(
    processes: list[subprocess.Popen[bytes]],
    ranks: list[int],
    arrived: list[int],
    folder: Path,
    member: WorkerClient | None,
) -> dict[int, int]:
    """Exit codes by rank, of the processes that ended by themselves."""
    deadline, said = math.inf, False
    while any(process.poll() is None for process in processes) and len(arrived) < 2 and time.monotonic() < deadline:
        if arrived and not said:
            said = True
            print("rlhf: ending after this step and its checkpoint; interrupt again to end at once", file=sys.stderr)
        codes = {rank: process.returncode for rank, process in zip(ranks, processes) if process.poll() is not None}
        failed = [rank for rank, code in codes.items() if code != 0 and code not in _STOPPED]
        if not all(_follows(rank, folder) for rank in failed):
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_FAIL)
        elif failed:
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_TIDY)
        elif any(codes.values()) or (codes and arrived):
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_FOLLOW)
        if member and member.verdict:  # of another machine; the ranks learn it from its ranks
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_LEAVE)
        time.sleep(0.05)
    ended = {rank: process.returncode for rank, process in zip(ranks, processes) if process.returncode is not None}
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    return ended


def _follows(rank: int, folder: Path) -> bool:
    """Whether a rank says that it only ended with another, which may still be tidying up."""
    outcome = ExitStatus.read(folder, rank)
    return outcome is not None and outcome.time == math.inf


@contextmanager
def _passing_signals_to(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """The signals that have arrived, repeated hang-ups left out; each process is asked to end then."""
    arrived: list[int] = []

    def receive(number: int) -> None:
        if not arrived or signals.ends_at_once(arrived, number):
            arrived.append(number)
        for process in processes:
            if process.poll() is None:
                # Not SIGINT: in the background of a shell that is ignored, and what this process starts inherits it.
                process.send_signal(number if number == signal.SIGHUP else signal.SIGTERM)

    with signals.handle_signals(receive):
        yield arrived


def _unexplained(name: str, code: int, log: Path) -> ExitStatus:
    if code in _STOPPED:
        return ExitStatus(INTERRUPTED, "rlhf: interrupted; nothing was started", time.time())
    how = f"exit code {code}"
    if code < 0:
        how = signal.Signals(-code).name + (", often for lack of memory" if code == -signal.SIGKILL else "")
    where = f"; its output is in {log}" if log.exists() else ""
    # Time 0: a process that ends without a word is the cause of what the other ranks report, not a consequence.
    return ExitStatus(DEFECT, f"rlhf: error: {name} ended without a word ({how}){where}", 0.0)
