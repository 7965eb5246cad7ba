"""Text without a prompt: SFT learns all of it as it stands, and no other stage takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerators import ShapePolicy
from rlhf.config.schema import DataConfig, Stage
from rlhf.data.batches import collate_sft
from rlhf.data.stage_dataset import StageData, load_stage
from rlhf.errors import DataError

TEXTS = [" A cow  says moo.\n", "= A title =", *(f"Line {n}." for n in range(40))]


def load(tokenizer: Any, folder: Path, texts: list[Any], stage: Stage = "sft", **options: Any) -> StageData:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    data = options.pop("data", {})
    dataset = {"path": str(path), "columns": {"text": "text"}, "stages": ["sft"], **options}
    return load_stage(DataConfig(datasets=[dataset], **data), stage, tokenizer, seed=0)


@pytest.mark.parametrize("chat_template", [True, False])
def test_all_of_a_text_is_learned_and_no_template_is_around_it(
    tokenizer: Any, tmp_path: Path, chat_template: bool
) -> None:
    data = load(tokenizer, tmp_path, TEXTS, data={"chat_template": chat_template})
    found = {tokenizer.decode(example.completion_ids): example for example in [*data.train, *data.heldout]}
    assert set(found) == {f"{text}<eos>" for text in TEXTS}
    assert all(example.prompt_ids == [] for example in found.values())
    batch = collate_sft(list(found.values())[:3], policy=ShapePolicy("dynamic"), maximum=600, pad_token_id=0)
    lengths = [len(example.completion_ids) for example in list(found.values())[:3]]
    # The first token has nothing before it that could predict it.
    assert batch["loss_mask"].sum(1).tolist() == [length - 1 for length in lengths]


def test_a_text_has_the_room_of_prompt_and_completion(tokenizer: Any, tmp_path: Path) -> None:
    limits = {"max_prompt_length": 6, "max_completion_length": 5}
    texts = [*(f"moo {n}" for n in range(9)), "x" * 10, "z" * 11]
    report = load(tokenizer, tmp_path, texts, data=limits).reports[0]
    assert report.dropped == {"completion too long": (1, "rows.jsonl:11")}
    assert report.lengths == {"completion too long": (12, 12, 11)}
    cut = load(tokenizer, tmp_path, texts, data=limits | {"too_long": "truncate"})
    assert tokenizer.encode("z" * 11) in [example.completion_ids for example in [*cut.train, *cut.heldout]]


def test_empty_texts_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    report = load(tokenizer, tmp_path, ["", " \n", None, *TEXTS]).reports[0]
    assert report.dropped == {"empty text": (3, "rows.jsonl:1")}


@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_no_other_stage_takes_texts(tokenizer: Any, tmp_path: Path, stage: Stage) -> None:
    with pytest.raises(DataError, match=r"\d+ text without a prompt .*data.datasets.\*.stages to sft alone"):
        load(tokenizer, tmp_path, TEXTS, stage, stages=["sft", stage], data={"stage_split": "0:1:1"})


def test_equal_texts_are_on_one_side(tokenizer: Any, tmp_path: Path) -> None:
    data = load(tokenizer, tmp_path, TEXTS * 2, data={"heldout_fraction": 0.3})
    sides = [{tuple(example.completion_ids) for example in side} for side in (data.train, data.heldout)]
    assert all(sides) and not sides[0] & sides[1]
