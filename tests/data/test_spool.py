"""Rows of large sources are on disk: the same rows, little memory, and one line if the disk is full."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from rlhf.config.schema import DataConfig
from rlhf.data.load_sources import read_sources
from rlhf.data.records import Message, Row
from rlhf.data.spool import Selection, Spool
from rlhf.errors import DataError
from tests.data.rows import parse, write_jsonl
from tests.helpers import small_disk


def row(number: int, size: int = 1) -> Row:
    return Row((Message("user", "é" * size),), "\udc80", str(number), None, None, "a:1", record={"n": [number, None]})


def spool_of(rows: list[Row]) -> Spool[Row]:
    spool: Spool[Row] = Spool()
    for item in rows:
        spool.append(item)
    return spool


def test_spool_has_the_items_in_their_order() -> None:
    rows = [row(number, size=number) for number in range(50)]
    spool = spool_of(rows)
    assert list(spool) == rows and len(spool) == 50
    assert [item.record for item in spool] == [item.record for item in rows]
    assert (spool[-1], list(spool[3:9:2])) == (rows[-1], rows[3:9:2])
    spool.append(row(50))
    assert spool[50] == row(50), "written after the first was read"
    with pytest.raises(IndexError):
        spool[51]


def test_selection_has_the_items_at_its_indices() -> None:
    selection = Selection("abcdef", [4, 0, 2, 2])
    assert "".join(selection) == "eacc"
    assert "".join(Selection(selection, range(1, 3))) == "".join(selection[1:3]) == "ac"


def test_forks_read_a_spool_at_once() -> None:
    rows = [row(number) for number in range(3_000)]
    spool = spool_of(rows)
    pid = os.fork()
    equal = [list(spool) == rows for _ in range(5)]
    if not pid:
        os._exit(not all(equal))
    assert os.waitpid(pid, 0)[1] == 0 and all(equal)


def test_parsed_rows_take_little_memory(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n} {'a ' * 1000}", "response": "b" * 2000} for n in range(2000)]
    path = write_jsonl(tmp_path / "rows.jsonl", lines)
    del lines
    tracemalloc.start()
    try:
        rows = parse(path=path).rows
        assert sum(len(item.text) for item in rows) > 4e6
        assert tracemalloc.get_traced_memory()[1] < 1e6, "of a file of 8 MB"
    finally:
        tracemalloc.stop()


def test_nesting_that_only_json_can_store_drops_the_row(tmp_path: Path) -> None:
    """`json` reads deeper nesting than `pickle` writes."""
    lines = [
        '{"prompt": "a"}',
        *('{"prompt": "b", "x": ' + "[" * depth + "]" * depth + "}" for depth in range(300, 900)),
    ]
    config = DataConfig(datasets=[{"path": write_jsonl(tmp_path / "rows.jsonl", lines)}])
    (source,) = read_sources(config, ["ppo"], seed=0, records=True)._read.values()
    ((reason, (count, _)),) = source.dropped.items()
    assert reason == "not readable as JSON" and 0 < count < len(lines) - 1
    assert len(source.rows) == len(lines) - count


def test_full_temporary_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a" * 1000}] * 2000)
    expected = r"No space left on device.*; set TMPDIR to a folder with free space"
    with small_disk(tmp_path / "small", mebibytes=1) as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(DataError, match=expected):
            parse("ppo", path=path)
