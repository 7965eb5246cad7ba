"""One rollout server, as a trainer sees it: every answer is checked, and every failure is a `ServerError`."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from pydantic import ValidationError

from rlhf.config.rollout import read_token
from rlhf.rollouts.protocol import (
    PATH,
    Capabilities,
    Drawn,
    DrawnRow,
    DrawRequest,
    Message,
    Receipt,
    Scored,
    ScoreRequest,
)

M = TypeVar("M", bound=Message)

_SHORT = 10.0  # seconds, to connect and for what takes no time


class ServerError(Exception):
    """A rollout server cannot be reached, refuses a call, or answers wrongly; the message does not name it."""


class ServerTimeout(ServerError):
    """A server has not answered in time."""


class RolloutServer:
    """A server, as far as it is known.

    Attributes:
        url: its address, as the settings have it.
        receipt: names the weights that it has confirmed; empty if it has confirmed none.
    """

    def __init__(self, url: str, timeout: float) -> None:
        """Remember the address; each call may take `timeout` seconds."""
        self.url, self.receipt = url, ""
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None  # of the call that is being made
        self._is_closed = False

    def capabilities(self) -> Capabilities:
        """Ask what the server has loaded."""
        return self._call("GET", "capabilities", Capabilities, timeout=min(_SHORT, self._timeout))

    def take_weights(self, archive: Path) -> None:
        """Send a tar of a folder with weights, see `rlhf.rollouts.protocol`."""
        self.receipt = ""
        headers = {"Content-Length": str(os.path.getsize(archive))}
        with archive.open("rb") as file:
            self.receipt = self._call("PUT", "weights", Receipt, file, headers).receipt

    def close(self) -> None:
        """End the call that another thread makes, and refuse further ones."""
        self._is_closed = True
        connection = self._connection
        if sock := connection.sock if connection else None:
            with suppress(OSError):  # it has just ended
                sock.shutdown(socket.SHUT_RDWR)

    def draw(self, request: DrawRequest, vocabulary: int) -> list[DrawnRow]:
        """Have completions drawn; `vocabulary` is the number of tokens."""
        answer = self._ask("draw", request, Drawn)
        if len(answer.rows) != len(request.prompts):
            raise ServerError(f"it has returned {len(answer.rows)} completions of {len(request.prompts)} prompts")
        for row in answer.rows:
            _check_row(row, request, vocabulary)
        return answer.rows

    def score(self, request: ScoreRequest) -> np.ndarray:
        """Return the log-probabilities of the rows' tokens, see `Scored`."""
        answer = self._ask("score", request, Scored)
        count = sum(len(row) - 1 for row in request.rows)
        if len(answer.log_probs) != count:
            raise ServerError(f"it has scored {len(answer.log_probs)} tokens of {count}")
        _check_log_probs(answer.log_probs)
        return answer.log_probs

    def _ask(self, call: str, request: DrawRequest | ScoreRequest, kind: type[M]) -> M:
        headers = {"Content-Type": "application/json"}
        answer = self._call("POST", call, kind, request.model_dump_json().encode(), headers)
        if answer.receipt != request.receipt:  # type: ignore[attr-defined]
            raise ServerError("it has answered by other weights than it was asked for")
        return answer

    def _call(
        self,
        method: str,
        call: str,
        kind: type[M],
        body: Any = None,
        headers: Mapping[str, str] = {},
        *,
        timeout: float | None = None,
    ) -> M:
        """Return the answer to a call.

        Raises:
            ServerError: there is none, or another than the protocol's.
        """
        if token := read_token():
            headers = {**headers, "Authorization": f"Bearer {token}"}
        parts, timeout = urlsplit(self.url), timeout or self._timeout
        factory = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        end = time.monotonic() + timeout
        connection = factory(parts.hostname or "", parts.port, timeout=min(_SHORT, timeout))
        try:
            try:
                connection.connect()
            except TimeoutError as error:
                raise ServerTimeout(f"it cannot be reached within {connection.timeout:g} seconds") from error
            connection.sock.settimeout(timeout)
            self._connection = connection
            if self._is_closed:
                raise ServerError("the stage has ended")
            connection.request(method, f"{parts.path}{PATH}/{call}", body, dict(headers))
            answer = connection.getresponse()
            content = bytearray()
            while part := answer.read1(2**20):
                content += part
                if time.monotonic() > end:
                    raise TimeoutError
            if answer.length:  # the rest of the announced bytes
                raise http.client.IncompleteRead(bytes(content), answer.length)
        except TimeoutError as error:
            raise ServerTimeout(f"no answer to {call!r} within {timeout:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}") from error
        except ValueError as error:  # such as a host name that cannot be encoded
            raise ServerError("its address cannot be used") from error
        finally:
            self._connection = None
            connection.close()
        if answer.status != 200:
            raise ServerError(f"it refuses {call!r}: {_read_reason(content)} (status {answer.status})")
        try:
            return kind.model_validate_json(bytes(content))
        except (ValidationError, ValueError) as error:
            raise ServerError(
                f"its answer to {call!r} is not that of a rollout server; is it another program?"
            ) from error


def _check_row(row: DrawnRow, request: DrawRequest, vocabulary: int) -> None:
    """Check a completion.

    Raises:
        ServerError: no decoder can have drawn it.
    """
    if not 0 < len(row.ids) <= request.tokens:
        raise ServerError(f"it has returned a completion of {len(row.ids)} tokens, expected 1 to {request.tokens}")
    if len(row.log_probs) != len(row.ids):
        raise ServerError(f"it has returned {len(row.log_probs)} log-probabilities of {len(row.ids)} tokens")
    if not all(0 <= token < vocabulary for token in row.ids):
        raise ServerError(f"it has returned a token id that is not from 0 to {vocabulary - 1}")
    ends = [token in request.end_ids for token in row.ids]
    if any(ends[:-1]) or (len(row.ids) < request.tokens and not ends[-1]):
        raise ServerError("it has returned a completion that does not end where its end token is")
    _check_log_probs(row.log_probs)


def _check_log_probs(log_probs: np.ndarray) -> None:
    if not (log_probs <= 0).all():  # False for NaN too
        raise ServerError("it has returned log-probabilities above 0, or that are not numbers")


def _read_reason(content: bytes | bytearray) -> str:
    """Return the message of an error's response."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "without a reason"
