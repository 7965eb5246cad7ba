"""End the ranks of a run together, also on several machines: each reports to a coordinator how it ends.

`monitor_ranks` connects a rank with the others for the duration of a block. If an exception of the block is the root
cause, it is raised unchanged; if it is a consequence of another rank's failure, the other rank's message is raised
instead. A rank that hangs in a collective cannot be interrupted, so its process is ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from rlhf.errors import ConfigError, RemoteRankError
from rlhf.launchers.coordinator import Coordinator, WorkerClient, connect_with_retry, is_loopback, listen
from rlhf.launchers.exit_status import INTERRUPTED, ExitStatus, rank_name
from rlhf.launchers.stacks import write_stacks
from rlhf.utils import signals
from rlhf.utils.activity import describe_activity
from rlhf.utils.process_info import SECRET_VARIABLE, STATUS_FOLDER_VARIABLE, ProcessInfo

# A process keeps its stores until it ends, because other ranks may start the next session while this one ends.
_stores: dict[tuple[str, int], Store] = {}
_SECONDS_TO_LEAVE = 5.0  # for the main thread to notice that another rank has ended
# Messages of collectives if another rank has ended or is late, from libraries that raise a RuntimeError.
_LOST = re.compile(r"connection (?:was )?(?:closed|reset|refused)|broken pipe|timed? ?out|peer|remote process", re.I)


@contextmanager
def monitor_ranks(process: ProcessInfo, timeout: float) -> Iterator[WorkerClient | None]:
    """Connect this rank with the others while the block runs; yield None if there are no others.

    Args:
        timeout: seconds that ranks wait for each other.

    Raises:
        ConfigError: the machine of rank 0 does not answer, or its address or port cannot be used.
        RemoteRankError: another rank is the cause of what the block raised, or failed although this one did not.
    """
    if process.size == 1:
        yield None
        return
    has_left = threading.Event()

    def leave(verdict: ExitStatus) -> None:
        if not has_left.wait(_SECONDS_TO_LEAVE):
            write_stacks()
            os._exit(verdict.report())

    address, secret = _connect_coordinator(get_store(process, timeout), process, timeout)
    client = WorkerClient(
        address,
        secret,
        process.rank,
        rank_name(process.rank),
        {},
        timeout,
        on_verdict=leave,
        describe=describe_activity,
    )
    try:
        if client.wait_for_all() is None:
            raise RemoteRankError("the ranks could not connect to each other")
        yield client
    except BaseException as error:
        follows = isinstance(error, RemoteRankError) or (isinstance(error, RuntimeError) and _is_loss(error))
        # Some launchers send a signal to all ranks after one has failed; a second signal counts.
        with signals.collect_signals():
            verdict = client.conclude(ExitStatus.summarize(error, follows=follows))
        is_echo = isinstance(error, KeyboardInterrupt) and verdict and verdict.code != INTERRUPTED
        if verdict and (follows or is_echo):
            raise RemoteRankError(verdict.message, verdict.code) from error
        raise
    else:
        with signals.collect_signals():
            verdict = client.conclude(None)
        if verdict:
            raise RemoteRankError(verdict.message, verdict.code)
    finally:
        has_left.set()


def _is_loss(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or bool(_LOST.search(str(error)))


def get_store(process: ProcessInfo, timeout: float) -> Store:
    """Return the store that all ranks read and write; one for all sessions of a process.

    Ranks that our launcher started on one machine use a file in its private folder: a port is open to other users.

    Raises:
        ConfigError: as for `monitor_ranks`.
    """
    assert process.address and process.port
    address = (process.address, process.port)
    if address not in _stores:
        if process.launcher == "rlhf" and process.local_size == process.size:
            _stores[address] = FileStore(str(Path(os.environ[STATUS_FOLDER_VARIABLE], "store")), process.size)
        else:
            _stores[address] = _connect_store(process, *address, timeout)
    _stores[address].set_timeout(timedelta(seconds=timeout))
    return _stores[address]


def _connect_store(process: ProcessInfo, host: str, port: int, timeout: float) -> Store:
    launcher_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_server = process.rank == 0 and not launcher_listens
    if not is_server:  # torch's message names neither the cause nor a remedy
        connect_with_retry((host, port), timeout).close()
    limit = timedelta(seconds=timeout)
    try:
        # By itself, the store listens on every network.
        descriptor = listen(host, port).detach() if is_server and is_loopback(host) else None
        return TCPStore(
            host,
            port,
            process.size,
            is_server,
            limit,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=descriptor,
        )
    except (dist.DistError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{host}:{port}: the ranks cannot meet there ({reason}); "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        ) from error


def _connect_coordinator(store: Store, process: ProcessInfo, timeout: float) -> tuple[tuple[str, int], str]:
    """Return the address of the coordinator and its secret; rank 0 starts it.

    Launchers that know no secret leave it to the store, which any process that reaches it can read.
    """
    assert process.address and process.port
    own_address = _find_own_address(process.address, process.port)
    _choose_gloo_interface(own_address)
    session = store.add(f"rlhf/sessions/{process.rank}", 1)  # the same number on all ranks
    key = f"rlhf/coordinator/{session}"
    if process.rank == 0:
        listener = listen(own_address)
        token = secrets.token_hex()
        secret = os.environ.get(SECRET_VARIABLE) or token
        Coordinator(listener, secret, process.size, "rank", timeout, track_progress=True).start()
        store.set(key, json.dumps([own_address, listener.getsockname()[1], token]))
    host, port, token = json.loads(store.get(key))
    return (host, port), os.environ.get(SECRET_VARIABLE) or token


def _find_own_address(host: str, port: int) -> str:
    """Return this machine's address on the network that leads to `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _choose_gloo_interface(address: str) -> None:
    """Let gloo use the network of `address`; by default it uses that of the host's own name, often 127.0.1.1."""
    if ":" in address or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                os.environ["GLOO_SOCKET_IFNAME"] = name
