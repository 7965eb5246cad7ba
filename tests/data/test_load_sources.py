"""Sources are read once, have fingerprints of their rows, and long reads show their progress."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import STAGES, DataConfig, Stage
from rlhf.data import examples as examples_module
from rlhf.data import load_sources
from rlhf.data.load_sources import SourceReader, read_sources
from rlhf.data.stage_dataset import load_stage
from rlhf.errors import DataError
from rlhf.reporting.console import console
from tests.data.rows import parse, turns, write_jsonl

ROWS = [
    {"prompt": f"Question {n}?", "response": f"a\n{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)
]


def sources_of(*datasets: dict[str, Any], stages: tuple[Stage, ...] = STAGES) -> SourceReader:
    return read_sources(DataConfig(datasets=datasets), stages, seed=0)


def fingerprint(path: str, **dataset: Any) -> dict[str, object]:
    return parse(path=path, **dataset).fingerprint()


def test_source_is_read_once_for_all_stages(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", ROWS[n::2]) for n in range(2)]
    rows = [row | {"prompt": "held out", "response": "?"} for row in ROWS]
    heldout = write_jsonl(tmp_path / "held.jsonl", rows)
    opened, read = [], load_sources.read_records
    monkeypatch.setattr(
        load_sources, "read_records", lambda path, **options: (opened.append(path), read(path, **options))[1]
    )
    sft = {"path": paths[0], "stages": ["sft"], "heldout": heldout}, {"path": paths[0], "stages": ["reward"]}
    config = DataConfig(datasets=[*sft, {"path": paths[1], "stages": ["reward", "ppo"], "heldout": heldout}])
    sources = read_sources(config, STAGES, seed=0)
    data = [load_stage(config, stage, tokenizer, seed=0, sources=sources) for stage in STAGES]
    assert sorted(opened) == sorted([*paths, heldout])
    assert data == [load_stage(config, stage, tokenizer, seed=0) for stage in STAGES]


def test_heldout_source_needs_the_sources_of_other_stages(tmp_path: Path) -> None:
    """Its rows must not be among theirs."""
    first, second, heldout = (write_jsonl(tmp_path / f"{n}.jsonl", ROWS) for n in range(3))
    datasets: tuple[dict[str, Any], ...] = ({"path": first, "stages": ["sft"]}, {"path": second, "stages": ["ppo"]})
    assert set(sources_of(*datasets, stages=("ppo",)).fingerprints()) == {second}
    datasets[1]["heldout"] = heldout
    assert set(sources_of(*datasets, stages=("ppo",)).fingerprints()) == {first, second, heldout}


def test_missing_source_is_an_error_before_any_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr(load_sources, "read_records", lambda *names, **options: pytest.fail("read"))
    with pytest.raises(DataError, match=r"absent.jsonl: no such file"):
        sources_of({"path": path, "heldout": str(tmp_path / "absent.jsonl")})


def test_fingerprint_ignores_place_format_and_line_ends(tmp_path: Path) -> None:
    expected = fingerprint(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    assert (expected["rows"], expected["dropped"]) == (40, 0)
    (tmp_path / "folder").mkdir()
    assert fingerprint(write_jsonl(tmp_path / "folder" / "other.jsonl", ROWS, "\r\n")) == expected
    assert fingerprint(write_jsonl(tmp_path / "rows.json", [json.dumps(ROWS)])) == expected
    for name, line_break in (("unix.csv", "\n"), ("windows.csv", "\r\n")):
        path = tmp_path / name
        with path.open("w", encoding="utf-8", newline=line_break) as lines:
            table = csv.DictWriter(lines, list(ROWS[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(ROWS)
        assert fingerprint(str(path)) == expected


def test_fingerprint_depends_on_every_row_and_their_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    expected = fingerprint(write_jsonl(path, ROWS))
    assert fingerprint(write_jsonl(path, [*ROWS, "{"])) == expected | {"dropped": 1}
    sources = [ROWS, ROWS[::-1], [{"messages": turns("a", "b")}], [{"messages": turns("a")}]]
    for column in ("prompt", "response", "chosen", "rejected"):
        sources.append([*ROWS[:20], ROWS[20] | {column: ROWS[20][column] + "."}, *ROWS[21:]])
    assert len({fingerprint(write_jsonl(path, rows))["digest"] for rows in sources}) == len(sources)


def test_fingerprints_are_named_by_the_settings_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = {"train": ROWS, "test": ROWS[:3]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split, revision: rows[split])
    monkeypatch.setattr("rlhf.models.hub.check_available", lambda name, kind: None)
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    fingerprints = sources_of(
        {"path": "org/name", "subset": "main", "heldout": "org/name"},
        {"path": path, "heldout": path, "columns": {"prompt": "response"}},
        {"path": path},
        {"path": path, "limit": 20, "clean": ["citations"]},
    ).fingerprints()
    assert {name: entry["rows"] for name, entry in fingerprints.items()} == {
        "org/name (subset main, split train)": 40,
        "org/name (split test)": 3,
        f"{path} (prompt response)": 40,
        path: 40,
        f"{path} (limit 20, clean ('citations',))": 20,
    }


@pytest.mark.parametrize(("rows", "show", "shown"), [(2500, True, True), (2500, False, False), (999, True, False)])
def test_long_reads_and_tokenization_show_a_bar(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, show: bool, shown: bool
) -> None:
    for module in (load_sources, examples_module):
        monkeypatch.setattr(module, "PROGRESS_MIN_ROWS", 1000)
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n}"} for n in range(rows)])
    monkeypatch.chdir(tmp_path)
    config = DataConfig(datasets=[{"path": "rows.jsonl", "stages": ["ppo"]}])
    with console.capture() as captured:
        sources = read_sources(config, ["ppo"], seed=0, show=show)
        data = load_stage(config, "ppo", tokenizer, seed=0, sources=sources)
    assert len(data.train) + len(data.heldout) == rows
    lines = captured.get().splitlines()
    assert len(lines) == (4 if shown else 0)
    if shown:
        assert lines[0] == "reading rows.jsonl: 2,500 rows"
        assert lines[1].startswith("reading rows.jsonl: 2,500/2,500 rows  100%")
        assert lines[3].startswith("ppo: tokenizing rows.jsonl: 2,500/2,500 rows  100%")


def test_assistant_name_before_all_replies_is_removed(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}", "chosen": f"Assistant: yes {n}", "rejected": " Assistant: no"} for n in range(3)]

    def chosen() -> list[str | None]:
        return [row.chosen for row in parse(path=write_jsonl(tmp_path / "rows.jsonl", rows)).rows]

    assert chosen() == ["yes 0", "yes 1", "yes 2"]
    rows[1]["rejected"] = "no"
    assert chosen() == ["Assistant: yes 0", "Assistant: yes 1", "Assistant: yes 2"]
