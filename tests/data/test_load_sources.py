"""Sources are read once, told by fingerprints, and long reading is shown."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import STAGES, DataConfig, Stage
from rlhf.data import load_sources
from rlhf.data.load_sources import SourceReader, read_sources
from rlhf.data.stage_dataset import load_stage
from rlhf.errors import DataError
from rlhf.reporting.console import console

ROWS = [
    {"prompt": f"Question {n}?", "response": f"a\n{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)
]


def write(path: Path, rows: list[Any], end: str = "\n") -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


def sources_of(*datasets: dict[str, Any], stages: tuple[Stage, ...] = STAGES, **options: Any) -> SourceReader:
    return read_sources(DataConfig(datasets=datasets), stages, seed=0, **options)


def fingerprint(path: str, **dataset: Any) -> dict[str, object]:
    (only,) = sources_of({"path": path, **dataset}).fingerprints().values()
    return only


def test_a_source_is_read_once_for_all_stages(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path / f"{n}.jsonl", ROWS[n::2]) for n in range(2)]
    held = write(tmp_path / "held.jsonl", [row | {"prompt": "held out", "response": "?"} for row in ROWS])
    opened, read = [], load_sources.read_records
    monkeypatch.setattr(
        load_sources, "read_records", lambda path, **options: (opened.append(path), read(path, **options))[1]
    )
    sft = {"path": paths[0], "stages": ["sft"], "heldout": held}, {"path": paths[0], "stages": ["reward"]}
    config = DataConfig(datasets=[*sft, {"path": paths[1], "stages": ["reward", "ppo"], "heldout": held}])
    sources = read_sources(config, STAGES, seed=0)
    assert sorted(opened) == sorted([*paths, held])
    data = [load_stage(config, stage, tokenizer, seed=0, sources=sources) for stage in STAGES]
    assert sorted(opened) == sorted([*paths, held])
    assert data == [load_stage(config, stage, tokenizer, seed=0) for stage in STAGES]


def test_sources_of_other_stages_are_read_where_held_out_rows_must_not_be_theirs(tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"{n}.jsonl", ROWS) for n in range(2))
    datasets: tuple[dict[str, Any], ...] = ({"path": first, "stages": ["sft"]}, {"path": second, "stages": ["ppo"]})
    assert set(sources_of(*datasets, stages=("ppo",)).fingerprints()) == {second}
    held = write(tmp_path / "held.jsonl", ROWS)
    datasets[1]["heldout"] = held
    assert set(sources_of(*datasets, stages=("ppo",)).fingerprints()) == {first, second, held}


def test_nothing_is_read_before_all_sources_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr(load_sources, "read_records", lambda *names, **options: pytest.fail("read"))
    with pytest.raises(DataError, match=r"absent.jsonl: no such file"):
        sources_of({"path": path, "heldout": str(tmp_path / "absent.jsonl")})


def test_a_fingerprint_is_that_of_the_rows_and_not_of_their_place_or_line_ends(tmp_path: Path) -> None:
    known = fingerprint(write(tmp_path / "rows.jsonl", ROWS))
    assert (known["rows"], known["dropped"]) == (40, 0)
    (tmp_path / "folder").mkdir()
    assert fingerprint(write(tmp_path / "folder" / "other.jsonl", ROWS, "\r\n")) == known
    assert fingerprint(write(tmp_path / "rows.json", [json.dumps(ROWS)])) == known
    for name, line_break in (("unix.csv", "\n"), ("windows.csv", "\r\n")):
        path = tmp_path / name
        with path.open("w", encoding="utf-8", newline=line_break) as lines:
            table = csv.DictWriter(lines, list(ROWS[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(ROWS)
        assert fingerprint(str(path)) == known


@pytest.mark.parametrize("column", ["prompt", "response", "chosen", "rejected"])
def test_one_other_character_makes_another_fingerprint(tmp_path: Path, column: str) -> None:
    known = fingerprint(write(tmp_path / "rows.jsonl", ROWS))
    changed = [*ROWS[:20], ROWS[20] | {column: ROWS[20][column] + "."}, *ROWS[21:]]
    other = fingerprint(write(tmp_path / "rows.jsonl", changed))
    assert other["rows"] == known["rows"]
    assert other["digest"] != known["digest"]


def test_order_and_what_is_left_out_are_part_of_a_fingerprint(tmp_path: Path) -> None:
    known = fingerprint(write(tmp_path / "rows.jsonl", ROWS))
    assert fingerprint(write(tmp_path / "rows.jsonl", ROWS[::-1]))["digest"] != known["digest"]
    broken = fingerprint(write(tmp_path / "rows.jsonl", [*ROWS, "{"]))
    assert broken == known | {"dropped": 1}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    one, other = ([turn | {"content": content} for turn, content in zip(turns, ("a", "b"), strict=True)], turns[:1])
    assert (
        fingerprint(write(tmp_path / "a.jsonl", [{"messages": one}]))["digest"]
        != (fingerprint(write(tmp_path / "b.jsonl", [{"messages": other}]))["digest"])
    )


def test_fingerprints_are_named_by_source_subset_split_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    rows = {"train": ROWS, "test": ROWS[:3]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split, revision: rows[split])
    monkeypatch.setattr("rlhf.models.hub.check_available", lambda name, kind: None)
    path = write(tmp_path / "rows.jsonl", ROWS)
    found = sources_of(
        {"path": "org/name", "subset": "main", "heldout": "org/name"},
        {"path": path, "heldout": path, "columns": {"prompt": "response"}},
        {"path": path},
    ).fingerprints()
    assert {name: print["rows"] for name, print in found.items()} == {
        "org/name (subset main, split train)": 40,
        "org/name (split test)": 3,
        f"{path} (prompt response)": 40,
        path: 40,
    }


@pytest.mark.parametrize(("rows", "show", "shown"), [(2500, True, True), (2500, False, False), (999, True, False)])
def test_long_reading_and_tokenizing_is_shown_on_the_rank_that_talks(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, show: bool, shown: bool
) -> None:
    from rlhf.data import tokenize_rows

    for module in (load_sources, tokenize_rows):
        monkeypatch.setattr(module, "PROGRESS_MIN_ROWS", 1000)
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"{n}"} for n in range(rows)])
    os.chdir(tmp_path)
    config = DataConfig(datasets=[{"path": "rows.jsonl", "stages": ["ppo"]}])
    with console.capture() as captured:
        sources = read_sources(config, ["ppo"], seed=0, show=show)
        data = load_stage(config, "ppo", tokenizer, seed=0, sources=sources)
    assert len(data.train) + len(data.heldout) == rows, path
    lines = captured.get().splitlines()
    assert len(lines) == (4 if shown else 0)
    if shown:
        assert lines[0] == "reading rows.jsonl: 2,500 rows"
        assert lines[1].startswith("reading rows.jsonl: 2,500/2,500 rows  100%")
        assert lines[3].startswith("ppo: tokenizing rows.jsonl: 2,500/2,500 rows  100%")


def test_a_name_before_all_replies_of_a_source_is_no_part_of_them(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}", "chosen": f"Assistant: yes {n}", "rejected": " Assistant: no"} for n in range(3)]

    def chosen(rows: list[Any]) -> list[str | None]:
        (found,) = sources_of({"path": write(tmp_path / "rows.jsonl", rows)})._read.values()
        return [row.chosen for row in found.rows]

    assert chosen(rows) == ["yes 0", "yes 1", "yes 2"]
    rows[1]["rejected"] = "no"
    assert chosen(rows) == ["Assistant: yes 0", "Assistant: yes 1", "Assistant: yes 2"]


def test_a_limit_and_what_is_cleaned_are_in_the_name_of_a_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    (name,) = sources_of({"path": path, "limit": 20, "clean": ["citations"], "heldout": None}).fingerprints()
    assert name == f"{path} (limit 20, clean ('citations',))"
    assert fingerprint(path, limit=20)["rows"] == 20
