"""Runs whose rewards come from functions, as a user starts them: beside a reward model or without one, and broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.preflight.bench import settings

REWARDS = '''
import os
import re

seen = []

def please(prompt, completion, row):
    seen.append(row["prompt"] == prompt and row["chosen"].startswith("please"))
    return float("please" in completion) + 100 * (not all(seen))

def length(prompt, completion, row):
    print("a user's print")
    return len(completion.split())

def third(prompt, completion, row):
    """Fails in rank 1's process alone, where there are two."""
    seen.append(prompt)
    if len(seen) == 3 and os.environ.get("RANK", "1") == "1":
        return row["answer"]
    return 0.0

def leaves(prompt, completion, row):
    os._exit(7)
'''


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def records(output: Path, key: str) -> list[float]:
    lines = (output / "ppo" / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


def ppo(finished_run: Path, **keys: Any) -> list[str]:
    """Arguments of a stage ppo from the finished run's models."""
    return ["ppo", *settings(ppo__actor=finished_run / "sft" / "model", **keys)]


def test_functions_and_a_model_add_up_and_are_recorded_by_name(
    rlhf: Callable[..., Any], finished_run: Path, rewards: Path, tmp_path: Path
) -> None:
    functions = (
        f"[{{function: {rewards}:please, weight: 2}}, {{function: {rewards}:length, weight: -0.1, name: words}}]"
    )
    model = settings(ppo__reward_model=finished_run / "reward" / "model", ppo__reward_weight=0.5)
    rlhf(*ppo(finished_run, ppo__reward_functions=functions), *model, "--output", tmp_path / "run")
    for prefix, count in (("", 3), ("heldout_", 2)):
        parts = {
            key: records(tmp_path / "run", prefix + key) for key in ("reward_model", "reward/please", "reward/words")
        }
        totals = records(tmp_path / "run", f"{prefix}reward")
        assert len(totals) == count and all(len(values) == count for values in parts.values())
        for model, please, words, total in zip(*parts.values(), totals):
            assert total == pytest.approx(0.5 * model + 2 * please - 0.1 * words, abs=1e-5)
            assert 0 <= please <= 1 and 0 <= words <= 16
