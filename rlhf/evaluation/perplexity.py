"""Measure how well a language model predicts text: the perplexity of rows.

`measure_perplexity` computes the negative log-likelihood of every row and summarizes them. The predicted tokens are
those of fine-tuning: for a prompt with a reply the reply's, its end token included (`sft.loss_on`), for a text alone
all but the first. Rows longer than the model's maximum length are read in windows of that length, each half a window
after the previous one: every token is predicted once, from at least half a window of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.evaluation.rows import EvaluationRows, Measurement, encode_examples
from rlhf.utils.statistics import perplexity

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.config.schema import Config
    from rlhf.data.examples import Demonstration
    from rlhf.evaluation.models import LanguageModel


class TextWindow(NamedTuple):
    """A part of a row, and the index in it of the first predicted token."""

    ids: list[int]
    first: int


class RowLikelihood(NamedTuple):
    """The sum of -log p over the predicted tokens of one row, in nats, and the bytes of their text."""

    source: str
    nll: float
    tokens: int
    bytes: int


def split_windows(ids: list[int], first: int, max_length: int) -> list[TextWindow]:
    """Split `ids` into windows of at most `max_length` tokens that predict each token from `first` on exactly once."""
    if len(ids) <= max_length:
        return [TextWindow(ids, first)]
    windows: list[TextWindow] = []
    done, begin = first, 0
    while done < len(ids):
        end = min(begin + max_length, len(ids))
        if end > done:
            windows.append(TextWindow(ids[begin:end], done - begin))
            done = end
        begin += max_length // 2
    return windows


def measure_perplexity(
    model: LanguageModel, source_rows: EvaluationRows, config: Config, *, batch_size: int, show: bool = False
) -> Measurement:
    """Measure all rows that the model can read, in order.

    Raises:
        DataError: the model can read none of them.
        ModelError: a likelihood is not finite.
    """
    examples, report = encode_examples(source_rows, config.data, model, fits=False, show=show)
    parts = [split_windows(*_targets(example, config.sft.loss_on), model.max_length) for example in examples]
    flat = [window for row in parts for window in row]
    pad: Any = model.tokenizer.pad_token_id
    likelihoods = model.device.map_rows(
        [window.ids for window in flat],
        lambda **batch: _negative_log_likelihood(model.module, **batch),
        pad=pad,
        batch_size=batch_size,
        extras={"first": [window.first for window in flat]},
        description=f"{model.name}: reading" if show else "",
    )
    values = iter(likelihoods)
    rows = []
    for example, row in zip(examples, parts, strict=True):
        nll, tokens = sum(next(values) for _ in row), sum(len(window.ids) - window.first for window in row)
        rows.append(RowLikelihood(example.row.source, nll, tokens, len((example.row.response or "").encode())))
    if wrong := next((row for row in rows if not math.isfinite(row.nll)), None):
        raise model.invalid_number(f"the likelihood of {wrong.source} is not finite")
    # True if exactly the replies are predicted, and all of their text.
    replies = config.sft.loss_on == "completion" and not report.truncated
    return Measurement(summarize_likelihoods(rows, replies=replies), rows, report)


def summarize_likelihoods(rows: Sequence[RowLikelihood], *, replies: bool = True) -> dict[str, Any]:
    """Return the numbers of docs/metrics.md; for `replies` also the bits per byte of their text."""
    nll, tokens, size = sum(row.nll for row in rows), sum(row.tokens for row in rows), sum(row.bytes for row in rows)
    return {
        "rows": len(rows),
        "tokens": tokens,
        "loss": nll / tokens,
        "perplexity": perplexity(nll / tokens),
        "bits_per_byte": nll / math.log(2) / size if replies else None,
    }


def _targets(example: Demonstration, loss_on: str) -> tuple[list[int], int]:
    """Return (the tokens of an example, the index of the first target), as `rlhf.data.batches.collate_sft`."""
    first = max(len(example.prompt_ids), 1) if loss_on == "completion" else 1
    return example.prompt_ids + example.completion_ids, first


def _negative_log_likelihood(module: Any, input_ids: Tensor, attention_mask: Tensor, first: Tensor) -> Tensor:
    """Return -log p, [B], summed over each row's real tokens from its `first` on."""
    import torch

    from rlhf.losses.log_probs import masked
    from rlhf.models.forward import completion_log_probs

    log_probs = completion_log_probs(module, input_ids, attention_mask, input_ids.shape[1] - 1).log_probs
    columns = torch.arange(1, input_ids.shape[1], device=input_ids.device)
    targets = attention_mask[:, 1:] * (columns >= first[:, None])
    return -masked(log_probs, targets).sum(-1)
