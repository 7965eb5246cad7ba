"""The rows of a stage: shares of the sources, held-out rows, weights; and the check of a sample in advance."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from accelerators import ShapePolicy
from rlhf.config.schema import STAGES, DataConfig, Stage
from rlhf.data import examples as examples_module
from rlhf.data import stage_dataset
from rlhf.data.batches import collate_sft
from rlhf.data.examples import Demonstration, Pair, Prompt
from rlhf.data.load_sources import read_sources
from rlhf.data.prompt_encoding import encode_conversation
from rlhf.data.stage_dataset import CHECK_SAMPLE, check_stage, load_stage, prompt_key, select_by_weight, split_by_key
from rlhf.errors import DataError
from tests.data.rows import load, write_jsonl

PAIRS = [{"prompt": f"Question {n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(100)]
OTHER = [{"prompt": "Other?", "chosen": "a", "rejected": "b"}]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "pairs.jsonl", PAIRS)


def keys(examples: Any) -> set[str]:
    return {prompt_key(example.row) for example in examples}


def test_each_stage_gets_its_kind_of_example(tokenizer: Any, pairs: str) -> None:
    kinds = {stage: {type(e) for e in load(tokenizer, {"path": pairs}, stage=stage).train} for stage in STAGES}
    assert kinds == {"sft": {Demonstration}, "reward": {Pair}, "ppo": {Prompt}}


def test_dpo_gets_the_pairs_of_the_reward_model(tokenizer: Any, pairs: str) -> None:
    for dataset in ({"path": pairs}, {"path": pairs, "stages": ["reward"]}):
        reward, dpo = (load(tokenizer, dataset, stage=stage) for stage in ("reward", "dpo"))
        assert (dpo.train, dpo.heldout) == (reward.train, reward.heldout)


def test_stages_and_heldout_parts_share_no_prompt(tokenizer: Any, tmp_path: Path) -> None:
    rows = PAIRS + [{**row, "prompt": f" {row['prompt'].upper()}\n"} for row in PAIRS]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = [load(tokenizer, {"path": path}, stage=stage, heldout_fraction=0.2) for stage in STAGES]
    parts = [keys(examples) for stage in data for examples in (stage.train, stage.heldout)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 100
    assert [len(stage.train) + len(stage.heldout) for stage in data] == [40, 80, 80]
    assert [len(stage.heldout) for stage in data] == [8, 16, 16]


def test_load_stage_depends_on_the_seed(tokenizer: Any, pairs: str) -> None:
    data = [load(tokenizer, {"path": pairs}, seed=seed) for seed in (1, 1, 2)]
    assert data[0] == data[1] != data[2]


def test_source_for_one_stage_is_not_shared(tokenizer: Any, pairs: str) -> None:
    data = load(tokenizer, {"path": pairs, "stages": ["reward"]}, stage="reward")
    assert len(data.train) + len(data.heldout) == 100


def test_heldout_source_is_used_whole_for_evaluation_alone(tokenizer: Any, pairs: str, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", OTHER)
    data = load(tokenizer, {"path": pairs, "heldout": other, "stages": ["reward"]}, stage="reward")
    assert len(data.train) == 100 and keys(data.heldout) == {"other?"}
    counts = [(report.source, report.train, report.heldout) for report in data.reports]
    assert counts == [(pairs, 100, 0), (other, 0, 1)]


def test_ppo_heldout_prompts_in_any_training_source_are_dropped(tokenizer: Any, tmp_path: Path, pairs: str) -> None:
    sft = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": f"Only sft {n}?", "response": "a"} for n in range(5)])
    rows = [{"prompt": text} for text in ("QUESTION  7?", "Only sft 3?", "New?")]
    heldout = write_jsonl(tmp_path / "held.jsonl", rows)
    sources = {"path": sft, "stages": ["sft"]}, {"path": pairs, "heldout": heldout, "stages": ["ppo"]}
    data = load(tokenizer, *sources, stage="ppo")
    assert keys(data.heldout) == {"new?"}
    assert data.reports[-1].dropped == {"prompt also in the training data": (2, "held.jsonl:1")}


def test_heldout_rows_in_training_data_are_dropped(tokenizer: Any, tmp_path: Path, pairs: str) -> None:
    """Their prompts with other replies stay."""
    known = PAIRS[7]
    mirrored = known | {"chosen": known["rejected"], "rejected": known["chosen"]}
    other = known | {"chosen": "another", "rejected": "and another"}
    heldout = write_jsonl(tmp_path / "held.jsonl", [known, mirrored, other])
    sft_file = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": known["prompt"], "response": "another"}])
    sources = {"path": sft_file, "stages": ["sft"]}, {"path": pairs, "heldout": heldout, "stages": ["reward"]}
    reward = load(tokenizer, *sources, stage="reward")
    assert [example.row.chosen for example in reward.heldout] == ["another"]
    assert reward.reports[-1].dropped == {"also in the training data": (2, "held.jsonl:1")}
    sources = {"path": sft_file, "stages": ["reward"]}, {"path": pairs, "heldout": heldout, "stages": ["sft"]}
    sft = load(tokenizer, *sources, stage="sft")
    assert [example.row.response for example in sft.heldout] == [mirrored["chosen"]]
    with pytest.raises(DataError, match="no usable row: 100 also in the training data"):
        load(tokenizer, {"path": pairs, "heldout": pairs})


def test_heldout_prompts_come_once_before_any_repeats(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n % 4}"} for n in range(40)])
    data = load(tokenizer, {"path": path, "stages": ["ppo"]}, stage="ppo", heldout_fraction=0.5)
    assert len(data.heldout) == 20
    assert keys(data.heldout[:2]) == keys(data.heldout)


def test_sources_are_blended_by_weight(tokenizer: Any, tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", [{"prompt": f"few {n}"} for n in range(20)])
    many = write_jsonl(tmp_path / "many.jsonl", [{"prompt": f"many {n}"} for n in range(200)])
    options = {"stages": ["ppo"], "heldout": write_jsonl(tmp_path / "held.jsonl", [{"prompt": "held out"}])}
    sources = {"path": few, "weight": 1, **options}, {"path": many, "weight": 3, **options}
    reports = load(tokenizer, *sources, stage="ppo").reports
    assert [report.train for report in reports[:2]] == [20, 60]
    assert [report.by_weight for report in reports[:2]] == [0, 140] and not reports[1].dropped
    assert str(reports[1]).endswith("60 rows for training, 0 held out; 140 more not used (data.datasets.*.weight)")
    whole = load(tokenizer, *({"path": path, **options} for path in (few, many)), stage="ppo").reports
    assert [report.train for report in whole[:2]] == [20, 200], "all rows, if no weight is set"


def test_text_without_prompts_is_for_sft_alone(tokenizer: Any, tmp_path: Path, pairs: str) -> None:
    """All its rows, and none of another source's."""
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"body": f"text {n}"} for n in range(30)])
    sources = {"path": pairs}, {"path": texts, "columns": {"text": "body"}}
    sft, reward = (load(tokenizer, *sources, stage=stage) for stage in ("sft", "reward"))
    assert [(report.source, report.used) for report in sft.reports] == [(pairs, 20), (texts, 30)]
    assert [(report.source, report.used) for report in reward.reports] == [(pairs, 40)]
    with pytest.raises(DataError, match="ppo: no data set is for this stage"):
        load(tokenizer, sources[1], stage="ppo")


