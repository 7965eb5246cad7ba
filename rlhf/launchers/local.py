"""Run several processes of one run on this machine: `--ranks N`, also on each of several machines.

`spawn_ranks` runs a command line in N processes, each with its rank in the environment. They end together: the error of
the rank that failed first is reported, without the errors that it caused on the others. After a signal they may finish
their step and write a checkpoint; a second signal ends them at once. They do not outlive this process, however it ends.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from rlhf.errors import ConfigError
from rlhf.launchers import stacks
from rlhf.launchers.coordinator import WorkerClient, find_free_port
from rlhf.launchers.exit_status import INTERNAL_ERROR, INTERRUPTED, ExitStatus, find_root_cause, rank_name
from rlhf.launchers.multinode import NodeSpec, Rendezvous
from rlhf.utils import signals
from rlhf.utils.process_info import (
    RENDEZVOUS_VARIABLE,
    SECRET_VARIABLE,
    STATUS_FOLDER_VARIABLE,
    ProcessInfo,
    current_process,
)

_SECONDS_FOR_CAUSE = 3.0  # for the root cause to appear on another rank, after one has failed
_SECONDS_AFTER_SIGNAL = 30.0  # for the other ranks to end, after one has ended normally after a signal
_SECONDS_TO_CLEAN_UP = 20.0  # for the rank with the root cause to end, after another rank has reported a consequence
_SECONDS_AFTER_VERDICT = 8.0  # for the ranks of this machine to end, after those of another machine have failed
_SECONDS_FOR_STACKS = 0.5  # for ranks to write their stacks, before they are killed
# Exit codes of a rank after a signal: it ended after its step, or was killed before it handled signals.
_STOPPED = {INTERRUPTED, *(-number for number in signals.SIGNALS)}


def should_spawn(ranks: int | None) -> bool:
    """Return whether `ranks` processes must be started, because this process is not one of them.

    Raises:
        ConfigError: a launcher started another number of them.
    """
    process = current_process()
    if not process.launcher:
        return ranks is not None and ranks > 1
    if process.launcher != "rlhf" and ranks is not None and ranks != process.size:
        raise ConfigError(f"--ranks {ranks}: a launcher has already started {process.size}; omit --ranks")
    return False


def spawn_ranks(
    ranks: int,
    command: Sequence[str],
    *,
    debug: bool = False,
    rendezvous: Rendezvous | None = None,
    console: IO[bytes] | None = None,
) -> ExitStatus | None:
    """Run `command` as `ranks` processes and wait for them; signals that arrive here are passed on.

    The output of rank 0 is shown, that of the others with `debug` only.

    Args:
        ranks: the number of processes.
        command: the command line of each.
        debug: show the output of all ranks.
        rendezvous: the connection to the run's other machines; None if there are none.
        console: receives what ranks print, instead of this process's output.

    Returns:
        None if all succeeded, else how the run ended.

    Raises:
        KeyboardInterrupt: a signal arrived before the start.
    """
    signals_seen: list[int] = []
    with signals.handle_signals(signals_seen.append):
        signals.raise_if_interrupted()
        return _run_ranks(ranks, command, signals_seen, debug=debug, rendezvous=rendezvous, console=console)


def _run_ranks(
    ranks: int,
    command: Sequence[str],
    signals_seen: list[int],
    *,
    debug: bool,
    rendezvous: Rendezvous | None,
    console: IO[bytes] | None,
) -> ExitStatus | None:
    """Run `command` in ranks, as `spawn_ranks`; signals are added to `signals_seen`."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-ranks-"))
    node = rendezvous.node if rendezvous else NodeSpec(0, 1, "127.0.0.1", 0)
    port = rendezvous.port if rendezvous else find_free_port()
    secret = rendezvous.secret if rendezvous else secrets.token_hex()
    variables = {STATUS_FOLDER_VARIABLE: str(folder), SECRET_VARIABLE: secret}
    if rendezvous:
        variables[RENDEZVOUS_VARIABLE] = f"{node.host}:{node.port}"
    processes: dict[int, subprocess.Popen[bytes]] = {}
    for local in range(ranks):
        rank = node.number * ranks + local
        member = ProcessInfo(rank, node.count * ranks, local, ranks, node.number, node.host, port, "rlhf")
        log = folder / f"{rank}.log" if rank and not debug else None
        processes[rank] = _start_rank(command, {**os.environ, **member.variables(), **variables}, log, console)
    exit_codes = _wait(processes, signals_seen, folder, rendezvous.client if rendezvous else None)
    for process in processes.values():
        assert process.stdin
        process.stdin.close()
    is_ended_at_once = signals.end_at_once(signals_seen)
    if is_ended_at_once:  # ranks that the second signal ended before they were killed are interrupted as well
        exit_codes = {rank: code for rank, code in exit_codes.items() if code not in _STOPPED}
    statuses, kept = [], []
    for rank in processes:
        name = rank_name(rank) if rendezvous else f"rank {rank}"
        status = ExitStatus.read(folder, rank) if exit_codes.get(rank) != 0 else None
        if status and is_ended_at_once and status.time == math.inf:
            continue  # it only says that another rank has ended
        if status:
            statuses.append(status.prefix_with(name) if rendezvous else status)
        elif exit_codes.get(rank):
            log = folder / f"{rank}.log"
            kept += [log] if log.exists() and log.stat().st_size else []
            statuses.append(_describe_silent_end(name, exit_codes[rank], log if log in kept else None))
    _remove_all_but(kept, folder)
    if not statuses and len(exit_codes) < ranks:
        return ExitStatus(INTERRUPTED, "rlhf: interrupted at once; existing checkpoints are unchanged", time.time())
    return find_root_cause(statuses) if statuses else None


