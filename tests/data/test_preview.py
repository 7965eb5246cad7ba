"""What is shown of a stage's rows is counted and decoded from the token ids that are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import Stage
from rlhf.data.examples import Demonstration
from rlhf.data.preview import decode_median_row, list_loss_parts, summarize_lengths
from rlhf.data.records import Message, Row
from rlhf.data.stage_dataset import StageData
from tests.data.rows import load, write_jsonl

ROW = Row((Message("user", "a"),), "a", "b", None, None, "")


def demonstrations(*sizes: tuple[int, int]) -> list[Any]:
    return [Demonstration([5] * prompt, [6] * completion, ROW) for prompt, completion in sizes]


def test_lengths_are_median_95th_percentile_and_longest() -> None:
    sizes = [(n, 2 * n) for n in range(1, 21)]  # prompts of 1 to 20 tokens
    data = StageData(demonstrations(*sizes[::2]), demonstrations(*sizes[1::2]), [])
    assert summarize_lengths(data) == {"prompt": (10, 19, 20), "completion": (20, 38, 40)}
    assert summarize_lengths(StageData(demonstrations((1, 1), (9, 2), (4, 3)), [], [])) == {
        "prompt": (4, 9, 9),
        "completion": (2, 3, 3),
    }


def test_example_is_of_median_length() -> None:
    class Lengths:
        def decode(self, ids: list[int], **options: Any) -> str:
            return f"{len(ids)}"

    data = StageData(demonstrations((1, 1), (90, 1), (3, 4)), demonstrations((2, 2)), [])
    assert decode_median_row(data, Lengths()) == [("prompt", "3"), ("completion", "4")]
    assert list_loss_parts(data, loss_on="all") == ("prompt", "completion")


@pytest.mark.parametrize(
    ("stage", "template", "expected", "parts"),
    [
        ("sft", True, [("prompt", "<user>Is it  1 ?<eos><assistant>"), ("completion", "Red.<eos>")], ("completion",)),
        ("sft", False, [("prompt", "Is it  1 ?"), ("completion", " Red.<eos>")], ("completion",)),
        (
            "reward",
            True,
            [("prompt", "<user>Is it  1 ?<eos><assistant>"), ("chosen", "Yes.<eos>"), ("rejected", "No.<eos>")],
            ("chosen", "rejected"),
        ),
        ("ppo", True, [("prompt", "<user>Is it  1 ?<eos><assistant>")], ()),
    ],
)
def test_example_is_what_the_model_sees(
    tokenizer: Any,
    tmp_path: Path,
    stage: Stage,
    template: bool,
    expected: list[tuple[str, str]],
    parts: tuple[str, ...],
) -> None:
    """Control tokens, white space and all."""
    row = {"prompt": "Is it  1 ?", "response": "Red.", "chosen": "Yes.", "rejected": "No."}
    path = write_jsonl(tmp_path / "rows.jsonl", [row, row, row, row | {"prompt": "other"}])
    heldout = write_jsonl(tmp_path / "heldout.jsonl", [row | {"prompt": "held out"}])
    data = load(tokenizer, {"path": path, "stages": [stage], "heldout": heldout}, stage=stage, chat_template=template)
    assert decode_median_row(data, tokenizer) == expected
    assert list_loss_parts(data) == parts
    assert [name for name, _ in expected] == list(summarize_lengths(data))