@pytest.mark.parametrize("first_has_heldout", [False, True])
def test_prompt_of_two_sources_is_on_one_side(tokenizer: Any, tmp_path: Path, first_has_heldout: bool) -> None:
    """Also if one of them has a held-out source, and so trains on all of its rows."""
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", PAIRS[: 60 + n]) for n in range(2)]
    heldout = {"heldout": write_jsonl(tmp_path / "other.jsonl", OTHER)} if first_has_heldout else {}
    sources = {"path": paths[0], "stages": ["sft"], **heldout}, {"path": paths[1], "stages": ["sft"]}
    data = load(tokenizer, *sources, heldout_fraction=0.5)
    assert not keys(data.train) & keys(data.heldout)


def test_dropped_rows_are_counted_by_reason(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
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
    ]
    dataset = {"path": write_jsonl(tmp_path / "rows.jsonl", rows), "stages": ["reward"]}
    (report,) = load(tokenizer, dataset, stage="reward", max_prompt_length=40, max_completion_length=20).reports
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


def test_replies_with_the_same_tokens_are_no_preference(tokenizer: Any, tmp_path: Path) -> None:
    rows = [*PAIRS[:5], {"prompt": "cow", "chosen": "moo", "rejected": "moo<eos>"}]
    dataset = {"path": write_jsonl(tmp_path / "rows.jsonl", rows), "stages": ["reward"]}
    (report,) = load(tokenizer, dataset, stage="reward", chat_template=False).reports
    assert report.used == 5 and report.dropped == {"chosen equals rejected": (1, "rows.jsonl:6")}


