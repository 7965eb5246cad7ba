"""The port that a server listens on; without torch, which may be imported only when a backend has been selected."""

from __future__ import annotations

import errno
import ipaddress
import socket

from rlhf.errors import ConfigError


def open_port(host: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        ConfigError: it cannot be opened.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port {port}: is in use; choose another") from error
        raise ConfigError(f"--host {host}, --port {port}: cannot be opened ({error.strerror or error})") from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
