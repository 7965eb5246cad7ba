"""Every kind of source gives its records, each with its place."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from rlhf.data.readers import SourceRecord, hash_source, read_records
from rlhf.errors import DataError
from tests.data.rows import write_jsonl

SUBSETS = "main", "socratic"
ROWS = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]


def values(records: list[SourceRecord]) -> list[dict[str, str] | None]:
    return [record.values for record in records]


def test_jsonl_keeps_line_numbers_over_blank_and_broken_lines(tmp_path: Path) -> None:
    number, nested = f'{{"id": {"9" * 5000}}}', "[" * 100_000
    lines = [ROWS[0], "", '{"prompt": ', "[1]", ROWS[1], number, nested]
    records = read_records(write_jsonl(tmp_path / "rows.jsonl", lines))
    broken = "not readable as JSON"
    assert values(records) == [ROWS[0], None, None, ROWS[1], None, None]
    assert [record.fault for record in records] == ["", broken, "not an object", "", broken, broken]
    assert [record.source for record in records] == [f"rows.jsonl:{line}" for line in (1, 3, 4, 5, 6, 7)]


def test_csv_rows_are_named_by_their_first_line(tmp_path: Path) -> None:
    path, long = tmp_path / "rows.csv", "moo " * 100_000
    for line_break in ("\n", "\r\n"):
        lines = f'prompt,response\n"a\nb",c\nd\ne,{long}\n'.replace("\n", line_break)
        path.write_bytes(lines.encode())
        records = read_records(str(path))
        assert values(records) == [{"prompt": "a\nb", "response": "c"}, None, {"prompt": "e", "response": long}]
        assert records[1].fault == "row has more or fewer fields than the header"
        assert [record.source for record in records] == ["rows.csv:2", "rows.csv:4", "rows.csv:5"]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.json", lambda path: path.write_text(json.dumps(ROWS))),
        ("rows.json", lambda path: path.write_text(json.dumps({"data": ROWS}))),
        ("rows.parquet", lambda path: Dataset.from_list(ROWS).to_parquet(str(path))),
        ("saved", lambda path: Dataset.from_list(ROWS).save_to_disk(str(path))),
    ],
)
def test_tables_are_read_with_row_numbers(tmp_path: Path, name: str, write: Callable[[Path], object]) -> None:
    write(tmp_path / name)
    records = read_records(str(tmp_path / name))
    assert values(records) == ROWS
    assert [record.source for record in records] == [f"{name}, row 1", f"{name}, row 2"]


def test_saved_folder_with_splits_gives_the_named_one(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    DatasetDict(train=Dataset.from_list(ROWS[:1]), test=Dataset.from_list(ROWS[1:])).save_to_disk(path)
    assert values(read_records(path, split="test")) == ROWS[1:]
    with pytest.raises(DataError, match="no split 'dev'; found: train, test"):
        read_records(path, split="dev")


def test_downloaded_folder_is_read_with_its_splits(tmp_path: Path) -> None:
    """As `hf download` and `git clone` leave it."""
    folder, rows = tmp_path / "Dahoas" / "some-set", [{"prompt": f"p {n}"} for n in range(4)]
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Rows\n")
    for name, part in (("train-00000-of-00002-ab", rows[:1]), ("train-00001-of-00002-ab", rows[1:3])):
        Dataset.from_list(part).to_parquet(folder / "data" / f"{name}.parquet")
    Dataset.from_list(rows[3:]).to_parquet(folder / "data" / "test-00000-of-00001-ab.parquet")
    records = read_records(str(folder))
    assert values(records) == rows[:3] and records[2].source == "some-set, row 3"
    assert values(read_records(str(folder), split="test")) == rows[3:]
    with pytest.raises(DataError, match="no split 'dev'; found: train, test; set `split`, or `heldout_split`"):
        read_records(str(folder), split="dev")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_folder_of_one_file_is_read_as_train(tmp_path: Path, name: str) -> None:
    is_csv = name.endswith("csv")
    (tmp_path / name).write_text("prompt\na\nb\n" if is_csv else '{"prompt": "a"}\n{"prompt": "b"}\n')
    assert values(read_records(str(tmp_path))) == [{"prompt": "a"}, {"prompt": "b"}]


def test_folder_with_subsets_gives_the_named_one(tmp_path: Path) -> None:
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "xy")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name in "xy":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    assert values(read_records(str(tmp_path), subset="y")) == [{"prompt": "y"}]
    with pytest.raises(DataError, match="has subsets; found: x, y; set `subset`"):
        read_records(str(tmp_path))


def test_content_of_a_folder_covers_all_files_but_hidden_ones(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / ".git").mkdir()
    digests = [hash_source(str(tmp_path))]
    (tmp_path / ".git" / "HEAD").write_text("other")
    assert hash_source(str(tmp_path)) == digests[0]
    for name in ("train.jsonl", "test.jsonl", "README.md"):
        write_jsonl(tmp_path / name, ROWS[:1])
        digests.append(hash_source(str(tmp_path)))
    assert len(set(digests)) == 4


def test_json_file_may_have_an_object_per_line(tmp_path: Path) -> None:
    lines = ["", *ROWS, '{"prompt": "cut']
    records = list(read_records(write_jsonl(tmp_path / "rows.json", lines)))
    assert records == [
        replace(record, source=record.source.replace("jsonl", "json"))
        for record in read_records(write_jsonl(tmp_path / "rows.jsonl", lines))
    ]
    assert values(records) == [*ROWS, None]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "folder"])
@pytest.mark.parametrize("is_pipe", [True, False], ids=["a pipe", "a device"])
def test_source_that_is_read_once_or_never_ends_is_refused(tmp_path: Path, name: str, is_pipe: bool) -> None:
    path = tmp_path / name
    place = path
    if name == "folder":
        path.mkdir()
        place = path / "rows.jsonl"
    if is_pipe:
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero")
    for read in (hash_source, read_records)[: 1 if name == "folder" else 2]:  # a folder is hashed before it is read
        with pytest.raises(DataError, match=f"{place}: is a pipe or a device"):
            read(str(path))


def test_integer_of_thousands_of_digits_in_a_json_file_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(f'[{{"prompt": {"9" * 5000}}}]')
    with pytest.raises(DataError, match=r"rows\.json: not readable as JSON"):
        read_records(str(path))


def test_damaged_file_of_a_saved_data_set_is_named(tmp_path: Path) -> None:
    """It can be opened: its text is no UTF-8."""
    folder = tmp_path / "saved"
    Dataset.from_list([{"prompt": "ä" * 2000}] * 50).save_to_disk(str(folder))
    (file,) = folder.glob("*.arrow")
    content = bytearray(file.read_bytes())
    place = content.index("ä".encode() * 100)
    content[place : place + 1000] = b"\xff" * 1000
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{folder}: cannot be read as a whole"):
        read_records(str(folder))


def test_world_depends_on_the_seed() -> None:
    first, again, other = (list(read_records("world", seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[16].source == "world:17"


def test_limit_samples_the_whole_source_in_its_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}"} for n in range(100)]
    path, folder = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "saved"
    Dataset.from_list(rows).save_to_disk(folder)
    for source, name in ((path, "rows.jsonl:{}"), (str(folder), "saved, row {}")):
        records, again, other = (list(read_records(source, limit=10, seed=seed)) for seed in (1, 1, 2))
        places = [rows.index(record.values) for record in records]  # type: ignore[arg-type]
        assert len(places) == 10 and places == sorted(places) and places[-1] > 50
        assert [record.source for record in records] == [name.format(place + 1) for place in places]
        assert again == records != other
        whole = [list(read_records(source, limit=limit)) for limit in (None, 100, 1000)]
        assert whole[0] == whole[1] == whole[2]
    assert len(read_records("world", limit=7)) == 7


@pytest.mark.parametrize("key", ["subset", "revision"])
def test_files_have_no_subsets_or_revisions(tmp_path: Path, key: str) -> None:
    for source in (write_jsonl(tmp_path / "rows.jsonl", ROWS), "world"):
        with pytest.raises(DataError, match=f"has no {key}s, got {key} 'main'; remove it"):
            read_records(source, **{key: "main"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b"{", r"rows.json:1: not readable as JSON"),
        ("rows.json", b"3", "expected a list of objects"),
        ("rows.jsonl", b"\xff\xfe\x00", "not a UTF-8 text file"),
        ("rows.parquet", b"no parquet", "not readable as Parquet"),
        ("rows.txt", b"", "unknown kind of file; use one of .jsonl, .json, .csv, .parquet"),
        ("rows.csv", b"prompt;response\na, b;c\n", "rows.csv: its fields are separated by semicolons, not by commas"),
        ("rows.csv", b"prompt\tresponse\na, b\tc\n", "rows.csv: its fields are separated by tabs, not by commas"),
        ("rows.jsonl", None, "rows.jsonl: no such file"),
        ("folder", None, "folder: no such file"),
        (".", None, "cannot be read as a data set .*any data files.*; name a file, a folder of .parquet, .jsonl"),
    ],
)
def test_unreadable_source_is_an_error(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_records(str(tmp_path / name))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Replace the hub, which has every name, by a function; tests/models/test_hub.py tests the names."""
    monkeypatch.setattr("rlhf.models.hub.check_available", lambda name, kind: None)
    return lambda load: monkeypatch.setattr("datasets.load_dataset", load)


