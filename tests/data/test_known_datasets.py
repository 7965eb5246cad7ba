"""Data sets that are known by name need no columns. The rows here have the published shape, and are our own.

What each must become was written down by hand: (prompt, demonstration, chosen, rejected, why neither).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import DataConfig
from rlhf.data.formats import find_known_dataset, load_known_datasets
from rlhf.data.load_sources import SourceReader, SourceSpec
from rlhf.data.records import append_reply
from rlhf.errors import DataError
from tests.data.rows import parse, prompt_of, write_jsonl

Expected = tuple[Any, str | None, str | None, str | None, str]

PAIR = {"prompt": "Name a fruit.", "chosen": "An apple.", "rejected": "A brick."}
HH = {
    "prompt": "\n\nHuman: Name a fruit.\n\nAssistant: Fig.\n\nHuman: One more?\n\nAssistant:",
    "response": " Plum.",
    "chosen": " Plum.",
    "rejected": " Brick.",
}
SHP = {
    "post_id": "a1",
    "domain": "askculinary_train",
    "history": "How do I peel garlic?",
    "score_ratio": 2.0,
    "human_ref_A": "Crush it.",
    "human_ref_B": "Buy it.",
}
PASSAGES = {"positive_passages": [{"docid": "1#0", "title": "川", "text": "長い川。"}, {"text": "別の文。"}]}
MKQA = {
    "query": "who runs",
    "queries": {"en": "who runs", "ja": "誰が走る", "zh_cn": "谁在跑"},
    "answers": {
        "ja": [{"type": 0, "entity": "Q1", "text": "アン", "aliases": []}],
        "zh_cn": [{"type": 0, "entity": "Q1", "text": "安", "aliases": ["小安"]}],
    },
}


def webgpt(
    score: float, answer: str = "Salt melts ice [1]. It  lowers the point[2, 3] (at sea level)."
) -> dict[str, Any]:
    return {
        "question": {"dataset": "eli5", "id": "x", "full_text": "Why salt?"},
        "quotes_0": {"title": ["t"], "extract": ["e"]},
        "answer_0": answer,
        "tokens_0": {"prefix": [1], "completion": [2]},
        "score_0": score,
        "answer_1": "Nobody knows.[1]",
        "score_1": -score,
    }


def pair(contents: list[str], chosen: str, rejected: str) -> Expected:
    return contents, chosen, chosen, rejected, ""


def demonstration(contents: list[str], response: str) -> Expected:
    return contents, response, None, None, ""


SALT = "Salt melts ice. It lowers the point (at sea level)."
PLUM = pair(["Name a fruit.", "Fig.", "One more?"], "Plum.", "Brick.")

SETS: dict[str, list[tuple[dict[str, Any], Expected]]] = {
    "Dahoas/rm-static": [(HH, PLUM)],
    "Dahoas/full-hh-rlhf": [(HH, PLUM)],
    "Dahoas/synthetic-instruct-gptj-pairwise": [(PAIR, pair(["Name a fruit."], "An apple.", "A brick."))],
    "yitingxie/rlhf-reward-datasets": [
        (
            {"prompt": "Human: Name a fruit.\n\n", "chosen": "Assistant: An apple.", "rejected": "Assistant: A brick."},
            pair(["Name a fruit."], "An apple.", "A brick."),
        ),
        (
            {
                "prompt": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: A fruit?\n\n",
                "chosen": "Assistant: An assistant says so. Assistant: apple.",
                "rejected": "Brick.",
            },
            pair(["Hi", "Hello.", "A fruit?"], "An assistant says so. Assistant: apple.", "Brick."),
        ),
    ],
    "openai/webgpt_comparisons": [
        (webgpt(0.5), pair(["Why salt?"], SALT, "Nobody knows.")),
        (webgpt(-1.0), pair(["Why salt?"], "Nobody knows.", SALT)),
        (webgpt(0.0), (["Why salt?"], None, None, None, "no preference: equal scores")),
    ],
    "stanfordnlp/SHP": [
        (SHP | {"labels": 1, "score_A": 9, "score_B": 3}, pair(["How do I peel garlic?"], "Crush it.", "Buy it.")),
        (SHP | {"labels": 0, "score_A": 3, "score_B": 9}, pair(["How do I peel garlic?"], "Buy it.", "Crush it.")),
    ],
    "pvduy/sharegpt_alpaca_oa_vicuna_format": [
        (
            {"prompt": "USER: Hi USERS ASSISTANT: Hello. USER: A fruit? ASSISTANT:", "label": "An apple."},
            demonstration(["Hi USERS", "Hello.", "A fruit?"], "An apple."),
        ),
    ],
    "wangrui6/Zhihu-KOL": [
        (
            {"INSTRUCTION": "为什么?", "RESPONSE": "因为。", "SOURCE": "Zhihu", "METADATA": "{}"},
            demonstration(["为什么?"], "因为。"),
        ),
    ],
    "Cohere/miracl-zh-queries-22-12": [
        (
            PASSAGES | {"query": "川?", "query_id": "7", "negative_passages": [{"text": "山。"}], "emb": [0.5]},
            pair(["川?"], "長い川。", "山。"),
        ),
    ],
    "Cohere/miracl-ja-queries-22-12": [
        (PASSAGES | {"query": "川?", "negative_passages": [{"text": "山。"}]}, pair(["川?"], "長い川。", "山。")),
        (PASSAGES | {"query": "何?", "negative_passages": []}, pair(["何?"], "長い川。", "")),
    ],
    "Hello-SimpleAI/HC3-Chinese": [
        (
            {"id": "0", "question": "为什么?", "human_answers": ["因为。", "不知道。"], "chatgpt_answers": ["作为AI"]},
            demonstration(["为什么?"], "因为。"),
        ),
    ],
    "mkqa-Chinese": [(MKQA, demonstration(["谁在跑"], "安"))],
    "mkqa-Japanese": [(MKQA, demonstration(["誰が走る"], "アン"))],
    "lmqg/qg_jaquad": [
        (
            {"question": "誰?", "answer": "アン", "sentence": "アンが走る。", "paragraph": "アンが走る。犬も。"},
            demonstration(["誰?"], "アンが走る。"),
        ),
    ],
    "lmqg/qag_jaquad": [
        (
            {"paragraph": "アンが走る。", "questions": ["誰?", "何?"], "answers": ["アン", "走る"]},
            demonstration(["誰?"], "アンが走る。"),
        ),
    ],
    "local/jsonfile": [
        (
            {"prompt": "Human: I have a question. Assistant:", "chosen": "A good answer.", "rejected": "A bad answer."},
            pair(["I have a question."], "A good answer.", "A bad answer."),
        ),
    ],
}


Texts = tuple[str, str | None, str | None]
TALK = "Human: Name a fruit.\n\nAssistant: Fig.\n\nHuman: One more?\n\nAssistant:"
HELLO = "Human: Hi\n\nAssistant: Hello.\n\nHuman: A fruit?\n\nAssistant:"
USERS = "Human: Hi USERS\n\nAssistant: Hello.\n\nHuman: A fruit?\n\nAssistant:"
WHY_SALT, GARLIC = " Human: Why salt? Assistant:", " Human: How do I peel garlic? Assistant:"
RIVER = " Human: 川? Assistant:"


def texts_of(prompt: str, chosen: str, rejected: str | None = None) -> Texts:
    return prompt, f"{prompt} {chosen}", rejected and f"{prompt} {rejected}"


# The prompt, the prompt with the good reply and with the other, as models without a chat template see them.
TEXTS: dict[str, list[Texts]] = {
    "Dahoas/rm-static": [texts_of(TALK, "Plum.", "Brick.")],
    "Dahoas/full-hh-rlhf": [texts_of(TALK, "Plum.", "Brick.")],
    "Dahoas/synthetic-instruct-gptj-pairwise": [texts_of(" Human: Name a fruit. Assistant:", "An apple.", "A brick.")],
    "yitingxie/rlhf-reward-datasets": [
        texts_of("Human: Name a fruit.\n\nAssistant:", "An apple.", "A brick."),
        texts_of(HELLO, "An assistant says so. Assistant: apple.", "Brick."),
    ],
    "openai/webgpt_comparisons": [
        texts_of(WHY_SALT, SALT, "Nobody knows."),
        texts_of(WHY_SALT, "Nobody knows.", SALT),
        (WHY_SALT, None, None),
    ],
    "stanfordnlp/SHP": [texts_of(GARLIC, "Crush it.", "Buy it."), texts_of(GARLIC, "Buy it.", "Crush it.")],
    "pvduy/sharegpt_alpaca_oa_vicuna_format": [texts_of(USERS, "An apple.")],
    "wangrui6/Zhihu-KOL": [texts_of(" Human: 为什么? Assistant:", "因为。")],
    "Cohere/miracl-zh-queries-22-12": [texts_of(RIVER, "長い川。", "山。")],
    "Cohere/miracl-ja-queries-22-12": [
        texts_of(RIVER, "長い川。", "山。"),
        (" Human: 何? Assistant:", " Human: 何? Assistant: 長い川。", " Human: 何? Assistant: "),
    ],
    "Hello-SimpleAI/HC3-Chinese": [texts_of(" Human: 为什么? Assistant:", "因为。")],
    "mkqa-Chinese": [texts_of(" Human: 谁在跑 Assistant:", "安")],
    "mkqa-Japanese": [texts_of(" Human: 誰が走る Assistant:", "アン")],
    "lmqg/qg_jaquad": [texts_of(" Human: 誰? Assistant:", "アンが走る。")],
    "lmqg/qag_jaquad": [texts_of(" Human: 誰? Assistant:", "アンが走る。")],
    "local/jsonfile": [texts_of("Human: I have a question.\n\nAssistant:", "A good answer.", "A bad answer.")],
}

# What raw_datasets.py of DeepSpeed-Chat makes of the rows above, if it is something else;
# docs/deepspeed-chat-differences.md has the reasons.
TALK_THERE, HELLO_THERE = f"\n\n{TALK}", f"\n\n{HELLO}"
SALT_THERE = "Salt melts ice. It  lowers the point."
OTHER_TEXTS: dict[str, list[Texts]] = {
    "Dahoas/rm-static": [texts_of(TALK_THERE, "Plum.", "Brick.")],
    "Dahoas/full-hh-rlhf": [texts_of(TALK_THERE, "Plum.", "Brick.")],
    "yitingxie/rlhf-reward-datasets": [
        texts_of("Human: Name a fruit.\n\nAssistant:", "An apple.", "A brick."),
        (
            HELLO_THERE,
            f"{HELLO_THERE} An assistant says so. Assistant: apple.",
            f"{HELLO_THERE.removesuffix('Assistant:')}Brick.",
        ),
    ],
    "openai/webgpt_comparisons": [
        texts_of(WHY_SALT, SALT_THERE, "Nobody knows."),
        texts_of(WHY_SALT, "Nobody knows.", SALT_THERE),
        texts_of(WHY_SALT, SALT_THERE, "Nobody knows."),
    ],
    "pvduy/sharegpt_alpaca_oa_vicuna_format": [
        texts_of("Human: Hi HumanS Assistant: Hello. Human: A fruit? Assistant:", "An apple.")
    ],
    "Cohere/miracl-ja-queries-22-12": [
        texts_of(RIVER, "長い川。", "山。"),
        texts_of(" Human: 何? Assistant:", "長い川。"),
    ],
    "local/jsonfile": [texts_of(" Human: I have a question. Assistant:", "A good answer.", "A bad answer.")],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hub that gives what is put into it: by name, and what it was asked for."""
    import datasets

    stub: dict[str, Any] = {"rows": {}, "asked": []}

    def load(name: str, subset: str | None, *, split: str, revision: str | None, **options: Any) -> Any:
        stub["asked"].append((name, subset, split, revision, options))
        return stub["rows"][name]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("rlhf.models.hub.check_available", lambda name, kind: None)
    return stub


