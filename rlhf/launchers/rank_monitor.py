"""The ranks of a run end together, also on several machines: each tells the others how it ends
(`rlhf.launchers.coordinator`).

`monitor_ranks` connects a rank with the others for the time of a block. An exception of the block flows out as it is
where it is the cause; where it only shows that another rank is gone, the other's own words flow out instead. A rank
that is stuck in a collective, which nothing can interrupt, is ended.
"""

from __future__ import annotations

import fcntl
import ipaddress
import itertools
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from rlhf.errors import ConfigError, RemoteRankError
from rlhf.launchers.coordinator import Coordinator, WorkerClient
from rlhf.launchers.exit_status import INTERRUPTED, ExitStatus, rank_name
from rlhf.launchers.sockets import connect_with_retry, listen
from rlhf.utils.process_info import ProcessInfo

_SESSIONS = itertools.count()  # the same on all ranks; the store outlives a session
_stores: dict[tuple[str, int], dist.Store] = {}  # until the process ends: some ranks begin the next session early
_SECONDS_TO_LEAVE = 5.0  # for the main thread to find out by itself that another rank is gone
# What collectives say where another rank is gone or late, by the libraries that raise a RuntimeError for it.
_LOST = re.compile(r"connection (?:was )?(?:closed|reset|refused)|broken pipe|timed? ?out|peer|remote process", re.I)


@contextmanager
def monitor_ranks(place: ProcessInfo, timeout: float) -> Iterator[WorkerClient | None]:
    """Connect this rank with the others while the block runs; None where there are no others.

    Args:
        timeout: seconds that ranks wait for each other.

    Raises:
        ConfigError: the machine of rank 0 does not answer, or its address or port cannot be used.
        RemoteRankError: another rank is the cause of what the block raised, or failed where this one did not.
    """
    if place.size == 1:
        yield None
        return
    assert place.address and place.port
    left = threading.Event()

    def leave(verdict: ExitStatus) -> None:
        if not left.wait(_SECONDS_TO_LEAVE):
            os._exit(verdict.report())

    address = _hub(store(place, timeout), place, timeout)
    member = WorkerClient(address, place.rank, rank_name(place.rank), {}, timeout, judged=leave)
    try:
        if member.met() is None:
            raise RemoteRankError("the ranks did not come together")
        yield member
    except BaseException as error:
        follows = isinstance(error, RemoteRankError) or (isinstance(error, RuntimeError) and _is_loss(error))
        verdict = member.conclude(ExitStatus.summarize(error, follows=follows))
        # Some launchers send signals to all where one has failed.
        interrupted = isinstance(error, KeyboardInterrupt) and verdict and verdict.code != INTERRUPTED
        if verdict and (follows or interrupted):
            raise RemoteRankError(verdict.message, verdict.code) from error
        raise
    else:
        if verdict := member.conclude(None):
            raise RemoteRankError(verdict.message, verdict.code)
    finally:
        left.set()


def _is_loss(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or bool(_LOST.search(str(error)))


def store(place: ProcessInfo, timeout: float) -> dist.Store:
    """What all ranks can read and write, where their launcher makes them meet; one for all sessions of a process.

    Raises:
        ConfigError: as `monitor_ranks`.
    """
    assert place.address and place.port
    where = (place.address, place.port)
    if where not in _stores:
        _stores[where] = _connected(place, timeout)
    _stores[where].set_timeout(timedelta(seconds=timeout))
    return _stores[where]


def _connected(place: ProcessInfo, timeout: float) -> dist.Store:
    assert place.address and place.port
    launcher_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = place.rank == 0 and not launcher_listens
    if not serves:  # torch's own message names neither what is missing nor what to do
        connect_with_retry((place.address, place.port), timeout).close()
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(
            place.address, place.port, place.size, serves, limit, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{place.address}:{place.port}: the ranks cannot meet there ({why}); "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        ) from error


def _hub(store: dist.Store, place: ProcessInfo, timeout: float) -> tuple[str, int]:
    """Where the hub listens; on rank 0 it is started."""
    assert place.address and place.port
    mine = _own_address(place.address, place.port)
    _choose_network(mine)
    key = f"rlhf/hub/{next(_SESSIONS)}"
    if place.rank == 0:
        listener = listen(mine)
        Coordinator(listener, place.size, "rank", timeout, places=True).start()
        store.set(key, json.dumps([mine, listener.getsockname()[1]]))
    host, port = json.loads(store.get(key))
    return host, port


def _own_address(host: str, port: int) -> str:
    """This machine's address on the network that leads to `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _choose_network(address: str) -> None:
    """Let gloo use the network of `address`: by itself it takes what the host's own name leads to, often 127.0.1.1."""
    if ipaddress.ip_address(address).is_loopback or ":" in address or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                os.environ["GLOO_SOCKET_IFNAME"] = name
