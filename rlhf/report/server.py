"""Show a report on this machine alone, rendered at each request, so that a run in progress can be watched."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rlhf.diagnosis.verdict import examine_runs
from rlhf.errors import ConfigError
from rlhf.report.page import render_report

_REFRESH = 10  # seconds
_ADDRESS = "127.0.0.1"
_WAITING = "<!DOCTYPE html><meta charset=utf-8><meta http-equiv=refresh content={seconds}><p>{error}"


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a browser that has left, for example because the page was closed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serve_report(paths: Sequence[Path], port: int, announce: Callable[[str], None]) -> None:
    """Serve the page about the runs in `paths` on loopback until Ctrl-C; `announce` receives its address.

    Raises:
        ConfigError: the port cannot be opened.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site could reach this address under that site's name (DNS rebinding).
            if self.headers.get("Host") not in (f"{_ADDRESS}:{port}", f"localhost:{port}"):
                self.send_error(403, "unknown host")
                return
            if self.path.partition("?")[0] != "/":
                self.send_error(404)
                return
            try:
                with rendering:
                    status, page = 200, render(paths)
            except Exception as error:  # such as no step yet; the page tries again
                status, page = 500, _WAITING.format(seconds=_REFRESH, error=escape(str(error)))
            content = page.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    try:
        server = _Server((_ADDRESS, port), Handler)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise ConfigError(f"--port {port}: {reason}; choose another") from error
    rendering = threading.Lock()
    with server:
        announce(f"http://{_ADDRESS}:{port}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            rendering.acquire()  # Python aborts if it ends while a thread is in compiled code


def render(paths: Sequence[Path]) -> str:
    """Return the page about the runs, which reloads itself while one of them runs."""
    reports, unread = examine_runs(paths)
    running = any(report.records.state == "running" for report in reports)
    notes = [(path.name, reason) for path, reason in unread]
    return render_report(reports, notes=notes, refresh=_REFRESH if running or unread else 0)
