"""`rlhf evaluate` on a finished run's held-out rows gives the numbers that its stages gave."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest


def heldout(rlhf: Any, run: Path, option: str, *more: object) -> Any:
    done = rlhf("evaluate", run, option, "heldout", "--json", "--rows", *more, recipe=None)
    return json.loads(done.stdout)["models"][0]


def after(run: Path, stage: str) -> Any:
    return json.loads((run / stage / "stage.json").read_text())["after"]


def test_reward_model_scores_heldout_pairs_as_its_stage_did(rlhf: Any, finished_run: Path) -> None:
    """The stage took the first 8 of them (reward.eval_rows)."""
    report, then = heldout(rlhf, finished_run, "--pairs"), after(finished_run, "reward")
    rows = report["each"][:8]
    assert report["pairs"] > 8 and report["folder"] == str(finished_run / "reward" / "model")
    assert fmean(pair["chosen"] for pair in rows) == pytest.approx(then["chosen_score"], abs=1e-5)
    assert fmean(pair["rejected"] for pair in rows) == pytest.approx(then["rejected_score"], abs=1e-5)
    assert fmean(pair["chosen"] > pair["rejected"] for pair in rows) == then["accuracy"]


def test_a_language_model_s_perplexity_is_that_of_its_stage(rlhf: Any, finished_run: Path) -> None:
    report, then = heldout(rlhf, finished_run / "sft", "--text"), after(finished_run, "sft")
    rows = report["each"][:8]
    nll, tokens = sum(row["nll"] for row in rows), sum(row["tokens"] for row in rows)
    assert report["rows"] >= 8 and math.exp(nll / tokens) == pytest.approx(then["perplexity"], rel=1e-5)
    policy = heldout(rlhf, finished_run, "--text")
    assert policy["folder"] == str(finished_run / "ppo" / "model") and policy["loss"] != report["loss"]
