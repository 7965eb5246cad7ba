"""The calls of `rlhf.rollouts.protocol`: a trainer hands over weights, and has completions drawn and rows scored."""

from __future__ import annotations

import re
import secrets
import shutil
import tarfile
import tempfile
import threading
from asyncio import to_thread
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from rlhf.roles.model_identity import fingerprint_model
from rlhf.rollouts.protocol import Capabilities, Drawn, DrawnRow, DrawRequest, Message, Receipt, Scored, ScoreRequest
from rlhf.serving.requests import RequestError, read_json

M = TypeVar("M", bound=Message)

_MAX_BODY = 256 * 2**20  # bytes of a draw or score request
_FILE = re.compile(r"[A-Za-z0-9][\w.-]*\.(?:safetensors|json|jinja|txt|model|md)")
"""Files of a folder of weights; Python code is not among them."""


class RolloutModel(Protocol):
    """A model whose weights a trainer replaces; its methods are called one at a time, on any thread.

    Attributes:
        capabilities: the answer to a trainer's first call.
        vocabulary: token ids are below this.
        max_upload: bytes of weights that can be meant for this model.
    """

    capabilities: Capabilities
    vocabulary: int
    max_upload: int

    def load(self, folder: Path) -> None:
        """Load the weights in a folder, which it may move; if that fails, those of the start.

        Raises:
            RequestError: they are for another model.
        """

    def draw(self, asked: DrawRequest) -> list[DrawnRow]:
        """Return a completion of each prompt."""

    def score(self, asked: ScoreRequest) -> np.ndarray:
        """Return the log-probabilities of the rows' tokens, see `Scored`."""

    def interrupt(self) -> None:
        """Let the call that runs end soon, if it can."""


class RolloutService:
    """What a trainer asks of a model, and which weights it has handed over.

    Attributes:
        receipt: names the weights.
    """

    def __init__(self, model: RolloutModel) -> None:
        """Serve a model."""
        self.receipt = model.capabilities.start
        self._model = model
        self._lock = threading.Lock()
        self._is_interrupted = False

    def interrupt(self) -> None:
        """Refuse the calls that wait, and let the one that runs end soon, if it can."""
        self._is_interrupted = True
        self._model.interrupt()

    async def show_capabilities(self, request: Request) -> Response:
        """Answer with `Capabilities`."""
        return _respond(self._model.capabilities)

    async def take_weights(self, request: Request) -> Response:
        """Load the weights in the request, and answer with a `Receipt`."""
        with tempfile.TemporaryDirectory(prefix="rlhf-weights-") as temporary:
            archive, folder = Path(temporary, "weights.tar"), Path(temporary, "weights")
            size = 0
            with archive.open("wb") as file:
                async for part in request.stream():
                    size += len(part)
                    if size > self._model.max_upload:
                        raise RequestError("the weights are larger than the model that is served here", 413)
                    file.write(part)
            await to_thread(_unpack, archive, folder)
            archive.unlink()  # the model may be large
            receipt = await to_thread(self._load, folder)
        return _respond(Receipt(receipt=receipt))

    async def draw(self, request: Request) -> Response:
        """Answer a `DrawRequest` with `Drawn`."""
        asked = await _read(request, DrawRequest)
        self._check_tokens(asked.prompts, asked.width, asked.tokens)
        if len(asked.uniform) != len(asked.prompts) * asked.tokens:
            raise RequestError("uniform: must have a number for each token of each row")
        if not ((asked.uniform >= 0) & (asked.uniform < 1)).all():
            raise RequestError("uniform: must have numbers in [0, 1)")
        rows = await to_thread(self._draw, asked)
        return _respond(Drawn(receipt=asked.receipt, rows=rows))

    async def score(self, request: Request) -> Response:
        """Answer a `ScoreRequest` with `Scored`."""
        asked = await _read(request, ScoreRequest)
        self._check_tokens(asked.rows, max(map(len, asked.rows)), 0)
        log_probs = await to_thread(self._score, asked)
        return _respond(Scored(receipt=asked.receipt, log_probs=log_probs))

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        with self._lock:
            if self._is_interrupted:
                raise RequestError("the server is ending", 503)
            yield

    def _load(self, folder: Path) -> str:
        with self._one_at_a_time():
            self.receipt = self._model.capabilities.start  # if loading fails
            self._model.load(folder)
            self.receipt = secrets.token_hex(16)
            return self.receipt

    def _draw(self, asked: DrawRequest) -> list[DrawnRow]:
        with self._one_at_a_time():
            self._check_receipt(asked.receipt)
            return self._model.draw(asked)

    def _score(self, asked: ScoreRequest) -> np.ndarray:
        with self._one_at_a_time():
            self._check_receipt(asked.receipt)
            return self._model.score(asked)

    def _check_receipt(self, receipt: str) -> None:
        if receipt != self.receipt:
            raise RequestError("other weights are loaded than those of this receipt", 409)

    def _check_tokens(self, rows: Sequence[Sequence[int]], width: int, tokens: int) -> None:
        context = self._model.capabilities.max_length
        if any(not 0 <= token < self._model.vocabulary for row in rows for token in row):
            raise RequestError(
                f"a token id is not from 0 to {self._model.vocabulary - 1}: the trainer has another vocabulary"
            )
        longest = max(map(len, rows))
        if longest > width or max(longest + tokens, width) > context:
            raise RequestError(f"rows of {max(longest + tokens, width)} tokens do not fit into a context of {context}")


def digest_weights(model: Path | str) -> str:
    """Return what identifies the weights in a folder, or of a hub name: equal for equal files, or unlike any other."""
    return fingerprint_model(str(model)) or secrets.token_hex(16)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar of plain files, none of them code.

    Raises:
        RequestError: it has another file, or is damaged.
    """
    folder.mkdir()
    left = archive.stat().st_size  # a sparse file is larger than what was sent
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                left -= member.size
                plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse() and left >= 0
                source = tar.extractfile(member) if plain and _FILE.fullmatch(member.name) else None
                if source is None:
                    raise RequestError(f"the weights contain {member.name[:60]!a}, which is no file of weights")
                with (folder / member.name).open("xb") as target:
                    shutil.copyfileobj(source, target)
    except (tarfile.TarError, FileExistsError, EOFError) as error:
        raise RequestError("the weights are no tar of files") from error


async def _read(request: Request, kind: type[M]) -> M:
    """Return the message in a request.

    Raises:
        RequestError: it is another one.
    """
    body = await read_json(request, _MAX_BODY)
    try:
        return kind.model_validate_json(body)
    except (ValidationError, ValueError) as error:
        raise RequestError(f"not a {kind.__name__}: {str(error).splitlines()[0]}") from error


def _respond(message: Message) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")
