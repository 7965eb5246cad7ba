"""Columns inside columns are reached by their path; where none is, the error says what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import DataConfig
from rlhf.data.load_sources import read_sources
from rlhf.data.records import Message, Row
from rlhf.errors import DataError


def read(path: Path, rows: list[Any], **dataset: Any) -> list[Row]:
    """The rows of a source with these records."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    config = DataConfig(datasets=[{"path": str(path), "stages": ["sft"], **dataset}])
    sources = read_sources(config, ["sft"], seed=0)
    (rows_read,) = sources._read.values()
    return rows_read.rows


def test_a_path_leads_into_objects_and_lists(tmp_path: Path) -> None:
    rows = [{"question": {"full_text": "Who?", "id": 1}, "answers": [{"text": "Ann"}, {"text": "Bob"}]}]
    columns = {"prompt": "question.full_text", "response": "answers.1.text"}
    (row,) = read(tmp_path / "rows.jsonl", rows, columns=columns)
    assert (row.prompt, row.response) == ((Message("user", "Who?"),), "Bob")


def test_a_column_of_that_very_name_wins(tmp_path: Path) -> None:
    rows = [{"q.text": "outer", "q": {"text": "inner"}, "response": "r"}]
    (row,) = read(tmp_path / "rows.jsonl", rows, columns={"prompt": "q.text"})
    assert row.text == "outer"


def test_a_row_that_the_path_does_not_reach_lacks_the_value_and_others_do_not(tmp_path: Path) -> None:
    rows = [{"query": f"q {n}", "good": [{"text": "yes"}], "bad": [{"text": "no"}] * n} for n in range(2)]
    columns = {"prompt": "query", "chosen": "good.0.text", "rejected": "bad.0.text"}
    assert [(row.chosen, row.rejected) for row in read(tmp_path / "rows.jsonl", rows, columns=columns)] == [
        ("yes", ""),
        ("yes", "no"),
    ]


@pytest.mark.parametrize(
    ("value", "path", "found"),
    [
        ({"id": 1, "full_text": "a"}, "question.text", "question has the keys id, full_text"),
        ({"a": {"b": "c"}}, "question.a.text", "question.a has the keys b"),
        (["a", "b"], "question.2", "question is a list of 2 (the first is 0)"),
        (["a", "b"], "question.text", "question is a list of 2 (the first is 0)"),
        ([], "question.0", "question is empty"),
        ("a", "question.text", "question is text"),
        ([{"text": 3}], "question.0.text.now", "question.0.text is a number"),
        ({str(n): n for n in range(15)}, "question.x", "10, 11 and 3 more"),
    ],
)
def test_the_error_names_the_path_and_what_is_found_there(tmp_path: Path, value: Any, path: str, found: str) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path / "rows.jsonl", [{"question": value, "response": "r"}], columns={"prompt": path})
    assert f"rows.jsonl: no column '{path}' (columns.prompt); " in str(error.value)
    assert str(error.value).endswith(found)


def test_the_head_of_a_path_is_a_column_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'questions.text' \(columns.prompt\); found: question$"):
        read(tmp_path / "rows.jsonl", [{"question": {"text": "a"}}], columns={"prompt": "questions.text"})