def test_hub_name_is_loaded_by_datasets(hub: Any) -> None:
    calls: list[Any] = []
    hub(lambda *names, **options: calls.append((*names, options)) or [{"prompt": "a"}])
    assert values(read_records("org/name", split="dev")) == [{"prompt": "a"}]
    read_records("org/name", subset="main", revision="v1")
    read_records("org/name", subset="main", revision="refs/convert/parquet")  # there, subsets are folders
    assert calls == [
        ("org/name", None, {"split": "dev", "revision": None}),
        ("org/name", "main", {"split": "train", "revision": "v1"}),
        ("org/name", None, {"split": "train", "revision": "refs/convert/parquet", "data_dir": "main"}),
    ]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"subset": "main", "split": "dev"}, "no split 'dev'; found: test, train; set `split`, or `heldout_split` for"),
        ({"subset": "other"}, "no subset 'other'; found: main, socratic; set `subset`, or `heldout_subset` for"),
        ({}, "has subsets; found: main, socratic; set `subset`, or `heldout_subset` for"),
    ],
)
def test_missing_part_of_a_hub_data_set_lists_the_parts(
    tmp_path: Path, hub: Any, wanted: dict[str, str], message: str
) -> None:
    """The library itself reads a folder that is laid out like a hub's."""
    import datasets

    parts = {subset: [{"split": split, "path": f"{split}.jsonl"} for split in ("test", "train")] for subset in SUBSETS}
    configs = [{"config_name": subset, "data_files": files} for subset, files in parts.items()]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n", encoding="utf-8")
    for split in ("test", "train"):
        write_jsonl(tmp_path / f"{split}.jsonl", ROWS[:1])
    load, cache = datasets.load_dataset, str(tmp_path / "cache")
    hub(lambda name, subset, split, revision: load(str(tmp_path), subset, split=split, cache_dir=cache))
    assert values(read_records("org/name", subset="main", split="test")) == ROWS[:1]
    with pytest.raises(DataError, match=f"org/name: {message}"):
        read_records("org/name", **wanted)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Dataset scripts are no longer supported, but found name.py"),
            "needs a loading script, which rlhf does not run; set `revision` to refs/convert/parquet",
        ),
        (
            RuntimeError("Revision 'v1' doesn't exist for dataset 'org/name'"),
            "no revision 'v1'; set `revision`, or `heldout_revision` for",
        ),
        (
            ConnectionError("no route to the hub\nand a long story"),
            "not loaded from the hub (no route to the hub); check the network, or name a local copy",
        ),
    ],
)
def test_failure_of_the_hub_is_one_line(hub: Any, error: Exception, message: str) -> None:
    def fail(*names: str | None, **options: Any) -> None:
        raise error

    hub(fail)
    with pytest.raises(DataError) as caught:
        read_records("org/name", revision="v1")
    assert str(caught.value).startswith(f"org/name: {message}") and "\n" not in str(caught.value)


