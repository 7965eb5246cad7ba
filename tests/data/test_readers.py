"""Every kind of source gives its records, and where each of them stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.readers import SourceRecord, read_records
from rlhf.errors import DataError

SUBSETS = "main", "socratic"
ROWS = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]


def faults(records: list[SourceRecord]) -> list[str]:
    return [record.fault for record in records]


def values(records: list[SourceRecord]) -> list[dict[str, str] | None]:
    return [record.values for record in records]


def test_jsonl_keeps_line_numbers_over_blank_and_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{json.dumps(ROWS[0])}\n\n{{"prompt": \n[1]\n{json.dumps(ROWS[1])}\n', encoding="utf-8")
    records = read_records(str(path))
    assert values(records) == [ROWS[0], None, None, ROWS[1]]
    assert faults(records) == ["", "not readable as JSON", "not an object", ""]
    assert [record.source for record in records] == [f"rows.jsonl:{line}" for line in (1, 3, 4, 5)]


@pytest.mark.parametrize("content", [ROWS, {"data": ROWS}])
def test_json_holds_a_list_or_data(tmp_path: Path, content: object) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    records = read_records(str(path))
    assert values(records) == ROWS
    assert records[1].source == "rows.json, row 2"


def test_csv_rows_are_named_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,response\n"a\nb",c\nd\ne,f\n', encoding="utf-8")
    records = read_records(str(path))
    assert values(records) == [{"prompt": "a\nb", "response": "c"}, None, {"prompt": "e", "response": "f"}]
    assert faults(records) == ["", "row has more or fewer fields than the header", ""]
    assert [record.source for record in records] == ["rows.csv:2", "rows.csv:4", "rows.csv:5"]


@pytest.mark.parametrize(("delimiter", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_csv_that_is_separated_by_something_else_says_so(tmp_path: Path, delimiter: str, name: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt{delimiter}response\na, b{delimiter}c\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"rows.csv: its fields are separated by {name}, not by commas; save it with"):
        read_records(str(path))


def test_line_breaks_in_a_csv_field_are_the_same_on_every_system(tmp_path: Path) -> None:
    for line_break in ("\n", "\r\n"):
        path = tmp_path / "rows.csv"
        path.write_bytes('prompt,response\n"a\nb",c\nd,e\n'.replace("\n", line_break).encode())
        records = read_records(str(path))
        assert values(records) == [{"prompt": "a\nb", "response": "c"}, {"prompt": "d", "response": "e"}]
        assert [record.source for record in records] == ["rows.csv:2", "rows.csv:4"]


def test_parquet(tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "rows.parquet"
    Dataset.from_list(ROWS).to_parquet(str(path))
    assert values(read_records(str(path))) == ROWS


def test_a_saved_data_set(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    records = read_records(str(tmp_path / "saved"))
    assert values(records) == ROWS
    assert records[0].source == "saved, row 1"


def test_a_saved_data_set_with_splits_gives_the_one_asked_for(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    path = str(tmp_path / "saved")
    DatasetDict(train=Dataset.from_list(ROWS[:1]), test=Dataset.from_list(ROWS[1:])).save_to_disk(path)
    assert values(read_records(path, split="test")) == ROWS[1:]
    with pytest.raises(DataError, match="no split 'dev'; found: train, test"):
        read_records(path, split="dev")


def test_the_world_is_a_source() -> None:
    assert read_records("world", seed=1) == read_records("world", seed=1)
    assert read_records("world", seed=1) != read_records("world", seed=2)
    assert read_records("world")[16].source == "world:17"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has every name; tests/models/test_hub.py asks it."""
    monkeypatch.setattr("rlhf.models.hub.check_available", lambda name, kind: None)


