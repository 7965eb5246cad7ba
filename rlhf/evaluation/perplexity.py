"""A language model on text: how well it foretells each token, given those before it.

Rows flow in; for each model the negative log-likelihood of every row flows out, and what they say of it as numbers.
Which tokens are foretold is as in fine-tuning: of a prompt and its reply the reply's, its end token included
(`sft.loss_on`), of a text alone all but the first. What is longer than the model's room is read in windows of that
size, each half a window after the one before: every token is foretold once, from half a window of text at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.errors import ModelError
from rlhf.evaluation.rows import EvaluationRows, Measurement, encode_examples

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.config.schema import Config
    from rlhf.data.examples import Demonstration
    from rlhf.evaluation.models import LanguageModel

_LARGEST = 700.0  # exp(710) is beyond a float


class TextWindow(NamedTuple):
    """A part of a row, and the place in it of the first token that is foretold."""

    ids: list[int]
    first: int


class RowLikelihood(NamedTuple):
    """Of one row: the sum of -log p over the tokens that were foretold, in nats; and the bytes of what they say."""

    source: str
    nll: float
    tokens: int
    bytes: int


def split_windows(ids: list[int], first: int, room: int) -> list[TextWindow]:
    """Parts of `ids` that have `room` tokens at most, and together foretell each token from `first` on, once."""
    if len(ids) <= room:
        return [TextWindow(ids, first)]
    found: list[TextWindow] = []
    done, begin = first, 0
    while done < len(ids):
        end = min(begin + room, len(ids))
        if end > done:
            found.append(TextWindow(ids[begin:end], done - begin))
            done = end
        begin += room // 2
    return found


def measure_perplexity(
    writer: LanguageModel, found: EvaluationRows, config: Config, *, batch_size: int, show: bool = False
) -> Measurement:
    """Read all rows that the model can read, in their order.

    Raises:
        DataError: it can read none.
        ModelError: a likelihood is no finite number.
    """
    kept, report = encode_examples(found, config.data, writer, fits=False, show=show)
    parts = [split_windows(*_targets(example, config.sft.loss_on), writer.room) for example in kept]
    flat = [window for row in parts for window in row]
    pad: Any = writer.tokenizer.pad_token_id
    likelihoods = writer.device.each(
        [window.ids for window in flat],
        lambda **batch: _negative_log_likelihood(writer.module, **batch),
        pad=pad,
        batch_size=batch_size,
        numbers={"first": [window.first for window in flat]},
        description=f"{writer.name}: reading" if show else "",
    )
    values = iter(likelihoods)
    rows = []
    for example, row in zip(kept, parts, strict=True):
        nll, tokens = sum(next(values) for _ in row), sum(len(window.ids) - window.first for window in row)
        rows.append(RowLikelihood(example.row.source, nll, tokens, len((example.row.response or "").encode())))
    if wrong := next((row for row in rows if not math.isfinite(row.nll)), None):
        raise ModelError(
            f"{writer.name}: the likelihood of {wrong.source} is no finite number in {writer.device.precision.name}; "
            "try --precision fp32, or check the model's weights"
        )
    # What is foretold is the replies, and all of them.
    replies = config.sft.loss_on == "completion" and not report.truncated
    return Measurement(summarize_likelihoods(rows, replies=replies), rows, report)


def summarize_likelihoods(rows: Sequence[RowLikelihood], *, replies: bool = True) -> dict[str, Any]:
    """What the likelihoods say of the model; of `replies`, also in bits for each of their bytes."""
    nll, tokens, size = sum(row.nll for row in rows), sum(row.tokens for row in rows), sum(row.bytes for row in rows)
    return {
        "rows": len(rows),
        "tokens": tokens,
        "loss": nll / tokens,
        "perplexity": math.exp(min(nll / tokens, _LARGEST)),
        "bits_per_byte": nll / math.log(2) / size if replies else None,
    }


def _targets(example: Demonstration, loss_on: str) -> tuple[list[int], int]:
    """(the tokens of an example, the place of the first that is foretold), as `rlhf.data.batches.collate_sft`."""
    return example.prompt_ids + example.completion_ids, max(
        len(example.prompt_ids), 1
    ) if loss_on == "completion" else 1


def _negative_log_likelihood(module: Any, input_ids: Tensor, attention_mask: Tensor, first: Tensor) -> Tensor:
    """[B]: -log p, summed over each row's real tokens from its `first` on."""
    import torch

    from rlhf.losses.log_probs import masked
    from rlhf.models.forward import completion_log_probs

    found = completion_log_probs(module, input_ids, attention_mask, input_ids.shape[1] - 1).log_probs
    columns = torch.arange(1, input_ids.shape[1], device=input_ids.device)
    foretold = attention_mask[:, 1:] * (columns >= first[:, None])
    return -masked(found, foretold).sum(-1)
