"""Runs to make pages of: one of 1,000 steps, and one whose texts are hostile."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rlhf.diagnosis.records import read_run
from rlhf.diagnosis.verdict import ExaminedRun, examine_run
from rlhf.reporting.recorder import Recorder
from rlhf.runs.directory import RunDirectory
from tests.diagnosis.records import write_run

BAD = """</script><img src=x onerror=alert(1)> <b>"bold" & 'quoted'</b> \u2028 {{ 7 * 7 }} {% raw %} 😀"""
STEPS = 1_000


def completions(rows: int, step: int, text: str = "The plum is red, of course. ") -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Question {row}: {text * 3}",
            "completion": f"{text * 8}{step}",
            "reward": row % 7 + step / 100,
            "kl": step / 50,
            "tokens": 40.0,
            "ended": 1.0,
            "approved": row % 2 == 0,
        }
        for row in range(rows)
    ]


def sample(text: str = "word", tokens: int = 200) -> dict[str, Any]:
    numbers = {name: [math.sin(token) for token in range(tokens)] for name in ("log_ratio", "value", "advantage")}
    return {
        "prompt": text,
        "completion": text * 5,
        "score": 1.0,
        "kl": 0.5,
        "tokens": tokens,
        "pieces": [f" {text}"] * tokens,
        "by_token": numbers,
    }


def build_long_run(folder: Path) -> ExaminedRun:
    """A run of 1,000 steps of PPO with 20 evaluations of 256 prompts and 100 samples of 200 tokens."""
    names = (
        *("reward", "reward_std", "tokens", "response_length", "kl", "entropy", "truncated_share", "policy_loss"),
        *("value_loss", "clip_fraction", "approx_kl", "value_clip_fraction", "explained_variance", "grad_norm"),
        *("critic_grad_norm", "learning_rate", "draw_gap", "draw_gap_max", "kl_coef", "score_clip_fraction", "seconds"),
    )
    numbers = {name: [1 + math.sin(step / 50 + len(name)) for step in range(STEPS)] for name in names}
    evaluated = list(range(0, STEPS + 1, 50))
    held_out = {f"heldout_{name}": [step / STEPS for step in evaluated] for name in ("reward", "kl", "approved_share")}
    write_run(
        folder,
        {"ppo": numbers | held_out},
        steps=dict.fromkeys(held_out, evaluated),
        heldout={"ppo": {step: completions(256, step) for step in evaluated}},
    )
    with Recorder(RunDirectory(folder).stage("ppo"), resume_step=STEPS) as recorder:
        for step in range(0, STEPS, 10):
            recorder.text("sample_0", step, "text", {"sample": sample()})
    return examine_run(read_run(folder))


def bad_run(folder: Path) -> ExaminedRun:
    """A run in which every text that models, data and users write is hostile."""
    run = write_run(
        folder / BAD.replace("/", "").replace("\u2028", "")[:60],
        {
            "sft": {"loss": [1.0, 0.5]},
            "ppo": {"reward": [0.0, 1.0], "heldout_reward": [0.0, 1.0], "heldout_kl": [0.0, 1.0]},
        },
        heldout={
            "ppo": {
                step: [{**row, "prompt": BAD, "completion": BAD} for row in completions(3, step)] for step in (0, 1)
            }
        },
        settings={"seed": 3},
    )
    with Recorder(run.directory.stage("ppo"), resume_step=5) as recorder:
        recorder.text("sample_0", 1, BAD, {"sample": sample(BAD, 3)})
        recorder.text("warning", 1, f"{BAD}; {BAD}", {"rule": BAD, "state": BAD, "remedy": BAD})
    with Recorder(run.directory.stage("sft"), resume_step=5) as recorder:
        for step in (0, 1):
            recorder.text("heldout_0", step, f"{BAD}\n{BAD}")
    description = json.loads(run.directory.description.read_text())
    description["invocations"][0]["command"] = description["versions"][BAD] = f"{BAD} \udcff"
    description["data"] = {BAD: {"rows": 1, "digest": "d", "dropped": 2}}
    description["accelerator"] = {"name": BAD, "reason": BAD, "device": {"model": BAD, "count": 1, "software": BAD}}
    run.directory.description.write_text(json.dumps(description))
    return examine_run(read_run(run.path))
