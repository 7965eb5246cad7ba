"""PPO goes on modelling raw text from a file, and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_raw_text_is_read_learned_from_and_recorded(rlhf: Any, finished_run: Path, tmp_path: Path) -> None:
    texts, output = tmp_path / "texts.jsonl", tmp_path / "run"
    texts.write_text("".join(json.dumps({"text": f"red cow {n} moo please"}) + "\n" for n in range(60)))
    models = [f"ppo.actor={finished_run / 'sft' / 'model'}", f"ppo.reward_model={finished_run / 'reward' / 'model'}"]
    keys = [*models, f"data.pretraining={texts}", "ppo.ptx_coef=1", "ppo.ptx_length=16", "ppo.steps=3"]
    settings = [part for key in keys for part in ("--set", key)]
    found = rlhf("ppo", "--output", output, *settings)
    assert "rows of 16 tokens of raw text, of 60 documents; 2 in each update" in found.stdout
    lines = [json.loads(line) for line in (output / "ppo" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["ptx_loss"] for line in lines if "policy_loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert json.loads((output / "run.json").read_text())["data"]["data.pretraining"]["rows"] == 60
