"""Generate completions with a loaded language model, and compute the log-probabilities of completions.

Prompts and completions are token ids; generation uses the decoder of rollouts. Every batch has the same number of rows,
to keep shapes few: the last one is filled up with copies of its first row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.config.schema import SamplingConfig
from rlhf.data.batches import pad_left, pad_right
from rlhf.evaluation.models import LanguageModel
from rlhf.generation.decoder import Decoder
from rlhf.losses.log_probs import masked
from rlhf.models.forward import completion_log_probs, model_inputs

Ids = list[int]
Done = Callable[[int], None]
"""Called after each batch with its number of rows."""


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of generation, the same for each model; a completion has `max_tokens` tokens, its end included."""

    sampling: SamplingConfig
    max_tokens: int
    batch_size: int
    seed: int


@torch.no_grad()
def generate_completions(
    model: LanguageModel, prompts: Sequence[Ids], settings: GenerationSettings, done: Done
) -> list[Ids]:
    """Return the completion of each prompt, with its end token if it ends within `max_tokens`.

    Raises:
        OutOfMemory: the batch is too large.
        ModelError: the model's numbers are not finite.
    """
    device, longest = model.device, max(map(len, prompts))
    accelerator, pad = device.accelerator, _pad(model)
    decoder = Decoder(
        accelerator, eos_ids=model.end_ids, pad_id=pad, max_new_tokens=settings.max_tokens, shapes=device.shapes
    )
    decoder.random.manual_seed(settings.seed)
    completions: list[Ids] = []
    for real, (rows,) in _batches(settings.batch_size, prompts):
        ids, mask = accelerator.to_device(_left(model, rows, longest))
        with _computing(model, len(ids)):
            # From NaN no token can be drawn: its id would be outside the vocabulary.
            first = model.module(**model_inputs(model.module, ids, mask), logits_to_keep=1).logits
            _check(model, first.isnan().any().item())
            accelerator.step_boundary("write/check")
            drawn = decoder.generate(model.module, ids, mask, settings.sampling)
            lengths = drawn.mask.sum(1)
        accelerator.step_boundary("write/end")
        completions += [row[:length] for row, length in zip(drawn.ids.tolist(), lengths.tolist())][:real]
        done(real)
    decoder.release()
    return completions


@torch.no_grad()
def score_completions(
    model: LanguageModel, prompts: Sequence[Ids], completions: Sequence[Ids], settings: GenerationSettings, done: Done
) -> list[float]:
    """Return log p(completion | prompt) of each row, in nats: the sum over its tokens, at the sampling temperature.

    At temperature 0, which puts all probability on one token, temperature 1 is used.

    Raises:
        OutOfMemory, ModelError: as `generate_completions`.
    """
    device, longest = model.device, max(map(len, prompts))
    log_probs: list[float] = []
    for real, (rows, ends) in _batches(settings.batch_size, prompts, completions):
        right = pad_right(ends, device.shapes, settings.max_tokens, _pad(model))
        (ids, mask), (completion_ids, drawn) = device.accelerator.to_device((_left(model, rows, longest), right))
        with _computing(model, len(ids)):
            token_log_probs, _ = completion_log_probs(
                model.module,
                torch.cat([ids, completion_ids], 1),
                torch.cat([mask, drawn], 1),
                completion_ids.shape[1],
                temperature=settings.sampling.temperature or 1.0,
            )
            sums = masked(token_log_probs, drawn).sum(1)
        device.accelerator.step_boundary("write/read")
        log_probs += sums.tolist()[:real]
        _check(model, not all(map(math.isfinite, log_probs[-real:])))
        done(real)
    return log_probs


def _check(model: LanguageModel, wrong: bool) -> None:
    if wrong:
        raise model.invalid_number("its likelihoods are not finite")


def _computing(model: LanguageModel, rows: int) -> AbstractContextManager[None]:
    return model.device.forward_context(f"{rows} completions of {model.name}", "--batch-size or --max-tokens")


def _batches(most: int, *columns: Sequence[Ids]) -> Iterator[tuple[int, list[list[Ids]]]]:
    """Yield the number of real rows of each batch, and the batch's part of each column."""
    count = len(columns[0])
    size = min(most, count)
    for start in range(0, count, size):
        places = [place if place < count else start for place in range(start, start + size)]
        yield min(size, count - start), [[column[place] for place in places] for column in columns]


def _left(model: LanguageModel, rows: Sequence[Ids], longest: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask, [B, P] each, padded left, so that completions begin in one column."""
    return pad_left(rows, model.device.shapes, longest, _pad(model))


def _pad(model: LanguageModel) -> Any:
    return model.tokenizer.pad_token_id
