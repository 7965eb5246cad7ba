"""Many of PPO's settings at once, on two ranks: a killed run resumes to the weights of an uninterrupted one."""

from __future__ import annotations

import json

import pytest

from rlhf.reporting.timers import is_machine_dependent
from tests.helpers import assert_same_weights, kill_at, models_of, sets

KEYS = (
    "engine.zero_stage=3",
    "lora.rank=2",
    "lora.save=merged",
    "ppo.steps=4",
    "ppo.batch_size=8",
    "ppo.minibatch_size=4",
    "ppo.micro_batch_size=1",
    "ppo.generation_batch_size=3",
    "ppo.completions_per_prompt=2",
    "ppo.ppo_epochs=2",
    "ppo.kl_stop=1e-4",
    "ppo.kl_target=1",
    "ppo.kl_horizon=40",
    "ppo.ema=0.75",
    "ppo.eval_every=2",
    "ppo.keep=best(reward)",
    "ppo.normalize_scores=running",
    "ppo.ptx_coef=1",
    "ppo.ptx_length=16",
    "ppo.ptx_batch_size=2",
    "ppo.missing_eos_penalty=1",
    "ppo.entropy_coef=0.01",
    "ppo.optimizer.learning_rate=1e-2",
    "ppo.dropout=0.1",
    "lora.learning_rate=2e-2",
)


@pytest.mark.slow
def test_killed_run_of_many_settings_resumes_to_the_same_weights(rlhf, finished_run, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"word {n} and more of it " * 5}) + "\n" for n in range(30)))
    functions = tmp_path / "rewards.py"
    functions.write_text("def short(prompt, completion, row):\n    return -len(completion) / 10\n")
    keys = (
        *models_of(finished_run),
        f"data.pretraining={texts}",
        f"ppo.reward_functions={functions}:short",
        *KEYS,
    )
    whole, killed = (
        ["ppo", "--ranks", "2", "--output", str(tmp_path / name), *sets(*keys)] for name in ("whole", "killed")
    )
    assert "rows of 16 tokens of raw text, of 30 documents; 2 in each update" in rlhf(*whole).stdout
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["data"]["data.pretraining"]["rows"] == 30
    often = sets("ppo.checkpoint_every=1")
    kill_at(tmp_path / "killed" / "ppo" / "checkpoints" / "step-00000003", rlhf, *killed, *often)
    assert not (tmp_path / "killed" / "ppo" / "model-ema").exists()
    on_host = sets("ppo.ema_on_host=true")  # where the average lies may change
    assert "resumed after step" in rlhf(*killed, *often, *on_host, "--resume").stdout
    for name in ("model", "model-ema"):
        assert_same_weights(tmp_path / "killed" / "ppo" / name, tmp_path / "whole" / "ppo" / name)
    resumed, expected = (records(tmp_path / name / "ppo") for name in ("killed", "whole"))
    assert resumed == expected
    made = {line["updates"] for line in expected if "updates" in line}
    assert min(made) < 4, "some rollouts end early"


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key != "time" and not is_machine_dependent(key)} for line in lines
    ]
