"""Run on several machines: `--nodes N --node-rank R --rendezvous HOST:PORT`.

The user starts `rlhf` on each machine. The launchers connect to the first machine, exchange what they need to start
their ranks, stay connected while these run, and end with the same status. torch's elastic agent does the same for
`torchrun`, but up to torch 2.11, which is the newest that some vendors support, it kills ranks thirty seconds after a
signal, and a step and its checkpoint may take longer. torch 2.13 has `--shutdown-timeout` and
TORCH_ELASTIC_SHUTDOWN_TIMEOUT for that (https://github.com/pytorch/pytorch/pull/172596). The agent would also import
torch into the launcher, and with it runtimes that occupy a device when they are imported.

The launchers recognize each other by a secret: RLHF_SECRET, or else a random one that the first machine leaves in the
run's folder, which all machines share, until they have met.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf.errors import ConfigError, RemoteRankError, RunError
from rlhf.launchers.coordinator import (
    Coordinator,
    WorkerClient,
    connect_with_retry,
    find_free_port,
    is_loopback,
    listen,
)
from rlhf.launchers.exit_status import ExitStatus, Interrupted
from rlhf.utils.process_info import SECRET_FILE, SECRET_VARIABLE, current_process
from rlhf.version import __version__

# For the other machines to connect. Then a note says which machines are missing; a refusal is no longer sent to them.
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_APPEAR = 10.0  # for a file of the first machine, on a network file system


@dataclass(frozen=True)
class NodeSpec:
    """One of the machines of a run, and the address of their rendezvous: `host` and `port` of the first."""

    number: int
    count: int
    host: str
    port: int


def resolve_node(nodes: int | None, node_rank: int | None, rendezvous: str | None) -> NodeSpec | None:
    """Return this machine and the rendezvous; None if there is no other machine, or if this process is already a rank.

    If a launcher started one process on each machine (`srun --ntasks-per-node=1`), it provides options that are not
    given.

    Raises:
        ConfigError: options are missing, or contradict each other or the launcher.
    """
    process = current_process()
    if process.launcher == "rlhf":
        return None
    if nodes is None:
        for option, value in {"--node-rank": node_rank, "--rendezvous": rendezvous}.items():
            if value is not None:
                raise ConfigError(f"{option}: is for several machines; set their number with --nodes")
        return None
    if nodes == 1 and node_rank is None and rendezvous is None:
        return None
    if process.launcher and process.size != nodes:
        raise ConfigError(
            f"--nodes {nodes}: {process.launcher} has started {process.size} processes; let it start one on each "
            "machine, or omit --nodes"
        )
    if process.launcher and node_rank is None:
        node_rank = process.rank
    if process.launcher and rendezvous is None:
        rendezvous = f"{process.address}:{process.port}"
    if node_rank is None or rendezvous is None:
        option = "--node-rank" if node_rank is None else "--rendezvous"
        value = f"this machine's number, 0 to {nodes - 1}" if node_rank is None else "HOST:PORT of machine 0"
        raise ConfigError(f"--nodes {nodes}: also needs {option}, {value}")
    if node_rank >= nodes:
        raise ConfigError(f"--node-rank {node_rank}: must be from 0 to {nodes - 1}, with --nodes {nodes}")
    address = re.fullmatch(r"\[?([^\[\]]+)\]?:(\d{1,5})", rendezvous)
    if not address or not 0 < int(address[2]) < 2**16:
        raise ConfigError(
            f"--rendezvous {rendezvous}: must be HOST:PORT; give the address of machine 0 and a free port there"
        )
    return NodeSpec(node_rank, nodes, address[1], int(address[2])) if nodes > 1 else None


@contextmanager
def serve_rendezvous(node: NodeSpec, folder: Path, timeout: float) -> Iterator[None]:
    """Let the other machines connect to this one, the first; while the block runs, they find the secret in `folder`.

    Raises:
        ConfigError: the port cannot be used.
        RunError: the folder cannot be written.
    """
    # The host may be a name or an address that only other machines use for this one.
    every_network = "::" if ":" in node.host else ""
    with _provide_secret(folder) as secret:
        try:
            listener = listen(node.host if is_loopback(node.host) else every_network, node.port)
        except OSError as error:
            raise ConfigError(
                f"--rendezvous {node.host}:{node.port}: cannot bind: {os.strerror(error.errno or 0)}; "
                "choose another port, the same on all machines"
            ) from error
        Coordinator(listener, secret, node.count, "machine", timeout).start()
        yield


@contextmanager
def _provide_secret(folder: Path) -> Iterator[str]:
    """Yield the secret that the user has set, or else a random one, which is in a file while the block runs."""
    if given := os.environ.get(SECRET_VARIABLE):
        yield given
        return
    secret = secrets.token_hex()
    path, is_new = folder / SECRET_FILE, not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a process that was killed
        # O_EXCL follows no link either.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secret)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); choose another --output, or set {SECRET_VARIABLE} to the "
            "same random text on all machines"
        ) from error
    try:
        yield secret
    finally:
        path.unlink(missing_ok=True)
        if is_new and not os.listdir(folder):
            folder.rmdir()


def _find_secret(node: NodeSpec, folder: Path, timeout: float) -> str:
    """Return the secret that the user has set, or else the one that the first machine has left in `folder`.

    Raises:
        ConfigError: the first machine does not answer within `timeout` seconds, or its file cannot be read.
    """
    if secret := os.environ.get(SECRET_VARIABLE):
        return secret
    connect_with_retry((node.host, node.port), timeout).close()  # the first machine has written its file by now
    path, reason = folder / SECRET_FILE, os.strerror(errno.ENOENT)
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while True:
        try:
            os.listdir(folder)  # makes a network file system ask the server again
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a writer
            with open(os.open(path, flags), encoding="utf-8", errors="replace") as file:
                return file.read(1000)
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path}: the secret of machine 0 cannot be read ({reason}); choose an --output that all machines "
                f"share, or set {SECRET_VARIABLE} to the same random text on all of them"
            )
        time.sleep(0.2)


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous.

    Attributes:
        node: this machine.
        client: the connection to the coordinator, which stays open.
        port: the port of the first machine at which ranks connect.
        secret: the secret of the ranks.
        is_pending: there is something to run.
    """

    node: NodeSpec
    client: WorkerClient
    port: int
    secret: str
    is_pending: bool


