"""Run the HTTP server of a model: it listens on a thread, and the engine draws on the main thread, until a signal."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Protocol

import uvicorn

from rlhf.serving.app import ServedModel
from rlhf.serving.engine import Engine
from rlhf.serving.judging import ChatPage
from rlhf.serving.ports import is_loopback
from rlhf.serving.rollouts import RolloutService
from rlhf.utils.signals import handle_signals, raise_if_interrupted

_CONNECTIONS = 1024  # at a time
_GRACE = 600  # seconds that running requests may take after the first signal


class Runner(Protocol):
    """What the main thread does while the server listens: draw, or wait for another process that does."""

    def run(self) -> None:
        """Return after `close`."""

    def close(self) -> None:
        """Let `run` return."""


def serve(
    runner: Runner,
    name: str,
    listener: socket.socket,
    token: str | None,
    announce: Callable[[str], None],
    rollouts: RolloutService | None = None,
    page: ChatPage | None = None,
) -> None:
    """Serve until a signal; running requests are finished first, and a second signal ends them.

    Args:
        runner: an `Engine`, which draws the completions on this thread, or another that serves rollouts alone.
        name: the model's name in requests.
        listener: of `open_port`.
        token: what requests must send; None: nothing.
        announce: receives the server's address.
        rollouts: the calls of a trainer; None: there are none.
        page: the calls of the page; None: there is none.
    """
    host, port = listener.getsockname()[:2]
    hosts = (host, "127.0.0.1", "localhost", "::1") if is_loopback(host) else None
    engine = runner if isinstance(runner, Engine) else None
    model = ServedModel(engine, name, token=token, hosts=hosts, rollouts=rollouts, page=page)
    config = uvicorn.Config(
        model.build(),
        log_config=None,
        log_level="critical",  # the application reports errors; a request that is cancelled at the end is no error
        access_log=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE,
        lifespan="off",
        server_header=False,
    )
    server = uvicorn.Server(config)

    def end(number: int) -> None:
        server.force_exit = server.should_exit
        if server.force_exit and rollouts:
            rollouts.interrupt()
        model.closing = server.should_exit = True

    failures: list[BaseException] = []

    def listen() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:
            failures.append(error)
        finally:
            runner.close()

    with handle_signals(end):
        raise_if_interrupted()
        thread = threading.Thread(target=listen, name="http")
        thread.start()
        address = f"[{host}]" if ":" in host else host
        announce(f"http://{address}:{port}{'/' if page else '/v1'}")
        try:
            runner.run()
        finally:
            server.should_exit = True
            thread.join()
    if failures:
        raise failures[0]
