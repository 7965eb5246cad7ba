"""An error about a source's rows says why they are left out, with the figures met, and names what would help."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import DataConfig, Stage
from rlhf.data import report as drop_reasons
from rlhf.data.prompt_encoding import encode_conversation
from rlhf.data.records import Message
from rlhf.data.report import REMEDIES, find_remedy
from rlhf.data.stage_dataset import StageData, load_stage
from rlhf.errors import DataError


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def load(tokenizer: Any, *datasets: dict[str, Any], stage: Stage = "sft", **data: Any) -> StageData:
    return load_stage(DataConfig(datasets=datasets, **data), stage, tokenizer, seed=0)


def test_every_reason_has_its_own_remedy() -> None:
    named = [value for name, value in vars(drop_reasons).items() if name.isupper() and isinstance(value, str)]
    assert len(named) > 15
    assert [reason for reason in named if find_remedy(reason) != REMEDIES[reason]] == []
    with pytest.raises(StopIteration):
        find_remedy("no reason at all")


SHORT = {"prompt": "cow", "response": "moo", "chosen": "moo", "rejected": "baa"}


@pytest.mark.parametrize(
    ("stage", "rows", "message"),
    [
        ("sft", [SHORT | {"prompt": "a" * n} for n in (40, 60)], "; raise data.max_prompt_length$"),
        ("sft", [SHORT | {"response": "a" * n} for n in (40, 60)], "; raise data.max_completion_length$"),
        ("reward", [{"prompt": "a", "response": "b"}] * 2, r"remove reward from this source's data.datasets.\*.stages"),
        (
            "sft",
            [{"prompt": "a"}],
            r"; name the column with the replies in data.datasets.\*.columns.response, or remove",
        ),
        (
            "reward",
            [SHORT | {"rejected": ""}],
            r"fill in the replies, or name their columns in data.datasets.\*.columns",
        ),
        ("reward", [SHORT | {"rejected": "moo"}], "2? chosen equals rejected .*; give two replies that differ$"),
        (
            "sft",
            [SHORT | {"response": "moo<eos>"}],
            "remove the tokenizer's control tokens from the replies, or set data.",
        ),
        ("ppo", [{"prompt": ""}], r"; name the column with the prompt in data.datasets.\*.columns.prompt$"),
        ("ppo", ['{"prompt": a}', '{"prompt": b}'], "; write one JSON object per line$"),
        ("ppo", ['"a"', '"b"'], '2 not an object .*; write each row as an object, {"prompt": ...}$'),
        ("ppo", [], "it has no rows; add some, or remove it from data.datasets"),
        # The reasons that dominate, at most two of them, speak; the same advice is given once.
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
def test_the_error_of_a_source_without_usable_rows_names_what_would_help(
    tokenizer: Any, tmp_path: Path, stage: Stage, rows: list[Any], message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", rows)
    limits = {"max_prompt_length": 30, "max_completion_length": 20}
    with pytest.raises(DataError, match=message) as error:
        load(tokenizer, {"path": path, "stages": [stage]}, stage=stage, **limits)
    assert "\n" not in str(error.value)


def test_a_source_of_fewer_prompts_than_stages_says_so(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [SHORT] * 3)
    for stage in ("reward", "ppo"):
        with pytest.raises(
            DataError, match=r"no usable row: it has too few distinct prompts for data.stage_split; add"
        ):
            load(tokenizer, {"path": path}, stage=stage)


def test_rows_that_are_too_long_are_told_with_the_lengths_met(tokenizer: Any, tmp_path: Path) -> None:
    rows = [SHORT | {"prompt": "a" * n} for n in (40, 60, 50)] + [SHORT | {"prompt": "cow " * 4, "chosen": "b" * 30}]
    path = write(tmp_path / "rows.jsonl", rows)
    prompts = [len(encode_conversation(tokenizer, [Message("user", "a" * n)], "template")) for n in (40, 60)]
    reply = len(tokenizer("b" * 30)["input_ids"]) + 1
    source, limits = {"path": path, "stages": ["reward"]}, {"max_prompt_length": 30, "max_completion_length": 20}
    with pytest.raises(DataError) as error:
        load(tokenizer, source, stage="reward", **limits)
    assert str(error.value) == (
        f"reward: {path}: no usable row: 3 prompt too long ({prompts[0]} to {prompts[1]} tokens, longest allowed 30; "
        f"first: rows.jsonl:1), 1 completion too long ({reply} tokens, longest allowed 20; first: rows.jsonl:4); "
        "raise data.max_prompt_length; raise data.max_completion_length"
    )


def test_a_template_that_refuses_all_rows_is_blamed_and_how_to_do_without_it_said(
    tokenizer: Any, tmp_path: Path
) -> None:
    refusing = copy.deepcopy(tokenizer)
    refusing.chat_template = "{{ raise_exception('no') }}"
    pairs = write(tmp_path / "rows.jsonl", [SHORT | {"prompt": f"cow {n}"} for n in range(100)])
    with pytest.raises(DataError, match=r"40 refused by the chat template .*, or set data.chat_template=false$"):
        load(refusing, {"path": pairs, "stages": ["sft", "reward"]}, stage="sft", stage_split=(2, 3, 0))


def test_too_few_rows_for_a_held_out_part_are_told_with_why_others_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [SHORT] + [SHORT | {"prompt": "a" * 40}] * 7)
    with pytest.raises(DataError) as error:
        load(tokenizer, {"path": path, "stages": ["sft"]}, max_prompt_length=30)
    assert str(error.value).startswith(
        f"sft: {path}: 1 usable row, but too few prompts for a held-out part; left out: 7 prompt too long"
    )
    assert str(error.value).endswith(
        "; raise data.max_prompt_length, or name a second source in data.datasets.*.heldout"
    )


def test_of_many_reasons_the_most_frequent_are_named(tokenizer: Any, tmp_path: Path) -> None:
    strange = [{"messages": [{"role": f"role {n}", "content": "a"}]} for n in range(50)]
    path = write(tmp_path / "rows.jsonl", [*strange, *["{"] * 3])
    with pytest.raises(DataError) as error:
        load(tokenizer, {"path": path, "stages": ["ppo"]}, stage="ppo")
    assert "no usable row: 3 not readable as JSON (first: rows.jsonl:51), 1 messages: unknown role" in str(error.value)
    assert ", and 45 more reasons; " in str(error.value)
    assert len(str(error.value)) < 600