def join_rendezvous(
    node: NodeSpec,
    folder: Path,
    ranks: int,
    timeout: float,
    *,
    is_pending: bool = True,
    refusal: ExitStatus | None = None,
) -> Rendezvous:
    """Wait for the other machines.

    Args:
        folder: the run's folder, which all machines share.
        ranks: processes on this machine.
        is_pending: on the first machine, True if there is something to run.
        refusal: on the first machine, the reason why the run is refused.

    Raises:
        ConfigError: a machine has not connected within `timeout` seconds, or was started with other settings; or the
            secret cannot be read.
        RemoteRankError: another machine refused.
        Interrupted: Ctrl-C, while this machine waits.
    """
    facts = {
        "ranks": ranks,
        "version": __version__,
        "port": find_free_port(),
        "secret": secrets.token_hex(),
        "is_pending": is_pending,
        "refusal": [refusal.code, refusal.line] if refusal else None,
    }
    name = f"machine {node.number} ({socket.gethostname()})"
    note = f"rlhf: note: waiting for the other machines at {node.host}:{node.port}"
    timer = threading.Timer(_SECONDS_TO_CONNECT, print, [note], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        secret = _find_secret(node, folder, timeout)
        client = WorkerClient((node.host, node.port), secret, node.number, name, facts, timeout)
        machines = client.wait_for_all(limit=_SECONDS_TO_CONNECT if refusal else None)
    except KeyboardInterrupt as error:
        raise Interrupted("nothing was started") from error
    finally:
        timer.cancel()
    if machines is None:
        verdict = client.verdict
        raise RemoteRankError(verdict.message if verdict else "refused", verdict.code if verdict else 1)
    if first_refusal := machines[0]["refusal"]:
        raise RemoteRankError(ExitStatus(first_refusal[0], first_refusal[1], 0).message, first_refusal[0])
    for fact, label in {"ranks": "--ranks", "version": "versions of rlhf"}.items():
        if len({machine[fact] for machine in machines}) > 1:
            values = ", ".join(f"{machine[fact]} on {machine['name']}" for machine in machines)
            raise ConfigError(f"machines were started with different {label}: {values}; start all with the same")
    return Rendezvous(node, client, machines[0]["port"], machines[0]["secret"], machines[0]["is_pending"])
