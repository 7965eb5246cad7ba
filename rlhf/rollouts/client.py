"""One rollout server, as a trainer sees it: every answer is checked, and every failure is a `ServerError`."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import numpy as np
from pydantic import ValidationError

from rlhf.config.rollout import SERVE_TOKEN
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

_CONNECT = 10.0  # seconds


class ServerError(Exception):
    """A rollout server cannot be reached, refuses a call, or answers wrongly; the message does not name it."""


class RolloutServer:
    """A server and its state, as far as it is known.

    Attributes:
        url: its address, as the settings have it.
        version: of the weights that it has confirmed; None: of none.
        instance: the process that has confirmed them; see `Capabilities`.
    """

    def __init__(self, url: str, timeout: float) -> None:
        """Remember the address; each call may take `timeout` seconds."""
        self.url = url
        self.version: int | None = None
        self._timeout = timeout
        self.instance = ""

    def capabilities(self) -> Capabilities:
        """Ask what the server has loaded, and remember which process it is."""
        answer = self._call("GET", "capabilities", Capabilities)
        self.instance = answer.instance
        return answer

    def take_weights(self, archive: Path, version: int) -> None:
        """Send a tar of a folder with weights, see `rlhf.rollouts.protocol`."""
        self.version = None
        with archive.open("rb") as file:
            query = {"version": version}
            answer = self._call(
                "PUT", "weights", Receipt, file, {"Content-Length": str(os.path.getsize(archive))}, query
            )
        if answer.version != version:
            raise ServerError(
                f"it has received version {version} of the weights, and confirms version {answer.version}"
            )
        self.instance, self.version = answer.instance, version

    def draw(self, request: DrawRequest) -> list[DrawnRow]:
        """Have completions drawn."""
        answer = self._ask("draw", request, Drawn)
        if len(answer.rows) != len(request.prompts):
            raise ServerError(f"it has returned {len(answer.rows)} completions of {len(request.prompts)} prompts")
        for row in answer.rows:
            if not 0 < len(row.ids) <= request.tokens or len(row.log_probs) != len(row.ids):
                raise ServerError(
                    f"it has returned a completion of {len(row.ids)} tokens, expected 1 to {request.tokens}"
                )
            if not (row.log_probs <= 0).all():  # False for NaN too
                raise ServerError("it has returned log-probabilities above 0, or that are not numbers")
        return answer.rows

    def score(self, request: ScoreRequest) -> np.ndarray:
        """Return the log-probabilities of the rows' tokens, see `Scored`."""
        answer = self._ask("score", request, Scored)
        count = sum(len(row) - 1 for row in request.rows)
        if len(answer.log_probs) != count:
            raise ServerError(f"it has scored {len(answer.log_probs)} tokens of {count}")
        return answer.log_probs

    def _ask(self, call: str, request: DrawRequest | ScoreRequest, kind: type[M]) -> M:
        headers = {"Content-Type": "application/json"}
        answer = self._call("POST", call, kind, request.model_dump_json().encode(), headers)
        instance, version = answer.instance, answer.version  # type: ignore[attr-defined]
        if instance != self.instance:
            raise ServerError("it was restarted since it received the weights")
        if version != request.version:
            raise ServerError(f"it has answered for version {version} of the weights, expected {request.version}")
        return answer

    def _call(
        self,
        method: str,
        call: str,
        kind: type[M],
        body: Any = None,
        headers: Mapping[str, str] = {},
        query: Mapping[str, Any] = {},
    ) -> M:
        """Return the answer to a call.

        Raises:
            ServerError: there is none, or another than the protocol's.
        """
        if token := os.environ.get(SERVE_TOKEN):
            headers = {**headers, "Authorization": f"Bearer {token}"}
        parts = urlsplit(self.url)
        factory = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = factory(parts.hostname or "", parts.port, timeout=_CONNECT)
        path = f"{parts.path.rstrip('/')}{PATH}/{call}" + (f"?{urlencode(query)}" if query else "")
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout)
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            content = answer.read()
        except TimeoutError as error:
            raise ServerError(f"no answer to {call!r} within {self._timeout:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise ServerError(f"it refuses {call!r}: {_read_reason(content)} (status {answer.status})")
        try:
            return kind.model_validate_json(content)
        except (ValidationError, ValueError) as error:
            raise ServerError(
                f"its answer to {call!r} is not that of a rollout server; is it another program?"
            ) from error


def _read_reason(content: bytes) -> str:
    """Return the message of an error's response."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "without a reason"