def read(**dataset: Any) -> list[Expected]:
    source = parse(**dataset)
    assert not source.dropped
    return [(row.prompt, row.response, row.chosen, row.rejected, row.undecided) for row in source.rows]


def rows_of(name: str) -> tuple[list[dict[str, Any]], list[Expected]]:
    expected = [(prompt_of(*contents), *rest) for _, (contents, *rest) in SETS[name]]
    return [record for record, _ in SETS[name]], expected  # type: ignore[return-value]


def test_every_entry_of_known_yaml_has_rows_here() -> None:
    assert {entry.name for entry in load_known_datasets().values()} == set(SETS)


@pytest.mark.parametrize("name", [name for name in SETS if name != "local/jsonfile"])
def test_known_dataset_is_read_without_columns(hub: dict[str, Any], name: str) -> None:
    entry = find_known_dataset(name)
    assert entry is not None
    records, expected = rows_of(name)
    hub["rows"][entry.path or name] = records
    assert read(path=name) == expected


@pytest.mark.parametrize("name", SETS)
def test_known_dataset_has_the_texts_of_deepspeed_chat(
    hub: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those of `OTHER_TEXTS`."""
    entry = find_known_dataset(name)
    assert entry is not None
    hub["rows"][entry.path or name] = rows_of(name)[0]
    if name == "local/jsonfile":
        monkeypatch.chdir(tmp_path)
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "train.json").write_text(json.dumps(rows_of(name)[0]), encoding="utf-8")
    texts = [
        (
            row.text,
            *(reply if reply is None else append_reply(row.text, reply) for reply in (row.response, row.rejected)),
        )
        for row in parse(path=name).rows
    ]
    assert texts == TEXTS[name] != OTHER_TEXTS.get(name)


def test_deepspeed_chat_evaluates_on_a_split_of_nine_sets() -> None:
    splits = {name: entry.heldout_split for name in SETS if (entry := find_known_dataset(name)) and entry.heldout_split}
    assert splits == {
        "Dahoas/rm-static": "test",
        "Dahoas/full-hh-rlhf": "test",
        "yitingxie/rlhf-reward-datasets": "test",
        "stanfordnlp/SHP": "validation",
        "pvduy/sharegpt_alpaca_oa_vicuna_format": "test",
        "Cohere/miracl-zh-queries-22-12": "dev",
        "Cohere/miracl-ja-queries-22-12": "dev",
        "lmqg/qg_jaquad": "validation",
        "lmqg/qag_jaquad": "validation",
    }


def test_local_jsonfile_is_read_from_data_train_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, expected = rows_of("local/jsonfile")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data/train.json: no such file"):
        read(path="local/jsonfile")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.json").write_text(json.dumps(records), encoding="utf-8")
    assert read(path="local/jsonfile") == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Dahoas/rm-static", ("Dahoas/rm-static", None, "train", None, {})),
        ("mkqa-Japanese", ("apple/mkqa", None, "train", "refs/convert/parquet", {})),
        (
            "Hello-SimpleAI/HC3-Chinese",
            ("Hello-SimpleAI/HC3-Chinese", None, "train", "refs/convert/parquet", {"data_dir": "all"}),
        ),
    ],
)
def test_known_subset_and_revision_are_requested(hub: dict[str, Any], name: str, expected: tuple[Any, ...]) -> None:
    hub["rows"][expected[0]] = rows_of(name)[0]
    read(path=name)
    assert hub["asked"] == [expected]


def test_known_heldout_split_is_requested(hub: dict[str, Any]) -> None:
    name = "Cohere/miracl-ja-queries-22-12"
    hub["rows"] = {name: rows_of(name)[0], "Dahoas/rm-static": [HH]}
    read(path=name, heldout=name)
    read(path=name, heldout=name, heldout_split="testA")
    read(path="Dahoas/rm-static", heldout="Dahoas/rm-static")
    read(path="Dahoas/rm-static", heldout_split="test", revision="v1", limit=1)
    assert [asked[2] for asked in hub["asked"]] == ["train", "dev", "train", "testA", *["train", "test"] * 2]
    assert [asked[3] for asked in hub["asked"][-2:]] == ["v1", "v1"]


def test_heldout_file_has_the_template_of_the_known_rows(hub: dict[str, Any], tmp_path: Path) -> None:
    def heldout_text(path: str, heldout: str, **dataset: Any) -> str:
        config = DataConfig(datasets=[{"path": path, "heldout": heldout, **dataset}])
        return SourceReader(0)[SourceSpec.for_evaluation(config.datasets[0])].rows[0].text

    file = write_jsonl(tmp_path / "rows.jsonl", [PAIR])
    name = "Dahoas/synthetic-instruct-gptj-pairwise"
    hub["rows"] = {name: [PAIR], "Dahoas/rm-static": [HH]}
    framed = " Human: Name a fruit. Assistant:"
    assert heldout_text(name, file) == framed
    assert heldout_text("Dahoas/rm-static", name) == framed
    assert heldout_text("Dahoas/rm-static", file) == "Name a fruit."
    assert heldout_text(name, "Dahoas/rm-static") == TALK
    assert heldout_text(name, file, template="Q: {prompt}") == heldout_text(file, name, template="Q: {prompt}")
    assert heldout_text(name, file, template="{prompt}") == "Name a fruit."


def test_settings_override_the_known_entry(hub: dict[str, Any]) -> None:
    hub["rows"]["stanfordnlp/SHP"] = rows_of("stanfordnlp/SHP")[0]
    shp = {"path": "stanfordnlp/SHP", "split": "validation", "subset": "cooking", "revision": "v1"}
    read(**shp)
    assert hub["asked"] == [("stanfordnlp/SHP", "cooking", "validation", "v1", {})]
    inverted = read(**shp, prefer={"label": "labels", "first": 0})
    assert [row[2] for row in inverted] == ["Buy it.", "Crush it."]
    by_score = read(**shp, prefer={"scores": ["score_B", "score_A"]})
    assert [row[2] for row in by_score] == ["Buy it.", "Crush it."]


def test_named_columns_override_the_known_label(hub: dict[str, Any]) -> None:
    hub["rows"]["stanfordnlp/SHP"] = rows_of("stanfordnlp/SHP")[0]
    by_hand = {"prompt": "history", "chosen": "human_ref_A", "rejected": "human_ref_B"}
    with pytest.raises(DataError, match='stanfordnlp/SHP: column "labels" looks like a preference label'):
        read(path="stanfordnlp/SHP", columns=by_hand)


def test_parsed_source_describes_how_it_was_read(hub: dict[str, Any]) -> None:
    hub["rows"] = {"stanfordnlp/SHP": rows_of("stanfordnlp/SHP")[0], "openai/webgpt_comparisons": [webgpt(1.0)]}
    assert [parse(path=name).how for name in hub["rows"]] == [
        "like the known data set stanfordnlp/SHP: prompt: history, first: human_ref_A, second: human_ref_B, "
        "preferred: labels (first if 1, second if 0)",
        "like the known data set openai/webgpt_comparisons: prompt: question.full_text, first: answer_0, "
        "second: answer_1, "
        "preferred: the higher of score_0, score_1, without citations",
    ]


def test_local_copy_is_known_by_the_end_of_its_path(tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "sets" / "stanfordnlp" / "shp"
    records, expected = rows_of("stanfordnlp/SHP")
    Dataset.from_list(records).save_to_disk(path)
    assert read(path=str(path)) == expected
    Dataset.from_list(records).save_to_disk(tmp_path / "shp")
    with pytest.raises(DataError, match="no known format fits its columns"):
        read(path=str(tmp_path / "shp"))
    records, expected = rows_of("mkqa-Chinese")  # a name of one part
    Dataset.from_list(records).save_to_disk(tmp_path / "mkqa-Chinese")
    assert read(path=str(tmp_path / "mkqa-Chinese")) == expected


def test_known_dataset_with_other_columns_is_an_error(hub: dict[str, Any]) -> None:
    hub["rows"]["stanfordnlp/SHP"] = [PAIR]
    with pytest.raises(DataError) as error:
        read(path="stanfordnlp/SHP")
    assert str(error.value) == (
        "stanfordnlp/SHP: no column 'history' (columns.prompt); found: chosen, prompt, rejected; known.yaml gives "
        "the columns of stanfordnlp/SHP; set data.datasets.*.columns to override it"
    )


def test_only_citations_are_removed_from_replies(hub: dict[str, Any]) -> None:
    hub["rows"]["openai/webgpt_comparisons"] = [
        webgpt(1.0, "An [un]cited list[1][12] a[i], [1 ] and (2).\n\n  Next [3]")
    ]
    assert read(path="openai/webgpt_comparisons")[0][2] == "An [un]cited list a[i], [1 ] and (2).\n\n Next"
