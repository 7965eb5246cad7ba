"""Records of which a line has values of other types than records have are left out, as are lines cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.utils.jsonl import read_records

SAMPLE = {"prompt": "a", "score": 1.0, "kl": None, "tokens": 1, "pieces": ["b"], "by_token": {"value": [0.5, None]}}
RECORDS: list[dict[str, Any]] = [
    {"step": 0, "stage": "ppo", "time": 1.5, "heldout_reward": 1, "grad_norm": None},
    {"step": 1, "tag": "sample_0", "text": "a\n\U0001f600", "sample": SAMPLE},
    {"step": 2, "rows": [{"prompt": "a", "completion": "b", "reward": 0.5, "rewards": [1.0, None], "kl": None}]},
]


def read(folder: Path, *records: Any) -> list[dict[str, Any]]:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return list(read_records(path))


def test_records_that_rlhf_writes_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, *RECORDS) == RECORDS


@pytest.mark.parametrize(
    "change",
    [
        {"step": True},
        {"step": -1},
        {"step": 10**400},
        {"loss": "1"},
        {"loss": [1]},
        {"loss": 10**400},
        {"loss": float("nan")},
        {"time": {}},
        {"tag": 1},
        {"text": None},
        {"sample": []},
        {"sample": {**SAMPLE, "prompt": {}}},
        {"sample": {**SAMPLE, "pieces": [1]}},
        {"sample": {**SAMPLE, "by_token": {"value": 1}}},
        {"sample": {**SAMPLE, "by_token": {"value": ["1"]}}},
        {"sample": {name: value for name, value in SAMPLE.items() if name != "tokens"}},
        {"rows": {}},
        {"rows": ["a"]},
        {"rows": [{"reward": "1"}]},
        {"rows": [{"rewards": 1.0}]},
        {"text": "\ud800"},
        {"rows": [{"completion": "\ud800"}]},
        {"reward/\ud800": 1.0},
    ],
    ids=str,
)
def test_record_with_a_value_of_another_type_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    assert read(tmp_path, RECORDS[0], RECORDS[0] | change, RECORDS[2]) == [RECORDS[0], RECORDS[2]]
