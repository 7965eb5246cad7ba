"""An error about a source's rows says why they are left out, with numbers, and names remedies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import Stage
from rlhf.data import report as drop_reasons
from rlhf.data.prompt_encoding import encode_conversation
from rlhf.data.records import Message
from rlhf.data.report import REMEDIES, find_remedy
from rlhf.errors import DataError
from tests.data.rows import load, write_jsonl

SHORT = {"prompt": "cow", "response": "moo", "chosen": "moo", "rejected": "baa"}
LIMITS = {"max_prompt_length": 30, "max_completion_length": 20}


def test_every_reason_has_its_own_remedy() -> None:
    named = [value for name, value in vars(drop_reasons).items() if name.isupper() and isinstance(value, str)]
    assert len(named) > 15
    assert [reason for reason in named if find_remedy(reason) != REMEDIES[reason]] == []


@pytest.mark.parametrize(
    ("stage", "rows", "message"),
    [
        ("sft", [SHORT | {"prompt": "a" * n} for n in (40, 60)], "; raise data.max_prompt_length$"),
        ("sft", [SHORT | {"response": "a" * n} for n in (40, 60)], "; raise data.max_completion_length$"),
        ("reward", [{"prompt": "a", "response": "b"}] * 2, r"2 no preference .*; remove reward from this source's"),
        ("sft", [{"prompt": "a"}], r"1 no demonstration .first: rows.jsonl:1.; name .*columns.response, or remove"),
        ("reward", [SHORT | {"rejected": ""}], r"fill in the replies, or name their columns in data.datasets"),
        ("reward", [SHORT | {"rejected": "moo"}], "1 chosen equals rejected .*; give two replies that differ$"),
        ("sft", [SHORT | {"response": "moo<eos>"}], "remove the tokenizer's control tokens from the replies, or set"),
        ("ppo", [{"prompt": ""}], r"; name the column with the prompt in data.datasets.\*.columns.prompt$"),
        ("ppo", ['{"prompt": a}', '{"prompt": b}'], "2 not readable as JSON .*; write one JSON object per line$"),
        ("ppo", ['"a"', '"b"'], '2 not an object .*; write each row as an object, {"prompt": ...}$'),
        ("ppo", [], "it has no rows; add some, or remove it from data.datasets"),
        # The reasons that dominate, at most two of them, have a remedy; the same one is given once.
        (
            "sft",
            [SHORT | {"prompt": "a" * 40}] + [{"prompt": ""}] * 9,
            "1 prompt too long .*rows.jsonl:1.; name[^;]*columns.prompt$",
        ),
        (
            "sft",
            [SHORT | {"prompt": "a" * 40}] * 4 + [{"prompt": ""}] * 5 + [SHORT | {"response": ""}] * 3,
            "row: 5 empty prompt .*, 4 prompt too long .*; name[^;]*columns.prompt; raise data.max_prompt_length$",
        ),
    ],
)
def test_source_without_usable_rows_names_remedies(
    tokenizer: Any, tmp_path: Path, stage: Stage, rows: list[Any], message: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=message) as error:
        load(tokenizer, {"path": path, "stages": [stage]}, stage=stage, **LIMITS)
    assert str(error.value).startswith(f"{stage}: {path}: no usable row: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_source_with_fewer_prompts_than_stages_is_an_error(tokenizer: Any, tmp_path: Path, stage: Stage) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [SHORT] * 3)
    with pytest.raises(DataError, match=r"no usable row: it has too few distinct prompts for data.stage_split; add"):
        load(tokenizer, {"path": path}, stage=stage)


def test_too_long_rows_are_reported_with_their_lengths(tokenizer: Any, tmp_path: Path) -> None:
    rows = [SHORT | {"prompt": "a" * n} for n in (40, 60, 50)] + [SHORT | {"prompt": "cow " * 4, "chosen": "b" * 30}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    prompts = [len(encode_conversation(tokenizer, [Message("user", "a" * n)], "template")) for n in (40, 60)]
    reply = len(tokenizer("b" * 30)["input_ids"]) + 1
    with pytest.raises(DataError) as error:
        load(tokenizer, {"path": path, "stages": ["reward"]}, stage="reward", **LIMITS)
    assert str(error.value) == (
        f"reward: {path}: no usable row: 3 prompt too long ({prompts[0]} to {prompts[1]} tokens, longest allowed 30; "
        f"first: rows.jsonl:1), 1 completion too long ({reply} tokens, longest allowed 20; first: rows.jsonl:4); "
        "raise data.max_prompt_length; raise data.max_completion_length"
    )


def test_template_that_refuses_all_rows_is_named(tokenizer: Any, tmp_path: Path) -> None:
    refusing = copy.deepcopy(tokenizer)
    refusing.chat_template = "{{ raise_exception('no') }}"
    pairs = write_jsonl(tmp_path / "rows.jsonl", [SHORT | {"prompt": f"cow {n}"} for n in range(100)])
    with pytest.raises(DataError, match=r"40 refused by the chat template .*, or set data.chat_template=false$"):
        load(refusing, {"path": pairs, "stages": ["sft", "reward"]}, stage="sft", stage_split=(2, 3, 0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "response": "b"}] * 5, "5 usable rows, but too few prompts .*; name a second source in "),
        ([SHORT, *[SHORT | {"prompt": "a" * 40}] * 7], "1 usable row, .*; left out: 7 prompt too long .*, or name a "),
    ],
)
def test_too_few_prompts_for_a_heldout_part(tokenizer: Any, tmp_path: Path, rows: list[Any], message: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=f"^sft: {path}: {message}"):
        load(tokenizer, {"path": path, "stages": ["sft"]}, max_prompt_length=30)


def test_only_the_most_frequent_reasons_are_listed(tokenizer: Any, tmp_path: Path) -> None:
    strange = [{"messages": [{"role": f"role {n}", "content": "a"}]} for n in range(50)]
    path = write_jsonl(tmp_path / "rows.jsonl", [*strange, *["{"] * 3])
    with pytest.raises(DataError) as error:
        load(tokenizer, {"path": path, "stages": ["ppo"]}, stage="ppo")
    assert "no usable row: 3 not readable as JSON (first: rows.jsonl:51), 1 messages: unknown role" in str(error.value)
    assert ", and 45 more reasons; " in str(error.value)
    assert len(str(error.value)) < 600
