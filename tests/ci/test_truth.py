"""ci/truth: too few runs are refused; falls of the judge and models that rules keep, counted by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

NUMBERS = ("reward", "judge_reward", "judge_fall", "kl", "response_length", "distinct_2", "truncated_share")
TRAINING = {name: [1.0] * 40 for name in ("entropy", "response_length", "kl", "clip_fraction", "explained_variance")}


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


def write_rows(share: float) -> str:
    """Return the judgements of twenty rows, the same share of those with even and with odd numbers."""
    return "".join("01"[place < round(share * 10)] * 2 for place in range(10))


def write_result(folder: Path, name: str, seed: int, approved: list[float]) -> None:
    heldout = {"heldout_approved_share": approved}
    rows = [write_rows(share) for share in approved]
    result = {"name": name, "group": "kl", "seed": seed, "heldout": heldout, "approved": rows}
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
        "approved": [write_rows(share) for share in heldout["heldout_approved_share"]],
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


def test_peak_is_found_by_one_half_of_the_rows_and_read_from_the_other(score: Any) -> None:
    """Even rows: 0, 1, 0, 0, read from odd ones: 0.5. Odd rows: 0, 0.5, 1, 0, read from even ones: 0."""
    assert score.peak({"approved": ["0000", "1110", "0101", "0000"]}) == (0.5 + 0.0) / 2


def test_training_that_ends_keeps_the_model_before_the_alarm(score: Any) -> None:
    """The first evaluation whose statistic is read is the third."""
    run = {"name": "a", "heldout": {"heldout_approved_share": [0.1, 0.2, 0.3, 0.4, 0.5]}}
    kept = [score._stop(run, {"a": statistic}, 1.0) for statistic in ([2, 0, 0], [0, 2, 2], [0, 0, 2], [1, 1, 1])]
    assert kept == [0.2, 0.3, 0.4, 0.5]


def test_rules_that_end_training_are_compared(score: Any) -> None:
    """A run and its quality fall at the last evaluation, as the deviation of the reward does; another one does not."""
    results = []
    for seed in (0, 1):
        approved = [0.4, 0.8, 0.8, 0.8, 0.1]
        training = {"reward": [0.0] * 40, "reward_std": [2.0] * 30 + [0.1] * 10}
        heldout = {"heldout_approved_share": approved, **{f"heldout_{name}": [1.0] * 5 for name in NUMBERS}}
        rows = [write_rows(share) for share in approved]
        place = {"name": f"run-{seed}", "group": "pairs", "pairs": 32, "seed": seed, "steps": [0, 10, 20, 30, 40]}
        results.append({**place, "training": TRAINING | training, "heldout": heldout, "approved": rows})
        good = {**place, "name": f"good-{seed}", "approved": rows[:1] + rows[1:2] * 4}
        good_heldout = heldout | {"heldout_approved_share": [0.4, *[0.8] * 4]}
        results.append({**good, "training": TRAINING | training | {"reward_std": [2.0] * 40}, "heldout": good_heldout})
    rows_by_name = {line.split(" | ")[0].strip("| "): line for line in score.describe_stops(results)}
    assert "10% (regret 88%) | 80% (regret 0%) | 45% (regret 44%)" in rows_by_name["never"]
    assert "| 20 | 80% (regret 0%) | 80% (regret 0%)" in rows_by_name["at a fixed step"]
    assert "80% (regret 0%) | 80% (regret 0%) | 80% (regret 0%)" in rows_by_name["reward deviation"]


def test_page_has_the_tables_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    load("score").main()
    printed = capsys.readouterr().out.splitlines()
    servers = load("servers")
    compared = servers.format_comparison(servers.read_results()).splitlines()
    assert len(compared) == 2 + len(servers.list_ways())
    for name, lines in [("diagnosis", printed), ("rollouts", compared)]:
        page = (Path(__file__).parents[2] / f"docs/{name}.md").read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if line and line not in page] == []


def test_ways_of_drawing_are_compared_by_seed_as_counted_by_hand() -> None:
    """Ten differences: mean 0.01, deviation 0.02, so the 90 % interval is 0.01 +- 1.8331 x 0.02 / sqrt(10)."""
    servers = load("servers")
    own = {str(seed): 0.8 + 0.01 * seed for seed in range(10)}
    offsets = [-0.02, 0.02, -0.01, 0.01, 0.0, 0.0, 0.03, -0.03, 0.02, -0.02]
    scale = 0.02 / (sum(value**2 for value in offsets) / 9) ** 0.5
    other = {seed: value + 0.01 + scale * offset for (seed, value), offset in zip(own.items(), offsets)}
    compared = servers.Comparison.between(own, other | {"11": 5.0})
    assert compared.pairs == 10 and compared.mean == pytest.approx(0.01)
    assert compared.error == pytest.approx(1.8331 * 0.02 / 10**0.5, rel=1e-4)
    assert compared.is_within(0.0217) and not compared.is_within(0.0215)
    assert not servers.Comparison.between(own, {"0": 0.8}).is_within(1.0)
    lines = servers.format_comparison({"here": own, "bf16, tis": other}).splitlines()
    assert lines[2] == "| itself, fp32 | 10 | 0.845 | margin 0.030 | |"
    assert lines[3] == "| bf16, tis | 10 | 0.855 | -0.002 to +0.022 | yes |"
