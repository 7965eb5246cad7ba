"""The scores of runs with known truth are refused if there are too few runs to set limits and to report on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    path = Path(__file__).parents[2] / "ci/truth/score.py"
    spec = importlib.util.spec_from_file_location("score", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def write_result(folder: Path, name: str, seed: int, approved: list[float]) -> None:
    result = {"name": name, "group": "kl", "seed": seed, "heldout": {"heldout_approved_share": approved}}
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


def test_too_few_runs_are_refused_with_what_is_missing(score: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no results: train the runs first"):
        score.main()
    write_result(tmp_path, "good-0", 0, [0.4, 0.9])
    write_result(tmp_path, "good-1", 1, [0.4, 0.9])
    write_result(tmp_path, "bad-0", 0, [0.9, 0.2])
    with pytest.raises(SystemExit, match="2 good and 1 over-optimized runs are too few"):
        score.main()
