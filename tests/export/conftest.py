"""A run's folder whose records are written here by hand, so that exports are compared with the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import Config

SFT: list[dict[str, Any]] = [
    {"stage": "sft", "step": 0, "time": 100.0, "heldout_perplexity": 700.5},
    {"stage": "sft", "step": 0, "time": 100.5, "tag": "heldout_0", "text": 'a prompt\na completion, with "quotes"'},
    {"stage": "sft", "step": 1, "time": 101.0, "loss": 6.25, "tokens": 512, "grad_norm": None},
    {"stage": "sft", "step": 2, "time": 102.0, "loss": 5.125, "tokens": 480, "grad_norm": 1.5, "seconds": 0.1},
    {"stage": "sft", "step": 2, "time": 103.0, "heldout_perplexity": 111.1},
    {"stage": "sft", "step": 2, "time": 103.5, "tag": "heldout_warning", "text": "hardly learned", "rule": "sft"},
]
PPO: list[dict[str, Any]] = [
    {"stage": "ppo", "step": 0, "time": 1_700_000_000.0, "heldout_reward": 0.5},
    {"stage": "ppo", "step": 1, "time": 1_700_000_001.0, "reward": 0.1, "reward/brevity": -3.0, "tokens": 12},
    {"stage": "ppo", "step": 3, "time": 1_700_000_003.0, "reward": 0.3, "reward/brevity": -2.0, "tokens": 14},
    {"stage": "ppo", "step": 3, "time": 1_700_000_004.0, "heldout_reward": 1.25},
]
PROMPTS = ["What says the cow?", '=1+1, "two"\nlines, 牛']
ROWS: dict[int, list[dict[str, Any]]] = {
    0: [
        {"completion": "moo", "reward": 1.0, "kl": 0.0, "tokens": 3, "ended": 1, "approved": True},
        {"completion": "baa baa", "reward": 0.0, "kl": 0.0, "tokens": 16, "ended": 0, "approved": False},
    ],
    3: [
        {"completion": "moo!", "reward": 2.0, "kl": 0.75, "tokens": 4, "ended": 1, "approved": True},
        {"completion": "2", "reward": 0.5, "kl": None, "tokens": 2, "ended": 1, "approved": True},
    ],
}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of SFT and PPO that is not complete."""
    folder = tmp_path / "runs" / "mine_1"
    write_lines(folder / "sft/metrics.jsonl", SFT)
    write_lines(folder / "ppo/metrics.jsonl", PPO)
    first = [{"prompt": prompt, **row} for prompt, row in zip(PROMPTS, ROWS[0])]
    write_lines(folder / "ppo/heldout.jsonl", [{"step": 0, "rows": first}, {"step": 3, "rows": ROWS[3]}])
    config = Config(output=folder).model_dump(mode="json")
    (folder / "run.json").write_text(json.dumps({"config": config, "invocations": []}))
    return folder