def test_hash_of_a_folder_follows_linked_folders(tmp_path: Path) -> None:
    """As readers do; a link in a circle ends, and one that leads elsewhere than before counts."""
    source, store = tmp_path / "source", tmp_path / "store"
    for folder in (source, store / "red", store / "green"):
        folder.mkdir(parents=True)
    for color in ("red", "green"):
        (store / color / "rows.arrow").write_text(color)
    (source / "train").symlink_to(store / "red")
    (source / "circle").symlink_to(source)
    digests = [hash_source(str(source))]
    (store / "red" / "rows.arrow").write_text("RED")
    digests.append(hash_source(str(source)))
    for name in ("a", "b", "c"):
        (source / name).symlink_to(store / {"a": "red"}.get(name, "green"))
        digests.append(hash_source(str(source)))
    (source / "c").unlink()
    (source / "c").symlink_to(store / "red")  # the same files, under another name
    digests.append(hash_source(str(source)))
    assert len(set(digests)) == len(digests)


def test_saved_folder_with_a_changed_offset_is_refused(tmp_path):
    """Arrow would read outside of the file, which ends the process by a signal."""
    from datasets import Dataset

    Dataset.from_list([{"prompt": "a cow"}] * 3).save_to_disk(tmp_path / "rows")
    (file,) = (tmp_path / "rows").glob("*.arrow")
    offsets, changed = struct.pack("<4i", 0, 5, 10, 15), struct.pack("<4i", 0, 5, 2**30, 2**30 + 5)
    file.write_bytes(file.read_bytes().replace(offsets, changed))
    with pytest.raises(DataError, match=r"cannot be read as a whole .*; copy it here again"):
        read_records(str(tmp_path / "rows"))
