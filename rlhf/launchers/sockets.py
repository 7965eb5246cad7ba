"""Plain TCP connections between the processes of a run, and their messages: one line of JSON each."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from rlhf.errors import ConfigError

_MAX_LINE = 2**20  # bytes


class JSONLineReader:
    """Reads the messages that arrive on a connection, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._rest = connection, b""

    def read(self) -> list[Any] | None:
        """Return the messages that have arrived, without waiting for more; None if the connection has ended."""
        try:
            received = self.connection.recv(65536)
        except OSError:
            received = b""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if not received or len(self._rest) > _MAX_LINE:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on every network of this machine; on a free port by default."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024)


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
            keep_alive(connection)
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{address[0]}:{address[1]}: no answer within {timeout:.0f} s ({error.strerror or error}); "
                    "start the first process there, and check the address and that the port is open"
                ) from error
        time.sleep(0.2)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within about 15 seconds that the machine at the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(connection: socket.socket, message: Any) -> None:
    """Send a message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def find_free_port() -> int:
    """Return a port of this machine that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
