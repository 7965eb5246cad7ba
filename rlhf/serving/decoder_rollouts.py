"""Rollouts by our own decoder: all that touches the model runs on the engine's thread, between batches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accelerators import ShapePolicy
from rlhf.config.schema import Config, SamplingConfig
from rlhf.data.batches import pad_left, pad_right
from rlhf.evaluation.models import load_language_model
from rlhf.generation.decoder import Decoder, DecodingInterrupted
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
from rlhf.models.tokenizers import digest_vocabulary
from rlhf.rollouts.protocol import Capabilities, DrawnRow, DrawRequest, ScoreRequest
from rlhf.serving.engine import Engine
from rlhf.serving.requests import RequestError
from rlhf.serving.rollouts import digest_weights


class DecoderRollouts:
    """The model of an engine; a `rlhf.serving.rollouts.RolloutModel`."""

    def __init__(self, engine: Engine, name: str, config: Config) -> None:
        """Serve the engine's model under `name`; `config` says how models are loaded."""
        self._engine, self._config = engine, config
        model, module = engine.model, engine.model.module
        self._base = model.folder  # adapters are added to the model that the server was started with
        self.vocabulary: int = module.get_input_embeddings().weight.shape[0]
        self.max_upload = 4 * sum(parameter.numel() for parameter in module.parameters()) + 64 * 2**20
        self.capabilities = Capabilities(
            model=name,
            start=digest_weights(engine.model.folder),
            vocabulary=module.get_output_embeddings().weight.shape[0],
            tokenizer=digest_vocabulary(model.tokenizer),
            max_length=model.max_length,
            accelerator=model.device.accelerator.name,
            precision=model.device.precision.name,
        )
        self._decoder: Decoder | None = None
        self._is_interrupted = False
        self._merged: contextlib.ExitStack | None = None
        self._has_other_base = False
        self._adapter: tuple[int, list[str]] | None = None  # rank and layers of the adapters in the model

    def load(self, folder: Path) -> None:
        """Load the weights in a folder."""
        self._engine.call(lambda: self._load(folder)).result()

    def interrupt(self) -> None:
        """End the batch that is being drawn within a few tokens."""
        self._is_interrupted = True
        if decoder := self._decoder:
            decoder.is_interrupted = True

    def draw(self, asked: DrawRequest) -> list[DrawnRow]:
        """Return a completion of each prompt."""
        return self._engine.call(lambda: self._draw(asked)).result()

    def score(self, asked: ScoreRequest) -> np.ndarray:
        """Return the log-probabilities of the rows' tokens."""
        return self._engine.call(lambda: self._score(asked)).result()

    # --- on the engine's thread

    def _load(self, folder: Path) -> None:
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
        model, count = self._engine.model, len(asked.prompts)
        decoder = self._find_decoder(asked.tokens, asked.end_ids)
        pad: Any = model.tokenizer.pad_token_id
        ids, mask = pad_left(asked.prompts, ShapePolicy("static"), asked.width, pad)
        uniform = torch.from_numpy(asked.uniform.reshape(count, asked.tokens).T.copy())
        prompts = PromptBatch(*model.device.accelerator.to_device((ids, mask, uniform)))
        with model.device.forward_context(f"{count} completions"):
            try:
                drawn = decoder.complete(model.module, prompts, SamplingConfig(temperature=asked.temperature))
            except DecodingInterrupted as error:
                raise RequestError("the server is ending", 503) from error
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
            self._decoder.is_interrupted = self._is_interrupted
        return self._decoder

    @torch.no_grad()
    def _score(self, asked: ScoreRequest) -> np.ndarray:
        model = self._engine.model
        pad: Any = model.tokenizer.pad_token_id
        ids, mask = pad_right(asked.rows, self._engine.shapes, model.max_length, pad)
        batch = model.device.accelerator.to_device((ids, mask))
        with model.device.forward_context(f"{len(ids)} rows"):
            scores = completion_log_probs(model.module, *batch, ids.shape[1] - 1).log_probs
        numbers: np.ndarray = np.array(scores.tolist(), np.float32)[mask[:, 1:].bool().numpy()]
        if not np.isfinite(numbers).all():
            raise model.invalid_number("a log-probability is not finite")
        return numbers
