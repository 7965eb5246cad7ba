"""Several machines of one run: what `--nodes N --node-rank R --rendezvous HOST:PORT` does.

`rlhf` is started on each machine. The launchers meet at the address of the first, learn of each other what they need to
start their ranks, stay connected while these run, and end with one verdict. torch's elastic agent, which does as much
for `torchrun`, gives ranks thirty seconds after a signal, where a step and its checkpoint may take longer; it would
also bring torch into the launcher, and with it runtimes that take a device for themselves when they are imported.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from dataclasses import dataclass

from rlhf.errors import ConfigError, RemoteRankError
from rlhf.launchers.coordinator import Coordinator, WorkerClient
from rlhf.launchers.exit_status import ExitStatus, Interrupted
from rlhf.launchers.sockets import listen
from rlhf.utils.process_info import current_process
from rlhf.version import __version__

_SECONDS_TO_HEAR = 10.0  # for the other machines to come, so that they learn why there will be no run


@dataclass(frozen=True)
class NodeSpec:
    """One of the machines of a run, and where they meet: at `host` and `port` of the first."""

    number: int
    count: int
    host: str
    port: int


def resolve_node(nodes: int | None, node_rank: int | None, rendezvous: str | None) -> NodeSpec | None:
    """Which machine this is; None where there is no other, or where this process is a rank already.

    A launcher that started one process on each machine (`srun --ntasks-per-node=1`) says what is not given.

    Raises:
        ConfigError: options are missing, or contradict each other or the launcher.
    """
    place = current_process()
    if place.launcher == "rlhf":
        return None
    if nodes is None:
        given = {"--node-rank": node_rank, "--rendezvous": rendezvous}
        if found := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{found[0]}: is for several machines; say with --nodes how many there are")
        return None
    if nodes == 1 and node_rank is None and rendezvous is None:
        return None
    if place.launcher and place.size != nodes:
        raise ConfigError(
            f"--nodes {nodes}: {place.launcher} has started {place.size} processes; let it start one on each machine, "
            "or leave --nodes out"
        )
    if place.launcher and node_rank is None:
        node_rank = place.rank
    if place.launcher and rendezvous is None:
        rendezvous = f"{place.address}:{place.port}"
    if node_rank is None or rendezvous is None:
        missing = "--node-rank" if node_rank is None else "--rendezvous"
        what = f"which of them this is, 0 to {nodes - 1}" if node_rank is None else "HOST:PORT of the first"
        raise ConfigError(f"--nodes {nodes}: needs {missing} too, {what}")
    if node_rank >= nodes:
        raise ConfigError(
            f"--node-rank {node_rank}: of {nodes} machines the last is {nodes - 1}; machines count from 0"
        )
    address = re.fullmatch(r"\[?([^\[\]]+)\]?:(\d{1,5})", rendezvous)
    if not address or not 0 < int(address[2]) < 2**16:
        raise ConfigError(f"--rendezvous {rendezvous}: is not HOST:PORT; give the address of machine 0 and a free port")
    return NodeSpec(node_rank, nodes, address[1], int(address[2])) if nodes > 1 else None


def serve_rendezvous(machine: NodeSpec, timeout: float) -> None:
    """On the first machine, let the others come.

    Raises:
        ConfigError: the port cannot be had.
    """
    try:
        listener = listen(machine.host, machine.port)
    except OSError as error:
        raise ConfigError(
            f"--rendezvous {machine.host}:{machine.port}: cannot be listened at ({os.strerror(error.errno or 0)}); "
            "choose another port, the same on all machines"
        ) from error
    Coordinator(listener, machine.count, "machine", timeout).start()


@dataclass(frozen=True)
class Rendezvous:
    """What came of meeting: the connection that stays, where the ranks meet, and whether there is something to run."""

    member: WorkerClient
    port: int
    needed: bool


def join_rendezvous(
    machine: NodeSpec, ranks: int, timeout: float, *, needed: bool = True, refusal: ExitStatus | None = None
) -> Rendezvous:
    """Wait for the other machines.

    Args:
        ranks: processes on this machine.
        needed, refusal: what the first machine knows: that there is something to run, or why there will be no run.

    Raises:
        ConfigError: a machine has not come within `timeout` seconds, or was started in another way.
        RemoteRankError: another machine refused.
        Interrupted: Ctrl-C, while this one waits.
    """
    refused = [refusal.code, refusal.line] if refusal else None
    facts = {"ranks": ranks, "version": __version__, "port": free_port(), "needed": needed, "refused": refused}
    name = f"machine {machine.number} ({socket.gethostname()})"
    waiting = f"rlhf: note: waiting for the other machines at {machine.host}:{machine.port}"
    note = threading.Timer(_SECONDS_TO_HEAR, print, [waiting], {"file": sys.stderr})
    note.daemon = True
    note.start()
    try:
        member = WorkerClient((machine.host, machine.port), machine.number, name, facts, timeout)
        found = member.met(limit=_SECONDS_TO_HEAR if refusal else None)
    except KeyboardInterrupt as error:
        raise Interrupted("nothing was started") from error
    finally:
        note.cancel()
    if found is None:
        verdict = member.verdict
        raise RemoteRankError(verdict.message if verdict else "refused", verdict.code if verdict else 1)
    if refused := found[0]["refused"]:
        raise RemoteRankError(ExitStatus(refused[0], refused[1], 0).message, refused[0])
    for fact, what in {"ranks": "--ranks", "version": "versions of rlhf"}.items():
        if len({known[fact] for known in found}) > 1:
            values = ", ".join(f"{known[fact]} on {known['name']}" for known in found)
            raise ConfigError(f"machines were started with different {what}: {values}; start all with the same")
    return Rendezvous(member, found[0]["port"], found[0]["needed"])


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
