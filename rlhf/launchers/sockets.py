"""Plain TCP connections between processes of a run, and the messages on them: one line of JSON each."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from rlhf.errors import ConfigError


class JSONLineReader:
    """The messages that arrive on a connection, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._rest = connection, b""

    def read(self) -> list[Any] | None:
        """What has arrived, without waiting for more than there is; None where the connection has ended."""
        try:
            found = self.connection.recv(65536)
        except OSError:
            found = b""
        *lines, self._rest = (self._rest + found).split(b"\n")
        if not found or len(self._rest) > 2**20:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket at which members find the hub, on every network of this machine; a free port where none is given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024)


def connect_with_retry(address: tuple[str, int], patience: float) -> socket.socket:
    """A connection to `address`, where somebody may begin to listen later.

    Raises:
        ConfigError: nobody does within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection(address, timeout=5)
            connection.settimeout(None)
            keep_alive(connection)
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{address[0]}:{address[1]}: the first does not answer there within {patience:.0f} s "
                    f"({error.strerror or error}); start it, and check the address and that its port is open"
                ) from error
        time.sleep(0.2)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out, within a quarter of a minute, that the machine at the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(connection: socket.socket, message: Any) -> None:
    """Send a message."""
    connection.sendall(json.dumps(message).encode() + b"\n")
