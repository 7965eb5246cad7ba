"""One rollout server: an answer that breaks off, or that no decoder can have given."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest

from rlhf.rollouts.client import RolloutServer, ServerError, _check_row
from rlhf.rollouts.protocol import DrawnRow, DrawRequest


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes to the first caller and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(answer)

        thread = Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def test_answer_that_breaks_off_is_not_that_of_another_program() -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"{" * 500
    with answering(half) as address, pytest.raises(ServerError, match="500 bytes read, 500 more expected"):
        RolloutServer(address, timeout=20).capabilities()


@pytest.mark.parametrize(
    ("ids", "numbers", "message"),
    [
        ([], 0, "a completion of 0 tokens, expected 1 to 4"),
        ([5] * 5, 5, "a completion of 5 tokens, expected 1 to 4"),
        ([5] * 4, 3, "3 log-probabilities of 4 tokens"),
        ([5, 10], 2, "a token id that is not from 0 to 9"),
        ([5, 1, 5, 5], 4, "does not end where its end token is"),
        ([5, 5], 2, "does not end where its end token is"),
    ],
)
def test_completion_that_no_decoder_draws_is_refused(ids: list[int], numbers: int, message: str) -> None:
    values = {"receipt": "r", "prompts": [[2, 3]], "width": 2, "uniform": np.zeros(4), "tokens": 4}
    request = DrawRequest.model_validate(values | {"temperature": 1.0, "end_ids": [1]})
    row = DrawnRow.model_validate({"ids": ids, "log_probs": np.full(numbers, -1.0)})
    with pytest.raises(ServerError, match=message):
        _check_row(row, request, vocabulary=10)
