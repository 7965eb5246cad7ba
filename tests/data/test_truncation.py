"""Rows that are too long, truncated: every token of what remains is written down by hand, one letter a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import DataConfig, Stage
from rlhf.data.stage_dataset import StageData, load_stage
from rlhf.data.toy_world import build_tokenizer
from rlhf.errors import DataError

# Without merges each letter is a token: <user>Hi<eos><assistant> has 5.
LETTERS = build_tokenizer([], vocab_size=261)
TEMPLATE = "<user>{}<eos><assistant>"
HELD_OUT = {"prompt": "x", "response": "x", "chosen": "x", "rejected": "y"}


def spell(ids: list[int]) -> str:
    return "".join(LETTERS.convert_ids_to_tokens(ids)).replace("Ġ", " ").replace("Ċ", "\n")


def load(folder: Path, row: dict[str, Any], stage: Stage = "sft", *, bos: bool = False, **data: Any) -> StageData:
    """One row that is trained on, with room for 10 tokens of prompt and 4 of completion."""
    rows, held = folder / "rows.jsonl", folder / "held.jsonl"
    rows.write_text(json.dumps(row), encoding="utf-8")
    held.write_text(json.dumps(HELD_OUT), encoding="utf-8")
    limits = {"max_prompt_length": 10, "max_completion_length": 4, "too_long": "truncate"} | data
    config = DataConfig(datasets=[{"path": str(rows), "heldout": str(held), "stages": [stage]}], **limits)
    tokenizer = LETTERS
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer = build_tokenizer([], vocab_size=261)
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
        return load_stage(config, stage, tokenizer, seed=0)
    return load_stage(config, stage, tokenizer, seed=0)


def only(data: StageData) -> Any:
    (example,) = data.train
    return example


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


SYSTEM = {"role": "system", "content": "Be"}


@pytest.mark.parametrize(
    ("prompt", "template", "left"),
    [
        ("abcdefg", True, "<user>abcdefg<eos><assistant>"),  # 10 tokens: it fits
        ("abcdefghij", True, "<user>defghij<eos><assistant>"),
        ("abcdefghijkl", False, "cdefghijkl"),
        ([SYSTEM, *turns("abcdef")], True, "<system>Be<eos><user>cdef<eos><assistant>"),
        # The oldest turns go as wholes, the system message stays.
        (turns("abcd", "efgh", "ij"), True, "<user>ij<eos><assistant>"),
        ([SYSTEM, *turns("a", "b", "cd")], True, "<system>Be<eos><user>cd<eos><assistant>"),
        (turns("a", "b", "c"), True, "<user>a<eos><assistant>b<eos><user>c<eos><assistant>"),
        (turns("abcd", "efgh", "ijklmnopq"), True, "<user>klmnopq<eos><assistant>"),
    ],
)
def test_a_prompt_loses_its_oldest_text(tmp_path: Path, prompt: Any, template: bool, left: str) -> None:
    most = 11 if isinstance(prompt, list) and prompt[0] == SYSTEM else 10
    row = {"prompt": prompt, "response": "ok"}
    example = only(load(tmp_path, row, chat_template=template, max_prompt_length=most))
    assert spell(example.prompt_ids) == left
    assert spell(example.completion_ids).strip() == "ok<eos>"


def test_a_transcript_keeps_the_names_of_who_speaks(tmp_path: Path) -> None:
    row = {"prompt": "\n\nHuman: abcdefghij\n\nAssistant:", "response": "ok"}
    example = only(load(tmp_path, row, chat_template=False, max_prompt_length=26))
    assert spell(example.prompt_ids) == "Human: defghij\n\nAssistant:"


def test_the_token_that_begins_a_text_stays(tmp_path: Path) -> None:
    data = load(tmp_path, {"prompt": "abcdefghijkl", "response": "ok"}, bos=True, chat_template=False)
    tokens = only(data).prompt_ids
    assert len(tokens) == 10 and spell(tokens[1:]) == "defghijkl" and tokens[0] >= 261


def test_a_completion_loses_its_end_and_does_not_say_that_it_ends(tmp_path: Path) -> None:
    example = only(load(tmp_path, {"prompt": "a", "response": "abcdef"}))
    assert spell(example.completion_ids) == "abcd"
    assert spell(only(load(tmp_path, {"prompt": "a", "response": "abc"})).completion_ids) == "abc<eos>"
    pair = only(load(tmp_path, {"prompt": "a", "chosen": "abcdef", "rejected": "no"}, "reward"))
    assert (spell(pair.chosen_ids), spell(pair.rejected_ids)) == ("abcd", "no<eos>")


def test_replies_that_are_equal_once_they_are_cut_are_no_preference(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 chosen equals rejected"):
        load(tmp_path, {"prompt": "a", "chosen": "abcdef", "rejected": "abcdxy"}, "reward")


def test_a_prompt_to_answer_is_truncated_too(tmp_path: Path) -> None:
    assert spell(only(load(tmp_path, {"prompt": "abcdefghij"}, "ppo")).prompt_ids) == TEMPLATE.format("defghij")


def test_what_the_template_writes_alone_may_be_too_long(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 prompt too long"):
        load(tmp_path, {"prompt": "abcdefghij", "response": "ok"}, max_prompt_length=3)


@pytest.mark.parametrize(
    ("row", "truncated"),
    [
        ({"prompt": "a", "response": "b"}, 0),
        ({"prompt": "abcdefghij", "response": "b"}, 1),
        ({"prompt": "a", "response": "abcdef"}, 1),
        ({"prompt": turns("abcd", "efgh", "ij"), "response": "b"}, 1),
    ],
)
def test_truncated_rows_are_counted(tmp_path: Path, row: dict[str, Any], truncated: int) -> None:
    report = load(tmp_path, row).reports[0]
    assert report.truncated == truncated
    assert ("; 1 truncated" in str(report)) == bool(truncated)


def test_without_it_such_rows_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 prompt too long"):
        load(tmp_path, {"prompt": "abcdefghij", "response": "b"}, too_long="drop")
