"""Rows that are too long, truncated: every token of what remains is written down by hand, one letter a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import Stage
from rlhf.data.stage_dataset import StageData
from rlhf.data.toy_world import build_tokenizer
from rlhf.errors import DataError
from tests.data.rows import load as load_rows
from tests.data.rows import turns, write_jsonl

# Without merges each letter is a token: <user>Hi<eos><assistant> has 5.
LETTERS = build_tokenizer([], vocab_size=261)
TEMPLATE = "<user>{}<eos><assistant>"
HELD_OUT = {"prompt": "x", "response": "x", "chosen": "x", "rejected": "y"}


def spell(ids: list[int]) -> str:
    return "".join(LETTERS.convert_ids_to_tokens(ids)).replace("Ġ", " ").replace("Ċ", "\n")


def load(folder: Path, row: dict[str, Any], stage: Stage = "sft", *, bos: bool = False, **data: Any) -> StageData:
    """One row that is trained on, with room for 10 tokens of prompt and 4 of completion."""
    path = write_jsonl(folder / "rows.jsonl", [row])
    heldout = write_jsonl(folder / "held.jsonl", [HELD_OUT])
    limits: dict[str, Any] = {"max_prompt_length": 10, "max_completion_length": 4, "too_long": "truncate"} | data
    tokenizer = LETTERS
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer = build_tokenizer([], vocab_size=261)
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    return load_rows(tokenizer, {"path": path, "heldout": heldout, "stages": [stage]}, stage=stage, **limits)


def only(data: StageData) -> Any:
    (example,) = data.train
    return example


SYSTEM = {"role": "system", "content": "Be"}


@pytest.mark.parametrize(
    ("prompt", "template", "expected"),
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
def test_prompt_loses_its_oldest_text(tmp_path: Path, prompt: Any, template: bool, expected: str) -> None:
    most = 11 if isinstance(prompt, list) and prompt[0] == SYSTEM else 10
    row = {"prompt": prompt, "response": "ok"}
    example = only(load(tmp_path, row, chat_template=template, max_prompt_length=most))
    assert spell(example.prompt_ids) == expected
    assert spell(example.completion_ids).strip() == "ok<eos>"


def test_transcript_keeps_the_names_of_the_speakers(tmp_path: Path) -> None:
    row = {"prompt": "\n\nHuman: abcdefghij\n\nAssistant:", "response": "ok"}
    example = only(load(tmp_path, row, chat_template=False, max_prompt_length=26))
    assert spell(example.prompt_ids) == "Human: defghij\n\nAssistant:"


def test_template_of_the_source_stays(tmp_path: Path) -> None:
    row, heldout = {"prompt": "abcdefghij", "response": "ok"}, write_jsonl(tmp_path / "held.jsonl", [HELD_OUT])
    dataset = {"path": write_jsonl(tmp_path / "rows.jsonl", [row]), "heldout": heldout, "template": "Q: {prompt} A:"}
    options = {"chat_template": False, "too_long": "truncate", "max_prompt_length": 10}
    assert spell(only(load_rows(LETTERS, dataset | {"stages": ["sft"]}, **options)).prompt_ids) == "Q: ghij A:"
    row["prompt"] = turns("abcd", "efgh", "ij")
    write_jsonl(tmp_path / "rows.jsonl", [row])
    assert spell(only(load_rows(LETTERS, dataset | {"stages": ["sft"]}, **options)).prompt_ids) == "Q: ij A:"


def test_beginning_of_sequence_token_stays(tmp_path: Path) -> None:
    data = load(tmp_path, {"prompt": "abcdefghijkl", "response": "ok"}, bos=True, chat_template=False)
    tokens = only(data).prompt_ids
    assert len(tokens) == 10 and spell(tokens[1:]) == "defghijkl" and tokens[0] >= 261


def test_completion_loses_its_end_and_its_end_token(tmp_path: Path) -> None:
    example = only(load(tmp_path, {"prompt": "a", "response": "abcdef"}))
    assert spell(example.completion_ids) == "abcd"
    assert spell(only(load(tmp_path, {"prompt": "a", "response": "abc"})).completion_ids) == "abc<eos>"
    pair = only(load(tmp_path, {"prompt": "a", "chosen": "abcdef", "rejected": "no"}, "reward"))
    assert (spell(pair.chosen_ids), spell(pair.rejected_ids)) == ("abcd", "no<eos>")


def test_ppo_prompt_is_truncated_too(tmp_path: Path) -> None:
    assert spell(only(load(tmp_path, {"prompt": "abcdefghij"}, "ppo")).prompt_ids) == TEMPLATE.format("defghij")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "a", "chosen": "abcdef", "rejected": "abcdxy"}, {"stage": "reward"}, "1 chosen equals rejected"),
        # The template's own text may be too long.
        ({"prompt": "abcdefghij", "response": "ok"}, {"max_prompt_length": 3}, "1 prompt too long"),
        ({"prompt": "abcdefghij", "response": "b"}, {"too_long": "drop"}, "1 prompt too long"),
    ],
)
def test_row_that_truncation_cannot_save_is_dropped(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, row, **options)


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
