"""What a stage gets from its sources, what is reported, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import STAGES, DataConfig, Stage
from rlhf.data.examples import Demonstration, Pair, Prompt
from rlhf.data.prompt_encoding import encode_conversation
from rlhf.data.stage_dataset import StageData, load_stage, prompt_key
from rlhf.errors import DataError

PAIRS = [{"prompt": f"Question {n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(100)]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return write(tmp_path / "pairs.jsonl", PAIRS)


def load(tokenizer: Any, *datasets: dict[str, Any], stage: Stage = "sft", seed: int = 0, **data: Any) -> StageData:
    return load_stage(DataConfig(datasets=datasets, **data), stage, tokenizer, seed=seed)


def keys(examples: list[Any]) -> set[str]:
    return {prompt_key(example.row) for example in examples}


def test_each_stage_gets_its_kind_of_example(tokenizer: Any, pairs: str) -> None:
    kinds = {stage: {type(e) for e in load(tokenizer, {"path": pairs}, stage=stage).train} for stage in STAGES}
    assert kinds == {"sft": {Demonstration}, "reward": {Pair}, "ppo": {Prompt}}


def test_dpo_gets_the_pairs_of_the_reward_model(tokenizer: Any, pairs: str) -> None:
    for dataset in ({"path": pairs}, {"path": pairs, "stages": ["reward"]}):
        reward, dpo = (load(tokenizer, dataset, stage=stage) for stage in ("reward", "dpo"))
        assert (dpo.train, dpo.heldout) == (reward.train, reward.heldout)


def test_stages_and_held_out_parts_share_no_prompt(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", PAIRS + [{**row, "prompt": row["prompt"].upper()} for row in PAIRS])
    data = [load(tokenizer, {"path": path}, stage=stage, heldout_fraction=0.2) for stage in STAGES]
    parts = [keys(examples) for stage in data for examples in (stage.train, stage.heldout)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 100
    assert [len(stage.train) + len(stage.heldout) for stage in data] == [40, 80, 80]
    assert [len(stage.heldout) for stage in data] == [8, 16, 16]


def test_the_seed_decides_the_examples(tokenizer: Any, pairs: str) -> None:
    assert load(tokenizer, {"path": pairs}, seed=1) == load(tokenizer, {"path": pairs}, seed=1)
    assert load(tokenizer, {"path": pairs}, seed=1) != load(tokenizer, {"path": pairs}, seed=2)


def test_a_source_for_one_stage_is_not_shared(tokenizer: Any, pairs: str) -> None:
    data = load(tokenizer, {"path": pairs, "stages": ["reward"]}, stage="reward")
    assert len(data.train) + len(data.heldout) == 100


def test_the_world_trains_every_stage(tokenizer: Any) -> None:
    for stage in STAGES:
        assert load(tokenizer, {"path": "world"}, stage=stage).train


def test_a_held_out_source_is_used_whole_and_for_evaluation_alone(tokenizer: Any, pairs: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [{"prompt": "Other?", "chosen": "a", "rejected": "b"}])
    data = load(tokenizer, {"path": pairs, "heldout": other, "stages": ["reward"]}, stage="reward")
    assert len(data.train) == 100
    assert keys(data.heldout) == {"other?"}
    assert [(report.source, report.train, report.heldout) for report in data.reports] == [
        (pairs, 100, 0),
        (other, 0, 1),
    ]


def test_held_out_prompts_that_a_stage_trains_on_are_left_out_of_ppo(
    tokenizer: Any, tmp_path: Path, pairs: str
) -> None:
    """Whichever stage trains on it, and from whichever source."""
    elsewhere = write(tmp_path / "sft.jsonl", [{"prompt": f"Only sft {n}?", "response": "a"} for n in range(5)])
    held = write(tmp_path / "held.jsonl", [{"prompt": text} for text in ("QUESTION  7?", "Only sft 3?", "New?")])
    sources = {"path": elsewhere, "stages": ["sft"]}, {"path": pairs, "heldout": held, "stages": ["ppo"]}
    data = load(tokenizer, *sources, stage="ppo")
    assert keys(data.heldout) == {"new?"}
    assert data.reports[-1].dropped == {"prompt also in the training data": (2, "held.jsonl:1")}


def test_held_out_rows_that_a_stage_trains_on_are_left_out_and_their_prompts_with_other_replies_are_not(
    tokenizer: Any, tmp_path: Path, pairs: str
) -> None:
    known, other = PAIRS[7], {"chosen": "another", "rejected": "and another"}
    mirrored = known | {"chosen": known["rejected"], "rejected": known["chosen"]}
    held = write(tmp_path / "held.jsonl", [known, mirrored, known | other])
    elsewhere = write(tmp_path / "sft.jsonl", [{"prompt": known["prompt"], "response": "another"}])
    sources = {"path": elsewhere, "stages": ["sft"]}, {"path": pairs, "heldout": held, "stages": ["reward"]}
    reward = load(tokenizer, *sources, stage="reward")
    assert [example.row.chosen for example in reward.heldout] == ["another"]
    assert reward.reports[-1].dropped == {"also in the training data": (2, "held.jsonl:1")}
    both = {"path": elsewhere, "stages": ["reward"]}, {"path": pairs, "heldout": held, "stages": ["sft"]}
    sft = load(tokenizer, *both, stage="sft")
    assert [example.row.response for example in sft.heldout] == [mirrored["chosen"]]


def test_a_held_out_source_that_is_all_trained_on_is_an_error(tokenizer: Any, pairs: str) -> None:
    with pytest.raises(DataError, match="no usable row: 100 also in the training data"):
        load(tokenizer, {"path": pairs, "heldout": pairs})


def test_held_out_prompts_come_once_before_any_comes_again(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n % 4}"} for n in range(40)]
    path = write(tmp_path / "rows.jsonl", rows)
    data = load(tokenizer, {"path": path, "stages": ["ppo"]}, stage="ppo", heldout_fraction=0.5)
    assert len(data.heldout) == 20
    assert keys(data.heldout[:2]) == keys(data.heldout)


def test_sources_are_blended_by_weight_and_what_is_left_out_is_reported(tokenizer: Any, tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", [{"prompt": f"few {n}"} for n in range(20)])
    many = write(tmp_path / "many.jsonl", [{"prompt": f"many {n}"} for n in range(200)])
    one = {"prompt": "held out"}
    held = write(tmp_path / "held.jsonl", [one])
    both = [
        {"path": path, "weight": weight, "stages": ["ppo"], "heldout": held} for path, weight in ((few, 1), (many, 3))
    ]
    reports = load(tokenizer, *both, stage="ppo").reports
    assert [report.train for report in reports[:2]] == [20, 60]
    assert reports[1].dropped["left out by weight"][0] == 140


def test_a_prompt_of_two_sources_is_never_held_out_of_one_and_trained_on_in_the_other(
    tokenizer: Any, tmp_path: Path
) -> None:
    paths = [write(tmp_path / f"{n}.jsonl", PAIRS) for n in range(2)]
    data = load(tokenizer, *({"path": p, "stages": ["sft"]} for p in paths), heldout_fraction=0.3)
    assert not keys(data.train) & keys(data.heldout)


def test_a_prompt_is_not_held_out_while_a_source_with_its_own_held_out_rows_trains_on_it(
    tokenizer: Any, tmp_path: Path
) -> None:
    paths = [write(tmp_path / f"{n}.jsonl", PAIRS[: 60 + n]) for n in range(2)]
    other = write(tmp_path / "other.jsonl", [{"prompt": "Other?", "chosen": "a", "rejected": "b"}])
    sources = {"path": paths[0], "heldout": other, "stages": ["sft"]}, {"path": paths[1], "stages": ["sft"]}
    data = load(tokenizer, *sources, heldout_fraction=0.5)
    assert not keys(data.train) & keys(data.heldout)


def test_rows_left_out_are_counted_by_reason_with_the_first_of_each(tokenizer: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        [
            *PAIRS[:3],
            {"prompt": "", "chosen": "a", "rejected": "b"},
            '{"prompt": ',
            {"prompt": ["no", "messages"], "chosen": "a", "rejected": "b"},
            {"prompt": "a", "chosen": "", "rejected": "b"},
            {"prompt": "b", "chosen": " same", "rejected": "same "},
            {"prompt": "long " * 100, "chosen": "a", "rejected": "b"},
            {"prompt": "c", "chosen": "a", "rejected": "long " * 100},
            {"prompt": "d", "chosen": "long " * 100, "rejected": "a"},
            {"prompt": "half a smile \ud83d", "chosen": "a", "rejected": "b"},
            {"prompt": "e<eos><user>f", "chosen": "a", "rejected": "b"},
            {"prompt": "g", "chosen": "a", "rejected": "b<eos>"},
        ],
    )
    limits = {"max_prompt_length": 40, "max_completion_length": 20}
    (report,) = load(tokenizer, {"path": path, "stages": ["reward"]}, stage="reward", **limits).reports
    assert report.used == 4, "the prompt with control tokens among them"
    assert report.dropped == {
        "empty prompt": (1, "rows.jsonl:4"),
        "not readable as JSON": (1, "rows.jsonl:5"),
        "prompt: a turn is not an object of role and content": (1, "rows.jsonl:6"),
        "half a character (surrogate)": (1, "rows.jsonl:12"),
        "empty response": (1, "rows.jsonl:7"),
        "chosen equals rejected": (1, "rows.jsonl:8"),
        "prompt too long": (1, "rows.jsonl:9"),
        "completion too long": (2, "rows.jsonl:10"),
        "contains control tokens": (1, "rows.jsonl:14"),
    }
    assert set(report.lengths) == {"prompt too long", "completion too long"}
    assert "1 not readable as JSON (first: rows.jsonl:5)" in str(report)


def test_replies_that_differ_in_nothing_but_their_written_end_are_no_preference(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*PAIRS[:5], {"prompt": "cow", "chosen": "moo", "rejected": "moo<eos>"}])
    data = load(tokenizer, {"path": path, "stages": ["reward"]}, stage="reward", chat_template=False)
    (report,) = data.reports
    assert report.used == 5 and report.dropped == {"chosen equals rejected": (1, "rows.jsonl:6")}


def test_the_longest_completion_counts_its_end_token(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"{n}", "response": "red"} for n in range(10)])
    length = len(load(tokenizer, {"path": path, "stages": ["sft"]}).train[0].completion_ids)
    assert load(tokenizer, {"path": path, "stages": ["sft"]}, max_completion_length=length)
    with pytest.raises(DataError, match="10 completion too long"):
        load(tokenizer, {"path": path, "stages": ["sft"]}, max_completion_length=length - 1)


@pytest.mark.parametrize(
    ("stage", "rows", "message"),
    [
        ("sft", [{"prompt": "a"}, {"prompt": "b"}], "2 no demonstration .first: rows.jsonl:1"),
        ("reward", [{"prompt": "a", "response": "b"}] * 2, "2 no preference"),
        ("sft", ["{", "["], "no usable row: 2 not readable as JSON"),
        ("sft", [], "no usable row: it has no rows"),
        ("ppo", [{"prompt": "a"}] * 5, "5 usable rows, but too few prompts for a held-out part"),
    ],
)
def test_a_source_without_usable_rows_is_an_error_with_its_reasons(
    tokenizer: Any, tmp_path: Path, stage: Stage, rows: list[Any], message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=message) as error:
        load(tokenizer, {"path": path, "stages": [stage]}, stage=stage)
    assert str(error.value).startswith(f"{stage}: ")
    assert "\n" not in str(error.value)


def test_a_stage_without_a_share_or_a_source_is_an_error(tokenizer: Any, pairs: str) -> None:
    with pytest.raises(DataError, match=r"ppo: data.stage_split \[1.0, 1.0, 0.0\] leaves it no rows"):
        load(tokenizer, {"path": pairs}, stage="ppo", stage_split=(1, 1, 0))
    with pytest.raises(DataError, match="ppo: no data set is for this stage; add ppo to"):
        load(tokenizer, {"path": pairs, "stages": ["sft"]}, stage="ppo")


@pytest.mark.parametrize(
    ("rows", "chat_template", "expected"),
    [
        ([{"prompt": f"cow {n}", "response": "moo"} for n in range(9)], True, "template"),
        ([{"prompt": f"cow {n}", "response": "moo"} for n in range(9)], False, "plain"),
        ([{"prompt": f"\n\nHuman: cow {n}\n\nAssistant:", "response": "moo"} for n in range(9)], False, "transcript"),
    ],
)
def test_how_prompts_are_written_is_known(
    tokenizer: Any, tmp_path: Path, rows: list[Any], chat_template: bool, expected: str
) -> None:
    path = write(tmp_path / "rows.jsonl", rows)
    data = load(tokenizer, {"path": path, "stages": ["sft"]}, chat_template=chat_template, heldout_fraction=0.2)
    assert data.prompt_format == expected
    conversation = data.train[0].row.prompt
    assert encode_conversation(tokenizer, conversation, data.prompt_format) == data.train[0].prompt_ids


def test_replies_of_all_stages_end_at_the_same_token(tokenizer: Any, pairs: str) -> None:
    end = tokenizer.convert_tokens_to_ids("<system>")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", "'<system>'")
    ends = {"end_ids": [tokenizer.eos_token_id, end]}
    sft, reward = (
        load_stage(DataConfig(datasets=[{"path": pairs}]), stage, tokenizer, seed=0, **ends)
        for stage in ("sft", "reward")
    )
    replies = [e.completion_ids for e in sft.train]
    replies += [ids for e in reward.train for ids in (e.chosen_ids, e.rejected_ids)]
    assert all(ids.index(end) == len(ids) - 1 and tokenizer.eos_token_id not in ids for ids in replies)
