"""The calls of `rlhf.rollouts.protocol`: a trainer hands over weights, and has completions drawn and rows scored.

All that touches the model runs on the engine's thread, between batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from accelerators import ShapePolicy
from rlhf.config.schema import Config, SamplingConfig
from rlhf.data.batches import pad_left, pad_right
from rlhf.evaluation.models import load_language_model
from rlhf.generation.decoder import Decoder
from rlhf.generation.rank_groups import PromptBatch
from rlhf.models.forward import completion_log_probs
from rlhf.models.lora import (
    TRAINED_ADAPTER,
    find_adapted_layers,
    inject_adapters,
    merged_adapters,
    read_adapter_config,
    read_adapter_tensors,
    to_plain_name,
)
from rlhf.rollouts.protocol import Capabilities, Drawn, DrawnRow, DrawRequest, Message, Receipt, Scored, ScoreRequest
from rlhf.serving.engine import Engine
from rlhf.serving.requests import RequestError, read_json

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_MAX_BODY = 256 * 2**20  # bytes of a draw or score request
_FILE = re.compile(r"[A-Za-z0-9][\w.-]*\.(?:safetensors|json|jinja|txt|model|md)")
"""Files of a folder of weights; Python code is not among them."""


class RolloutService:
    """The weights that a trainer has handed over, and what it asks of them.

    Attributes:
        receipt: names the weights; empty if they are those that the server was started with.
    """

    def __init__(self, engine: Engine, name: str, config: Config) -> None:
        """Serve the engine's model under `name`; `config` says how models are loaded."""
        self.receipt = ""
        self._engine, self._name, self._config = engine, name, config
        module = engine.model.module
        self._base = engine.model.folder  # adapters are added to the model that the server was started with
        self._vocabulary: int = module.get_input_embeddings().weight.shape[0]
        self._logits: int = module.get_output_embeddings().weight.shape[0]
        self._decoder: Decoder | None = None
        self._merged: contextlib.ExitStack | None = None
        self._has_other_base = False
        self._adapter: tuple[int, list[str]] | None = None  # rank and layers of the adapters in the model
        self._max_upload = 4 * sum(parameter.numel() for parameter in module.parameters()) + 64 * 2**20

    async def show_capabilities(self, request: Request) -> Response:
        """Answer with `Capabilities`."""
        model = self._engine.model
        return _respond(
            Capabilities(
                model=self._name,
                vocabulary=self._logits,
                max_length=model.max_length,
                accelerator=model.device.accelerator.name,
                precision=model.device.precision.name,
            )
        )

    async def take_weights(self, request: Request) -> Response:
        """Load the weights in the request, and answer with a `Receipt`."""
        with tempfile.TemporaryDirectory(prefix="rlhf-weights-") as temporary:
            archive, folder = Path(temporary, "weights.tar"), Path(temporary, "weights")
            size = 0
            with archive.open("wb") as file:
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_upload:
                        raise RequestError("the weights are larger than the model that is served here", 413)
                    file.write(part)
            await asyncio.to_thread(_unpack, archive, folder)
            receipt = await self._run(lambda: self._load(folder))
        return _respond(Receipt(receipt=receipt))

    async def draw(self, request: Request) -> Response:
        """Answer a `DrawRequest` with `Drawn`."""
        asked = await _read(request, DrawRequest)
        self._check_tokens(asked.prompts, asked.width, asked.tokens)
        if len(asked.uniform) != len(asked.prompts) * asked.tokens:
            raise RequestError("uniform: must have a number for each token of each row")
        if not ((asked.uniform >= 0) & (asked.uniform < 1)).all():
            raise RequestError("uniform: must have numbers in [0, 1)")
        rows = await self._run(lambda: self._draw(asked))
        return _respond(Drawn(receipt=asked.receipt, rows=rows))

    async def score(self, request: Request) -> Response:
        """Answer a `ScoreRequest` with `Scored`."""
        asked = await _read(request, ScoreRequest)
        self._check_tokens(asked.rows, max(map(len, asked.rows)), 0)
        log_probs = await self._run(lambda: self._score(asked))
        return _respond(Scored(receipt=asked.receipt, log_probs=log_probs))

    async def _run(self, function: Callable[[], T]) -> T:
        """Return the function's result on the engine's thread."""
        return await asyncio.wrap_future(self._engine.call(function))

    def _check_tokens(self, rows: Sequence[Sequence[int]], width: int, tokens: int) -> None:
        context = self._engine.model.max_length
        if any(not 0 <= token < self._vocabulary for row in rows for token in row):
            raise RequestError(
                f"a token id is not from 0 to {self._vocabulary - 1}: the trainer has another vocabulary"
            )
        longest = max(map(len, rows))
        if longest > width or max(longest + tokens, width) > context:
            raise RequestError(f"rows of {max(longest + tokens, width)} tokens do not fit into a context of {context}")

    def _check_receipt(self, receipt: str) -> None:
        if not self.receipt or receipt != self.receipt:
            raise RequestError("other weights are loaded than those of this receipt", 409)

    # --- on the engine's thread

    def _load(self, folder: Path) -> str:
        """Load the weights in a folder, and return their receipt; if that fails, the model of the start is loaded."""
        self.receipt = ""
        if self._decoder:
            self._decoder.release()  # its buffers refer to the model
            self._decoder = None
        with self._engine.changing_weights():
            self._release_adapter()
            try:
                if (folder / "adapter_config.json").is_file():
                    self._load_adapter(folder)
                else:
                    self._load_model(folder)
            except Exception:
                self._load_model(self._base)
                raise
        self.receipt = secrets.token_hex(16)
        return self.receipt

    def _load_model(self, folder: Path | str) -> None:
        engine = self._engine
        engine.model = replace(engine.model, module=None)  # two models may not fit into the memory
        engine.model.device.free_memory()
        engine.model = load_language_model(folder, self._config, engine.model.device)
        self._has_other_base, self._adapter = str(folder) != self._base, None

    def _load_adapter(self, folder: Path) -> None:
        config = read_adapter_config(folder)
        adapter = config.r, sorted(config.target_modules or ())
        if self._has_other_base or self._adapter not in (None, adapter):
            self._load_model(self._base)
        module = self._engine.model.module
        device = self._engine.model.device.accelerator.device()
        if self._adapter is None:
            inject_adapters(module, TRAINED_ADAPTER, config)
            self._adapter = adapter
        tensors = {
            to_plain_name(name): tensor for name, tensor in read_adapter_tensors(folder, TRAINED_ADAPTER).items()
        }
        parameters = {to_plain_name(name): parameter for name, parameter in module.named_parameters()}
        missing = [name for name in parameters if ".lora_" in name and name not in tensors]
        if unknown := [*missing, *(tensors.keys() - parameters.keys())]:
            raise RequestError(f"the adapter is for another model, or of another shape: {min(unknown)}")
        for name, tensor in tensors.items():
            if parameters[name].shape != tensor.shape:
                raise RequestError(f"the adapter is of another shape: {name}")
        for name, tensor in tensors.items():
            # Factors keep their type: they are added up in float32.
            parameters[name].data = tensor.to(device, None if ".lora_" in name else parameters[name].dtype)
        for layer in find_adapted_layers(module).values():
            layer.scaling[TRAINED_ADAPTER] = config.lora_alpha / config.r
        module.requires_grad_(False)
        self._merged = contextlib.ExitStack()
        self._merged.enter_context(merged_adapters(module))

    def _release_adapter(self) -> None:
        """Restore the weights without the adapter that is merged into them."""
        if self._merged:
            self._merged.close()
            self._merged = None

    def _draw(self, asked: DrawRequest) -> list[DrawnRow]:
        self._check_receipt(asked.receipt)
        model, count = self._engine.model, len(asked.prompts)
        decoder = self._find_decoder(asked.tokens, asked.end_ids)
        pad: Any = model.tokenizer.pad_token_id
        ids, mask = pad_left(asked.prompts, ShapePolicy("static"), asked.width, pad)
        uniform = torch.from_numpy(asked.uniform.reshape(count, asked.tokens).T.copy())
        prompts = PromptBatch(*model.device.accelerator.to_device((ids, mask, uniform)))
        with model.device.forward_context(f"{count} completions"):
            drawn = decoder.complete(model.module, prompts, SamplingConfig(temperature=asked.temperature))
        lengths = drawn.mask.sum(1).tolist()
        assert drawn.log_probs is not None
        log_probs = np.array(drawn.log_probs.tolist(), np.float32)
        decoder.release_if_large()
        rows = [
            DrawnRow(ids=row[:length], log_probs=numbers[:length])
            for row, numbers, length in zip(drawn.ids.tolist(), log_probs, lengths)
        ]
        if not all(np.isfinite(row.log_probs).all() for row in rows):
            raise model.invalid_number("a log-probability is not finite")
        return rows

    def _find_decoder(self, tokens: int, end_ids: Sequence[int]) -> Decoder:
        if self._decoder is None or (self._decoder.max_new_tokens, self._decoder.eos_ids.tolist()) != (tokens, end_ids):
            self._decoder = self._engine.make_decoder(tokens, end_ids)
        return self._decoder

    @torch.no_grad()
    def _score(self, asked: ScoreRequest) -> np.ndarray:
        self._check_receipt(asked.receipt)
        model = self._engine.model
        pad: Any = model.tokenizer.pad_token_id
        ids, mask = pad_right(asked.rows, self._engine.shapes, model.max_length, pad)
        batch = model.device.accelerator.to_device((ids, mask))
        with model.device.forward_context(f"{len(ids)} rows"):
            scores = completion_log_probs(model.module, *batch, ids.shape[1] - 1).log_probs
        numbers: np.ndarray = np.array(scores.tolist(), np.float32)[mask[:, 1:].bool().numpy()]
        return numbers


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