def test_completion_limit_counts_the_end_token(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n}", "response": "red"} for n in range(10)])
    length = len(load(tokenizer, {"path": path, "stages": ["sft"]}).train[0].completion_ids)
    assert load(tokenizer, {"path": path, "stages": ["sft"]}, max_completion_length=length)
    with pytest.raises(DataError, match="10 completion too long"):
        load(tokenizer, {"path": path, "stages": ["sft"]}, max_completion_length=length - 1)


def test_stage_without_share_or_source_is_an_error(tokenizer: Any, pairs: str) -> None:
    with pytest.raises(DataError, match=r"ppo: data.stage_split \[1.0, 1.0, 0.0\] leaves it no rows"):
        load(tokenizer, {"path": pairs}, stage="ppo", stage_split=(1, 1, 0))
    with pytest.raises(DataError, match="ppo: no data set is for this stage; add ppo to"):
        load(tokenizer, {"path": pairs, "stages": ["sft"]}, stage="ppo")


@pytest.mark.parametrize(
    ("prompt", "chat_template", "expected"),
    [
        ("cow {}", True, "template"),
        ("cow {}", False, "plain"),
        ("\n\nHuman: cow {}\n\nAssistant:", False, "transcript"),
        ("\n\nHuman: cow {}\n\nAssistant:", False, "Q: {prompt} A:"),
    ],
)
def test_prompt_format_encodes_conversations_as_in_training(
    tokenizer: Any, tmp_path: Path, prompt: str, chat_template: bool, expected: str
) -> None:
    rows = [{"prompt": prompt.format(n), "response": "moo"} for n in range(9)]
    dataset = {"path": write_jsonl(tmp_path / "rows.jsonl", rows), "stages": ["sft"]}
    dataset |= {"template": expected} if "{prompt}" in expected else {}
    data = load(tokenizer, dataset, chat_template=chat_template, heldout_fraction=0.2)
    assert data.prompt_format == expected
    conversation = data.train[0].row.prompt
    assert encode_conversation(tokenizer, conversation, data.prompt_format) == data.train[0].prompt_ids


def test_template_is_written_around_prompts_of_its_source(tokenizer: Any, tmp_path: Path, pairs: str) -> None:
    """The split of the rows does not depend on it."""
    dataset = {"path": pairs, "template": " Human: {prompt} Assistant:"}
    bare, framed = (
        load(tokenizer, source, stage="reward", chat_template=False) for source in ({"path": pairs}, dataset)
    )
    assert framed.prompt_format == framed.summary["prompt_format"] == dataset["template"]
    assert [example.row.chosen for example in framed.train] == [example.row.chosen for example in bare.train]
    example = framed.train[0]
    number = example.row.chosen.removeprefix("yes ")
    text = f" Human: Question {number}? Assistant:"
    assert example.prompt_ids == tokenizer(text)["input_ids"]
    assert example.prompt_ids + example.chosen_ids == tokenizer(f"{text} yes {number}<eos>")["input_ids"]
    assert (
        framed.reports[0].how
        == "prompt: prompt, chosen: chosen, rejected: rejected, template: ' Human: {prompt} Assistant:'"
    )


