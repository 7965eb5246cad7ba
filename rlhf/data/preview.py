"""Describe the rows of a stage: their lengths in tokens, and one of them as the model sees it.

`describe_stage` returns plain values, for JSON and for `rlhf data` to print.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rlhf.config.schema import STAGES, Config, DataConfig, Stage
from rlhf.data.examples import (
    Demonstration,
    Pair,
    count_tokens,
    length_quantiles,
    max_completion_tokens,
    median_index,
    token_parts,
)
from rlhf.data.prompt_encoding import PromptFormat
from rlhf.data.report import DataReport
from rlhf.data.stage_dataset import LENGTH_QUANTILES, StageData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PROMPT_FORMATS = {
    "template": "the tokenizer's chat template",
    "transcript": "Human: ... Assistant: transcripts",
    "plain": "as they are (the tokenizer has no chat template)",
}


def describe_prompt_format(prompt_format: PromptFormat) -> str:
    """Return the format of most prompts in words, or the template of their source."""
    return _PROMPT_FORMATS.get(prompt_format) or f"written as {prompt_format!r}"


def summarize_lengths(data: StageData) -> dict[str, tuple[int, int, int]]:
    """Return the tokens of each part of all rows: (median, 95th percentile, longest).

    Parts are `prompt`, and `completion` in SFT, `chosen` and `rejected` of pairs. Each number is the length of an
    actual row (for an even number of rows, the median is the lower of the middle two).
    """
    train, heldout = count_tokens(data.train), count_tokens(data.heldout)
    counts = {name: lengths + heldout.get(name, lengths[:0]) for name, lengths in train.items()}
    quantiles = length_quantiles(counts, 0.5, 0.95, 1.0)
    return {name: (median, high, longest) for name, (median, high, longest) in quantiles.items()}


def decode_median_row(data: StageData, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Decode the parts of a training row of median length, control tokens included."""
    example = data.train[median_index(count_tokens(data.train))]
    return [(name, _decode(tokenizer, ids)) for name, ids in token_parts(example)]


def list_loss_parts(data: StageData, *, loss_on: Literal["completion", "all"] = "completion") -> tuple[str, ...]:
    """Return the parts whose tokens are in the loss of SFT, of the reward model or of DPO; none in PPO.

    Args:
        data: the stage's examples.
        loss_on: sft.loss_on.
    """
    first = data.train[0]
    if isinstance(first, Demonstration):
        return ("prompt", "completion") if loss_on == "all" else ("completion",)
    return ("chosen", "rejected") if isinstance(first, Pair) else ()


def describe_stage(stage: Stage, data: StageData, tokenizer: PreTrainedTokenizerBase, config: Config) -> dict[str, Any]:
    """Describe the data of a stage: `{"stage", "prompts", "split", "train", "heldout", "sources": [...]}`."""
    loss_parts = list_loss_parts(data, loss_on=config.sft.loss_on)
    return {
        "stage": stage,
        "prompts": data.prompt_format,
        "split": dict(zip(STAGES, config.data.stage_split, strict=True)),
        "train": len(data.train),
        "heldout": len(data.heldout),
        "sources": [_describe_source(report, tokenizer, loss_parts, config.data) for report in data.reports],
    }


def _describe_source(
    report: DataReport, tokenizer: PreTrainedTokenizerBase, loss_parts: tuple[str, ...], config: DataConfig
) -> dict[str, Any]:
    names = [f"p{share * 100:.0f}" if share < 1 else "max" for share in LENGTH_QUANTILES]
    example = report.example
    completion = (
        max_completion_tokens(example.row, example.prompt_ids, config) if example else config.max_completion_length
    )
    return {
        "source": report.source,
        "read_as": report.how,
        "rows": report.rows,
        "share": report.share,
        "train": report.train,
        "heldout": report.heldout,
        "truncated": report.truncated,
        "by_weight": report.by_weight,
        "dropped": [
            {"reason": reason, "rows": rows, "first": first} for reason, (rows, first) in report.dropped.items()
        ],
        "tokens": {part: dict(zip(names, counts, strict=True)) for part, counts in report.tokens.items()},
        "limits": {part: config.max_prompt_length if part == "prompt" else completion for part in report.tokens},
        "example": example
        and {
            "row": example.row.source,
            "parts": [
                {
                    "part": part,
                    "text": _decode(tokenizer, ids),
                    "tokens": [_decode_token(tokenizer, token) for token in ids],
                    "in_loss": part in loss_parts,
                }
                for part, ids in token_parts(example)
            ],
        },
    }


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _decode_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of one token, with the space before it that some tokenizers drop from a single token."""
    text = _decode(tokenizer, [token])
    name = str(tokenizer.convert_ids_to_tokens(token))
    return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text