@pytest.mark.usefixtures("hub")
def test_a_hub_name_is_loaded_by_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names, **options: asked.append((*names, options)) or [{"prompt": "a"}]
    )
    assert values(read_records("org/name", split="dev")) == [{"prompt": "a"}]
    read_records("org/name", subset="main", revision="v1")
    read_records("org/name", subset="main", revision="refs/convert/parquet")  # where subsets are folders
    assert asked == [
        ("org/name", None, {"split": "dev", "revision": None}),
        ("org/name", "main", {"split": "train", "revision": "v1"}),
        ("org/name", None, {"split": "train", "revision": "refs/convert/parquet", "data_dir": "main"}),
    ]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"subset": "main", "split": "dev"},
            "org/name: no split 'dev'; found: test, train; set `split`, or `heldout_split` for",
        ),
        (
            {"subset": "other"},
            "org/name: no subset 'other'; found: main, socratic; set `subset`, or `heldout_subset` for",
        ),
        ({}, "org/name: has subsets; found: main, socratic; set `subset`, or `heldout_subset` for"),
    ],
)
def test_the_parts_of_a_hub_data_set_are_named_where_one_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, str], message: str
) -> None:
    """The library itself reads a folder that is laid out like a hub's."""
    import datasets

    parts = {subset: [{"split": split, "path": f"{split}.jsonl"} for split in ("test", "train")] for subset in SUBSETS}
    configs = [{"config_name": subset, "data_files": files} for subset, files in parts.items()]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n", encoding="utf-8")
    for split in ("test", "train"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(ROWS[0]), encoding="utf-8")
    load, cache = datasets.load_dataset, str(tmp_path / "cache")

    def local(name: str, subset: str | None, split: str, revision: None) -> Any:
        return load(str(tmp_path), subset, split=split, cache_dir=cache)

    monkeypatch.setattr(datasets, "load_dataset", local)
    assert values(read_records("org/name", subset="main", split="test")) == ROWS[:1]
    with pytest.raises(DataError, match=message):
        read_records("org/name", **wanted)


@pytest.mark.parametrize("key", ["subset", "revision"])
def test_files_have_no_subsets_and_no_revisions(tmp_path: Path, key: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]), encoding="utf-8")
    for source in (str(path), "world"):
        with pytest.raises(DataError, match=f"only hub data sets have {key}s, got {key} 'main'"):
            read_records(source, **{key: "main"})  # type: ignore[arg-type]


def test_a_limit_draws_rows_from_the_whole_source_in_its_order(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"prompt": f"p {n}"} for n in range(100)]
    path, folder = tmp_path / "rows.jsonl", tmp_path / "saved"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Dataset.from_list(rows).save_to_disk(folder)
    for source, name in ((str(path), "rows.jsonl:{}"), (str(folder), "saved, row {}")):
        found = read_records(source, limit=10, seed=1)
        places = [rows.index(record.values) for record in found]  # type: ignore[arg-type]
        assert len(places) == 10 and places == sorted(places) and places[-1] > 50
        assert [record.source for record in found] == [name.format(place + 1) for place in places]
        assert read_records(source, limit=10, seed=1) == found != read_records(source, limit=10, seed=2)
        assert read_records(source, limit=100) == read_records(source, limit=1000) == read_records(source)
    assert len(read_records("world", limit=7)) == 7


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "Dataset scripts are no longer supported, but found name.py",
            "org/name: needs a loading script, which rlhf does not run; set `revision` to refs/convert/parquet",
        ),
        (
            "Revision 'v1' doesn't exist for dataset 'org/name'",
            "org/name: no revision 'v1'; set `revision`, or `heldout_revision` for",
        ),
    ],
)
def test_what_the_revision_has_to_do_with_a_failure_is_said(
    monkeypatch: pytest.MonkeyPatch, error: str, message: str
) -> None:
    import datasets

    def broken(*names: str | None, **options: Any) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(DataError) as found:
        read_records("org/name", revision="v1")
    assert str(found.value).startswith(message)


def test_a_csv_field_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    text = "moo " * 100_000
    path.write_text(f"prompt,response\n{text},a\n", encoding="utf-8")
    assert values(read_records(str(path))) == [{"prompt": text, "response": "a"}]


def test_lines_of_jsonl_that_no_reader_takes_are_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"id": {"9" * 5000}}}\n{"[" * 100_000}\n{json.dumps(ROWS[0])}\n', encoding="utf-8")
    assert values(read_records(str(path))) == [None, None, ROWS[0]]


@pytest.mark.usefixtures("hub")
def test_a_hub_that_breaks_off_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def broken(name: str, subset: str | None, split: str, revision: None) -> None:
        raise ConnectionError("no route to the hub\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(DataError) as error:
        read_records("org/name")
    assert str(error.value) == (
        "org/name: not loaded from the hub (no route to the hub); check the network, or name a local copy"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b"{", r"rows.json:1: not readable as JSON"),
        ("rows.json", b"3", "expected a list of objects"),
        ("rows.jsonl", b"\xff\xfe\x00", "not a UTF-8 text file"),
        ("rows.parquet", b"no parquet", "not readable as Parquet"),
        ("rows.txt", b"", "unknown kind of file; use one of .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_records(str(tmp_path / name))


def test_a_missing_file_is_not_taken_for_a_hub_name(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "folder"):
        with pytest.raises(DataError, match=f"{name}: no such file"):
            read_records(str(tmp_path / name))


def test_any_other_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a folder that datasets"):
        read_records(str(tmp_path))
