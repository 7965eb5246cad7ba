"""ci/truth: too few runs are refused; falls of the judge and models that rules keep, counted by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest


def load(name: str) -> Any:
    """Return a module of ci/truth."""
    path = Path(__file__).parents[2] / f"ci/truth/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = load("score")
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


def test_falls_are_since_the_best_evaluation_after_training_began() -> None:
    """Of four rows that all fall by the same number: 4 / sqrt(4) = 2 standard errors."""
    before, best, worse = [9.0] * 4, [2.0] * 4, [1.0] * 4
    assert load("run").measure_falls([before, worse, best, worse, [1.0, 3.0, 1.0, 3.0]]) == [0, 0, 0, 2, 0]


def test_models_that_rules_keep_are_counted_by_hand(score: Any) -> None:
    """Quality is best at the second evaluation, the judge's score at the third, and the reward at the last.

    The judge's fall is sure at the fourth. The last model has left its reference, so that no rule keeps it.
    """
    heldout = {
        "heldout_approved_share": [0.4, 0.8, 0.6, 0.2, 0.1],
        "heldout_reward": [0.0, 1.0, 2.0, 3.0, 4.0],
        "heldout_judge_reward": [9.0, 1.0, 2.0, 1.0, 0.0],
        "heldout_judge_fall": [0.0, 0.0, 0.0, 3.5, 9.0],
        "heldout_kl": [0.0, 1.0, 2.0, 3.0, 99.0],
        "heldout_response_length": [10.0] * 5,
    }
    result = {
        "group": "pairs",
        "pairs": 32,
        "seed": 0,
        "steps": [0, 10, 20, 30, 40],
        "training": {},
        "heldout": heldout,
    }
    assert {name: rule(result) for name, rule in score.CHOICES.items()} == {
        "the best by the rule of the world": 0.8,
        "the last": 0.1,
        "`keep: best(reward)`": 0.2,
        "`keep: best(judge_reward)`": 0.6,
        "`stop: over_optimized`": 0.6,
    }
    early = heldout | {
        "heldout_judge_fall": [0.0, 0.0, 3.5, 3.5, 9.0],
        "heldout_judge_reward": [9.0, 2.0, 1.0, 3.0, 0.0],
    }
    assert score.CHOICES["`stop: over_optimized`"](result | {"heldout": early}) == 0.8, "the run ends before step 30"
    ruined = result | {"heldout": heldout | {"heldout_kl": [0.0, 99.0, 99.0, 99.0, 99.0]}}
    assert score.CHOICES["`stop: over_optimized`"](ruined) == 0.2, (
        "the last model of the run that ended, as training saves"
    )
    table = list(score.describe_choices([result]))
    assert table[0] == "| kept | 32 pairs (1 runs) |" and table[3] == "| the last | 10% (regret 88%) |"
