"""What a model writes, and how likely it finds what was written: in batches, by the decoder that rollouts use.

A loaded language model and prompts of token ids flow in; completions of token ids flow out, and log-probabilities.
Every batch has the same number of rows, for shapes to be few: the last is filled up with copies of its first row.
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
from rlhf.data.batches import pad_right
from rlhf.errors import ModelError
from rlhf.evaluation.models import LanguageModel
from rlhf.generation.decoder import Decoder
from rlhf.losses.log_probs import masked
from rlhf.models.forward import completion_log_probs, model_inputs

Ids = list[int]
Done = Callable[[int], None]
"""Is told how many rows are done, batch by batch."""


@dataclass(frozen=True)
class GenerationSettings:
    """How completions are drawn, the same for each model.

    Attributes:
        max_tokens: the most that a completion has, its end included.
        batch_size: rows of a batch, at most.
        seed: decides what is drawn.
    """

    sampling: SamplingConfig
    max_tokens: int
    batch_size: int
    seed: int


@torch.no_grad()
def generate_completions(
    writer: LanguageModel, prompts: Sequence[Ids], manner: GenerationSettings, done: Done
) -> list[Ids]:
    """The completion of each prompt, with its end where it came to one in `max_tokens`.

    Raises:
        OutOfMemory: so many at a time are too many.
        ModelError: the model's numbers are not finite.
    """
    device, longest = writer.device, max(map(len, prompts))
    accelerator, pad = device.accelerator, _pad(writer)
    decoder = Decoder(
        accelerator, eos_ids=writer.end_ids, pad_id=pad, max_new_tokens=manner.max_tokens, shapes=device.shapes
    )
    accelerator.seed(manner.seed)
    written: list[Ids] = []
    for real, (rows,) in _batches(manner.batch_size, prompts):
        ids, mask = accelerator.to_device(_left(writer, rows, longest))
        with _computing(writer, len(ids)):
            # Of numbers that are none a token cannot be drawn: it would lie beyond the vocabulary.
            first = writer.module(**model_inputs(writer.module, ids, mask), logits_to_keep=1).logits
            _check(writer, first.isnan().any().item())
            accelerator.step_boundary("write/check")
            drawn = decoder.generate(writer.module, ids, mask, manner.sampling)
            lengths = drawn.mask.sum(1)
        accelerator.step_boundary("write/end")
        written += [row[:length] for row, length in zip(drawn.ids.tolist(), lengths.tolist())][:real]
        done(real)
    decoder.release()
    return written


@torch.no_grad()
def score_completions(
    writer: LanguageModel, prompts: Sequence[Ids], completions: Sequence[Ids], manner: GenerationSettings, done: Done
) -> list[float]:
    """log p(completion | prompt) of each row, in nats: the sum over its tokens, at the temperature of the drawing.

    At temperature 0, where all of p is on one token, it is that of temperature 1.

    Raises:
        OutOfMemory, ModelError: as `write`.
    """
    device, longest = writer.device, max(map(len, prompts))
    found: list[float] = []
    for real, (rows, ends) in _batches(manner.batch_size, prompts, completions):
        right = pad_right(ends, device.shapes, manner.max_tokens, _pad(writer))
        (ids, mask), (more, drawn) = device.accelerator.to_device((_left(writer, rows, longest), right))
        with _computing(writer, len(ids)):
            each, _ = completion_log_probs(
                writer.module,
                torch.cat([ids, more], 1),
                torch.cat([mask, drawn], 1),
                more.shape[1],
                temperature=manner.sampling.temperature or 1.0,
            )
            sums = masked(each, drawn).sum(1)
        device.accelerator.step_boundary("write/read")
        found += sums.tolist()[:real]
        _check(writer, not all(map(math.isfinite, found[-real:])))
        done(real)
    return found


def _check(writer: LanguageModel, wrong: bool) -> None:
    if wrong:
        raise ModelError(
            f"{writer.name}: its likelihoods are no finite numbers in {writer.device.precision.name}; try --precision "
            "fp32, or check the model's weights"
        )


def _computing(writer: LanguageModel, rows: int) -> AbstractContextManager[None]:
    return writer.device.computing(f"{rows} completions of {writer.name}", "--batch-size or --max-tokens")


def _batches(most: int, *columns: Sequence[Ids]) -> Iterator[tuple[int, list[list[Ids]]]]:
    """How many rows of a batch are real, and the batch's part of each column."""
    count = len(columns[0])
    size = min(most, count)
    for start in range(0, count, size):
        places = [place if place < count else start for place in range(start, start + size)]
        yield min(size, count - start), [[column[place] for place in places] for column in columns]


def _left(writer: LanguageModel, rows: Sequence[Ids], longest: int) -> tuple[Tensor, Tensor]:
    """ids and mask, [B, P] each, padded left, so that completions begin in one column."""
    ids, mask = pad_right([row[::-1] for row in rows], writer.device.shapes, longest, _pad(writer))
    return ids.flip(1), mask.flip(1)


def _pad(writer: LanguageModel) -> Any:
    return writer.tokenizer.pad_token_id
