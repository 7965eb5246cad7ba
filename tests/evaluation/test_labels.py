"""The file of labels: read as a source, appended to, and repaired after a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import build_config
from rlhf.data.formats import ColumnMapping
from rlhf.data.load_sources import read_sources
from rlhf.data.records import Row, parse_record
from rlhf.errors import RLHFError
from rlhf.evaluation.labels import (
    FIRST,
    SECOND,
    SKIP,
    TIE,
    LabelFile,
    Question,
    count_preferences,
    make_question,
    write_prompt,
)

PROMPT = "Where does\nthe bee live?"


def parse(record: dict[str, Any], **columns: Any) -> Row:
    return parse_record(record, ColumnMapping(**columns), "rows.jsonl:1")


def asked(prompt: str = PROMPT) -> Question:
    return Question(parse({"prompt": prompt}, prompt="prompt"), ("one", "two"), ("a", "b"))


@pytest.mark.parametrize(
    "row",
    [
        parse({"prompt": PROMPT}, prompt="prompt"),
        parse({"prompt": "Human: hi\n\nAssistant: yes\n\nHuman: why?\n\nAssistant:"}, prompt="prompt"),
        parse({"messages": [{"role": "user", "content": "hi"}]}, messages="messages"),
        parse({"prompt": [{"role": "user", "content": "Human: a title"}]}, prompt="prompt"),
        parse(
            {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "é\u2028"}]}, prompt="prompt"
        ),
        parse({"prompt": "hi"}, prompt="prompt", template="Q: {prompt}\nA:"),
    ],
    ids=["plain", "transcript", "messages", "looks like a transcript", "system", "template"],
)
def test_prompt_is_read_back_as_it_was(row: Row) -> None:
    written = json.loads(json.dumps(write_prompt(row)))
    read = parse({"prompt": written}, prompt="prompt", template=row.template)
    assert (read.prompt, read.text) == (row.prompt, row.text)


def test_answers_are_pairs_of_a_source_and_ties_and_skips_are_not(tmp_path: Path) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    for prompt, key in (("p 0", SKIP), ("p 1", FIRST), ("p 2", SECOND), ("p 3", TIE)):
        file.append(asked(prompt).answer(key))
    config = build_config({"data": {"datasets": [str(file.path)]}}).data
    (source,) = [
        read_sources(config, ["reward"], seed=0)[spec] for spec in read_sources(config, ["reward"], seed=0)._read
    ]
    read = [(row.text, row.chosen, row.rejected) for row in source.rows]
    assert read == [("p 0", None, None), ("p 1", "one", "two"), ("p 2", "two", "one"), ("p 3", None, None)]
    assert [label["models"] for label in file.labels] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert file.labels[2]["tie"] == ["one", "two"] and file.ties == 1


def test_skipped_question_is_no_label_and_may_be_asked_again(tmp_path: Path) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    for prompt, key in (("p 1", FIRST), ("p 2", SKIP)):
        file.append(asked(prompt).answer(key))
    for read in (file, LabelFile(file.path)):
        assert [label["prompt"] for label in read.labels] == ["p 1"] and read.prompts == {'"p 1"'}
        (skipped,) = read.skips
        assert skipped["skip"] == ["one", "two"] and skipped["models"] == ["a", "b"]


def test_labels_are_on_disk_at_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "labels.jsonl"
    file = LabelFile(path)
    file.append(asked().answer(FIRST))
    assert json.loads(path.read_bytes()) == file.labels[0]  # the file is still open
    again = LabelFile(path)
    assert again.labels == file.labels and again.prompts == file.prompts and len(again.prompts) == 1
    again.append(asked("other").answer(TIE))
    assert len(path.read_text().splitlines()) == 2 == len(LabelFile(path).prompts)


def test_line_separators_within_a_prompt_do_not_end_a_line(tmp_path: Path) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    file.append(asked("one\u2028two\x85three").answer(FIRST))
    assert LabelFile(file.path).labels == file.labels


@pytest.mark.parametrize("cut", [1, 20, 70])
def test_line_that_a_crash_cut_is_removed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "labels.jsonl"
    file = LabelFile(path)
    for prompt in ("first", "second"):
        file.append(asked(prompt).answer(FIRST))
    whole, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole + second[:cut])
    repaired = LabelFile(path)
    assert [label["prompt"] for label in repaired.labels] == ["first"] and path.read_bytes() == whole
    repaired.append(asked("third").answer(SECOND))
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == ["first", "third"]


def test_last_line_without_an_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}')
    LabelFile(path).append(asked("q").answer(FIRST))
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == ["p", "q"]


@pytest.mark.parametrize("line", ["no JSON", '{"prompt": "p", "response": "r"}', "[1]"])
def test_file_of_something_else_stays_as_it_is(tmp_path: Path, line: str) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(RLHFError, match=r"labels.jsonl:2: is not a label .*; name another file with --output"):
        LabelFile(path)
    assert path.read_text() == f"\n{line}\n"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(RLHFError, match="is a link to"):
        LabelFile(tmp_path / "link")


def test_order_depends_on_the_seed_and_the_prompt_alone() -> None:
    rows = [asked(f"p {number}").row for number in range(200)]

    def order(seed: int) -> list[bool]:
        return [make_question(row, ("one", "two"), ("a", "b"), seed).models == ("b", "a") for row in rows]

    assert 70 < sum(order(1)) < 130 and order(1) == order(1) != order(2)
    for row in rows:
        question = make_question(row, ("one", "two"), ("a", "b"), 1)
        assert set(zip(question.completions, question.models)) == {("one", "a"), ("two", "b")}


def test_preference_counts_ties_half_and_other_models_not() -> None:
    labels = [{"chosen": "", "models": models} for models in (["b", "a"], ["b", "a"], ["a", "b"], ["c", "a"])]
    counted = count_preferences([*labels, {"tie": [], "models": ["a", "b"]}], "b", "a")
    assert counted is not None and (counted.share, counted.labels) == (2.5 / 4, 4)
    assert counted.interval.low < 0.625 < counted.interval.high
    assert count_preferences(labels, "c", "b") is None