def test_template_with_a_chat_template_is_an_error(tokenizer: Any, pairs: str) -> None:
    with pytest.raises(DataError) as error:
        load(tokenizer, {"path": pairs}, {"path": pairs, "template": "Q: {prompt}"})
    assert str(error.value) == (
        "data.datasets.1.template: the tokenizer's chat template writes the prompts, got 'Q: {prompt}'; set "
        "data.chat_template=false, or remove the template"
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("other_stages", [["sft"], ["sft", "reward"]])
def test_every_source_is_held_out_in_proportion(
    tokenizer: Any, tmp_path: Path, other_stages: list[str], seed: int
) -> None:
    shared = write_jsonl(tmp_path / "shared.jsonl", PAIRS * 2)
    other = write_jsonl(tmp_path / "other.jsonl", [{**row, "prompt": f"Other {row['prompt']}"} for row in PAIRS])
    sources = ({"path": shared}, {"path": other, "stages": other_stages})
    data = load(tokenizer, *sources, stage="sft", heldout_fraction=0.2, seed=seed)
    for report in data.reports:
        assert report.heldout == pytest.approx(0.2 * report.used, abs=2)


def test_prompt_in_a_template_and_without_is_on_one_side(tokenizer: Any, tmp_path: Path, pairs: str) -> None:
    copied = write_jsonl(tmp_path / "copy.jsonl", PAIRS)
    sources = {"path": pairs, "template": "Q: {prompt}", "stages": ["sft"]}, {"path": copied, "stages": ["sft"]}
    data = load(tokenizer, *sources, heldout_fraction=0.5, chat_template=False)
    assert not keys(data.train) & keys(data.heldout)


def save_splits(folder: Path, **splits: list[dict[str, str]]) -> str:
    from datasets import Dataset, DatasetDict

    DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(folder)
    return str(folder)


def test_heldout_split_is_used_whole_for_evaluation_alone(tokenizer: Any, tmp_path: Path) -> None:
    path = save_splits(tmp_path / "set", train=PAIRS[:60], test=[PAIRS[0], *PAIRS[60:]])
    dataset = {"path": path, "heldout_split": "test", "stages": ["reward"], "limit": 50, "template": "Q: {prompt}"}
    data = load(tokenizer, dataset, stage="reward", chat_template=False)
    assert len(data.train) == 50 and not keys(data.train) & keys(data.heldout)
    trained, heldout = data.reports
    assert (trained.source, trained.train, trained.heldout) == (path, 50, 0)
    assert heldout.source == f"{path}, split test" and heldout.heldout == len(data.heldout)
    dropped = heldout.dropped.get("also in the training data", (0, ""))[0]
    assert heldout.heldout + dropped == 41 and heldout.heldout >= 40
    assert {example.row.text[:3] for example in data.heldout} == {"Q: "}


def test_heldout_split_of_a_source_without_splits_is_an_error(tokenizer: Any, tmp_path: Path, pairs: str) -> None:
    from datasets import Dataset

    folder = tmp_path / "one"
    Dataset.from_list(PAIRS).save_to_disk(folder)
    for path in (pairs, str(folder), "world"):
        with pytest.raises(DataError) as error:
            load(tokenizer, {"path": path, "heldout_split": "test"})
        assert str(error.value) == (
            f"{path}: has no splits, got heldout_split 'test'; name a second source in data.datasets.*.heldout, or "
            "remove heldout_split"
        )
    path = save_splits(tmp_path / "set", train=PAIRS)
    with pytest.raises(DataError, match="no split 'test'; found: train; set `split`, or `heldout_split`"):
        load(tokenizer, {"path": path, "heldout_split": "test"})


def test_replies_of_all_stages_end_at_the_same_token(tokenizer: Any, pairs: str) -> None:
    end = tokenizer.convert_tokens_to_ids("<system>")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", "'<system>'")
    config, ends = DataConfig(datasets=[{"path": pairs}]), [tokenizer.eos_token_id, end]
    sft, reward = (load_stage(config, stage, tokenizer, seed=0, end_ids=ends) for stage in ("sft", "reward"))
    replies = [example.completion_ids for example in sft.train]
    replies += [ids for example in reward.train for ids in (example.chosen_ids, example.rejected_ids)]
    assert all(ids.index(end) == len(ids) - 1 and tokenizer.eos_token_id not in ids for ids in replies)


SHARES = {"sft": 2.0, "reward": 4.0, "ppo": 4.0}


def lists(parts: dict[str, Any]) -> dict[str, list[int]]:
    return {name: items.tolist() for name, items in parts.items()}


def parts_of(count: int, shares: dict[str, float] = SHARES, *, seed: int = 0, groups: int | None = None):
    return lists(split_by_key((str(item % (groups or count)) for item in range(count)), shares, seed=seed))


def test_split_by_key_keeps_proportions_and_every_item() -> None:
    parts = parts_of(1000)
    assert {name: len(items) for name, items in parts.items()} == {"sft": 200, "reward": 400, "ppo": 400}
    assert sorted(item for items in parts.values() for item in items) == list(range(1000))
    assert parts_of(100, seed=3) == parts_of(100, seed=3) != parts_of(100, seed=4)
    groups = [{item % 30 for item in items} for items in parts_of(1000, groups=30).values()]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 30, "items of one key stay together"
    assert [len(items) for items in parts_of(10, {"a": 1.0, "b": 0.0, "c": 1.0}).values()] == [5, 0, 5]


@pytest.mark.parametrize("shares", [SHARES, {"train": 0.95, "heldout": 0.05}, {"a": 1.0, "b": 98.0, "c": 1.0}])
def test_split_by_key_leaves_no_part_empty(shares: dict[str, float]) -> None:
    for seed in range(10):
        for count in range(len(shares), 12):
            assert all(parts_of(count, shares, seed=seed).values())


def test_split_by_key_with_few_or_uneven_keys_loses_nothing() -> None:
    assert sorted(map(len, parts_of(2).values())) == [0, 1, 1]
    assert parts_of(0) == {"sft": [], "reward": [], "ppo": []}
    parts = lists(split_by_key(map(str, [0] * 90 + list(range(1, 11))), SHARES, seed=0))
    assert all(parts.values()) and sum(map(len, parts.values())) == 100


@pytest.mark.parametrize(
    ("counts", "weights", "sizes"),
    [
        ([100, 1000], [1.0, 3.0], [100, 300]),
        ([5], [0.1], [5]),
        ([0, 5], [1.0, 1.0], [0, 5]),
        ([100, 40, 1000], [1.0, "all", 3.0], [100, 40, 300]),
        ([100, 40], ["all", "all"], [100, 40]),
    ],
)
def test_select_by_weight_repeats_no_row(counts: list[int], weights: list[Any], sizes: list[int]) -> None:
    selected = select_by_weight(counts, weights, seed=0)
    assert [len(set(rows)) for rows in selected] == [len(rows) for rows in selected] == sizes
    assert all(set(rows) <= set(range(count)) for rows, count in zip(selected, counts, strict=True))
    assert select_by_weight(counts, weights, seed=0) == selected
    assert (select_by_weight(counts, weights, seed=1) == selected) == (sizes == counts)


LIMITS: dict[str, Any] = {"max_prompt_length": 30, "max_completion_length": 20}
BROKEN = ({"prompt": "a" * 40}, {"chosen": "b" * 40}, {"chosen": "baa"}, {"chosen": "a<eos>"}, {"prompt": 3})


def outcome(call: Any, *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except DataError as error:
        return str(error)
    return "success"


def draw_rows(rng: random.Random, chosen: str = "moo") -> list[dict[str, Any]]:
    """Up to 30 rows of few prompts, nearly all usable or nearly none; the usable ones may come last."""
    usable, prompts = rng.choice([0.1, 0.3, 0.9, 1.0, 1.0]), rng.choice([1, 10, 30, 30])
    rows = []
    for _ in range(rng.choice([0, 5, 30, 30, 30])):
        row: dict[str, Any] = {"prompt": f"Question {rng.randrange(prompts)}?", "chosen": chosen, "rejected": "baa"}
        rows.append(row | (rng.choice(BROKEN) if rng.random() > usable else {}))
    return sorted(rows, key=lambda row: -len(str(row))) if rng.random() < 0.5 else rows


def draw_config(rng: random.Random, folder: Path) -> DataConfig:
    datasets = []
    for number in range(rng.choice([1, 1, 2, 3])):
        path = write_jsonl(folder / f"{number}.jsonl", draw_rows(rng))
        heldout = write_jsonl(folder / f"{number}-heldout.jsonl", draw_rows(rng, rng.choice(["moo", "Moo"])))
        stages = STAGES if rng.random() < 0.7 else rng.sample(STAGES, rng.randint(1, 2))
        dataset = {"path": path, "stages": stages, "weight": rng.choice([1, 3])}
        datasets.append(dataset | ({"heldout": heldout} if rng.random() < 0.25 else {}))
    return DataConfig(datasets=datasets, heldout_fraction=rng.choice([0.05, 0.5, 0.95]), **LIMITS)


def test_check_stage_agrees_with_load_stage(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_dataset, "CHECK_SAMPLE", 2)
    outcomes = []
    for seed in range(40):
        config = draw_config(random.Random(seed), tmp_path)
        for stage in STAGES:
            whole = outcome(load_stage, config, stage, tokenizer, seed=seed)
            assert outcome(check_stage, config, stage, tokenizer, seed=seed) == whole, seed
            sampled = outcome(load_stage, config, stage, tokenizer, seed=seed, sample=2)
            outcomes.append((sampled == "success", whole == "success"))
    counts = {pair: outcomes.count(pair) for pair in ((True, True), (False, True), (False, False))}
    assert min(counts.values()) > 4, "the rows are such that all of these happen"
    assert (True, False) not in outcomes


@pytest.mark.parametrize("stage", STAGES)
def test_check_stage_tokenizes_all_rows_only_if_needed(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    encode, tokenized = examples_module.encode_prompts, []

    def counted(tokenizer: Any, rows: Any, **options: Any) -> Any:
        tokenized.append(len(rows))
        return encode(tokenizer, rows, **options)

    monkeypatch.setattr(examples_module, "encode_prompts", counted)
    pair = {"chosen": "moo", "rejected": "baa"}
    path = tmp_path / "rows.jsonl"
    config = DataConfig(datasets=[{"path": str(path), "stages": [stage]}], **LIMITS)

    write_jsonl(path, [pair | {"prompt": f"{n}?"} for n in range(5 * CHECK_SAMPLE)])
    sources = read_sources(config, [stage], seed=0)
    path.unlink()  # it was read before
    data = check_stage(config, stage, tokenizer, seed=0, sources=sources)
    assert sum(tokenized) == CHECK_SAMPLE == len(data.train) + len(data.heldout)
    assert data.reports[0].unseen == 4 * CHECK_SAMPLE
    assert "of a sample; 1024 more not examined" in str(data.reports[0])

    tokenized.clear()
    prompts = ["a" * 40] * 5 * CHECK_SAMPLE + ["first?", "second?"]
    write_jsonl(path, [pair | {"prompt": prompt} for prompt in prompts])
    data = check_stage(config, stage, tokenizer, seed=0)
    assert len(data.train) + len(data.heldout) == 2
    assert sum(tokenized) == CHECK_SAMPLE + len(prompts)


def test_load_stage_samples_from_all_rows(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n}?"} for n in range(100)])
    config = DataConfig(datasets=[{"path": path, "stages": ["ppo"]}])
    data = load_stage(config, "ppo", tokenizer, seed=0, sample=10)
    lines = [int(example.row.source.partition(":")[2]) for example in [*data.train, *data.heldout]]
    assert len(set(lines)) == 10 and max(lines) > 50 > min(lines)
    assert data == load_stage(config, "ppo", tokenizer, seed=0, sample=10)


TEXTS = [" A cow  says moo.\n", "= A title =", *(f"Line {n}." for n in range(40))]


def load_texts(tokenizer: Any, folder: Path, texts: list[Any], **data: Any) -> Any:
    path = write_jsonl(folder / "rows.jsonl", [{"text": text} for text in texts])
    dataset = {"path": path, "columns": {"text": "text"}, "stages": ["sft"]}
    return load(tokenizer, dataset, **data)


@pytest.mark.parametrize("chat_template", [True, False])
def test_sft_learns_all_of_a_text_without_template(tokenizer: Any, tmp_path: Path, chat_template: bool) -> None:
    data = load_texts(tokenizer, tmp_path, TEXTS, chat_template=chat_template)
    examples = [*data.train, *data.heldout]
    assert {tokenizer.decode(example.completion_ids) for example in examples} == {f"{text}<eos>" for text in TEXTS}
    assert all(example.prompt_ids == [] for example in examples)
    batch = collate_sft(examples[:3], policy=ShapePolicy("dynamic"), maximum=600, pad_token_id=0)
    # The first token has nothing before it that could predict it.
    assert batch["loss_mask"].sum(1).tolist() == [len(example.completion_ids) - 1 for example in examples[:3]]


def test_text_may_be_as_long_as_prompt_and_completion(tokenizer: Any, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_prompt_length": 6, "max_completion_length": 5}
    texts = [*(f"moo {n}" for n in range(9)), "x" * 10, "z" * 11]
    report = load_texts(tokenizer, tmp_path, texts, **limits).reports[0]
    assert report.dropped == {"completion too long": (1, "rows.jsonl:11")}
    assert report.lengths == {"completion too long": (12, 12, 11)}
    cut = load_texts(tokenizer, tmp_path, texts, too_long="truncate", **limits)
    assert tokenizer.encode("z" * 11) in [example.completion_ids for example in [*cut.train, *cut.heldout]]


def test_equal_texts_are_on_one_side_and_empty_ones_counted(tokenizer: Any, tmp_path: Path) -> None:
    data = load_texts(tokenizer, tmp_path, ["", " \n", None, *TEXTS * 2], heldout_fraction=0.3)
    assert data.reports[0].dropped == {"empty text": (3, "rows.jsonl:1")}
    sides = [{tuple(example.completion_ids) for example in side} for side in (data.train, data.heldout)]
    assert all(sides) and not sides[0] & sides[1]