def rank_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs a rank of `rlhf` with these arguments.

    Unlike `python -m rlhf`, it does not put the working directory on Python's path: a random.py there would be imported
    instead of Python's.
    """
    root = str(Path(__file__).parents[2])
    script = (
        f"import sys; sys.path[:] = [path for path in sys.path if path] + [{root!r}]; "
        "from rlhf.cli import main; main(ends_with_launcher=True)"
    )
    return [sys.executable, "-c", script, *arguments]


def end_with_launcher() -> None:
    """End this rank when the process that started it has ended, for whatever reason.

    Standard input is a pipe that no process writes to; the kernel closes it when the launcher ends.
    """

    def watch() -> None:
        os.read(0, 1)
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _start_rank(
    command: Sequence[str], environment: dict[str, str], log_path: Path | None, console: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    log = log_path.open("wb") if log_path else None
    output = log or console
    try:
        # In a separate session, so that Ctrl-C reaches the rank once, through this process.
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    finally:
        if log:
            log.close()


def _wait(
    processes: dict[int, subprocess.Popen[bytes]], signals_seen: list[int], folder: Path, client: WorkerClient | None
) -> dict[int, int]:
    """Wait for the processes, pass signals on, and kill processes that do not end in time.

    Returns:
        The exit codes of the others by rank.
    """
    deadline, passed = math.inf, 0
    while any(process.poll() is None for process in processes.values()):
        if signals.end_at_once(signals_seen) or time.monotonic() >= deadline:
            break
        if signals_seen and not passed:
            print("rlhf: ending after this step and its checkpoint; interrupt again to end at once", file=sys.stderr)
        for number in signals_seen[passed:]:
            _pass_signal(number, processes.values())
            passed += 1
        codes = {rank: code for rank, process in processes.items() if (code := process.poll()) is not None}
        failed = [ExitStatus.read(folder, rank) for rank, code in codes.items() if code != 0 and code not in _STOPPED]
        # A rank that reports a consequence is not the cause; the rank with the root cause may still be cleaning up.
        if not all(status and status.time == math.inf for status in failed):
            deadline = min(deadline, time.monotonic() + _SECONDS_FOR_CAUSE)
        elif failed:
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_CLEAN_UP)
        elif any(codes.values()) or (codes and signals_seen):
            deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_SIGNAL)
        if client and client.verdict:  # of another machine; the ranks here receive it too
            deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_VERDICT)
        time.sleep(0.05)
    codes = {rank: code for rank, process in processes.items() if (code := process.poll()) is not None}
    late = [process for process in processes.values() if process.poll() is None]
    if late and not signals.end_at_once(signals_seen):
        for process in late:
            process.send_signal(stacks.SIGNAL)
        time.sleep(_SECONDS_FOR_STACKS)
    for process in late:
        process.kill()
        process.wait()
    return codes


def _pass_signal(number: int, processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ask each process to end after its step.

    SIGINT and SIGTERM are passed on as SIGUSR1: a scheduler may send SIGTERM to each process of a job, and ranks take a
    second one as a request to end at once. In the background of a shell SIGINT is ignored, and child processes inherit
    that.
    """
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGHUP if number == signal.SIGHUP else signal.SIGUSR1)


def _remove_all_but(kept: Sequence[Path], folder: Path) -> None:
    """Remove a folder, or its other files if logs that an error names are kept."""
    for path in folder.iterdir():
        if path not in kept:
            path.unlink()
    if not kept:
        folder.rmdir()


def _describe_silent_end(name: str, code: int, log: Path | None) -> ExitStatus:
    """Return the status of a rank that ended without a report; `log` has its output."""
    if code in _STOPPED:
        return ExitStatus(INTERRUPTED, "rlhf: interrupted; nothing was started", time.time())
    how = f"exited with code {code}"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
        how += ", often for lack of memory," if code == -signal.SIGKILL else ""
    output = f"; its output is in {log}" if log else ""
    # Time 0: this rank is the cause of what the other ranks report, not a consequence.
    return ExitStatus(INTERNAL_ERROR, f"rlhf: error: {name} {how} and reported no error{output}", 0.0)
