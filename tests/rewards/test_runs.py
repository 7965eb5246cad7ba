"""Runs whose rewards come from functions, as a user starts them: with and without a reward model, and broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import weights
from tests.preflight.mistakes import settings

REWARDS = '''
import os
from pathlib import Path

HERE = Path(__file__).parent
seen = []

def please(prompt, completion, row):
    """1 for the word; 100 more where the row is not the prompt's, as the data file has it."""
    return float("please" in completion.split()) + 100 * (row["prompt"] != prompt or "go away" not in row["rejected"])

def words(prompt, completion, row):
    print("a user's print")
    return len(completion.split())

def counted(prompt, completion, row):
    """Remembers, in a file of each process, what it was called with."""
    with open(HERE / f"calls-{os.getpid()}", "a") as file:
        file.write(prompt + "\\n")
    return 0.0

def until_fixed(prompt, completion, row):
    seen.append(prompt)
    return 0.0 if len(seen) < 20 or (HERE / "fixed").exists() else row["answer"]

def leaves_on_rank_1(prompt, completion, row):
    if os.environ.get("RANK") == "1":
        os._exit(7)
    return 0.0
'''


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def alone(rewards: Path, finished_run: Path) -> Callable[..., list[str]]:
    """Arguments of a stage ppo in a folder that holds nothing, rewarded by one function alone."""

    def arguments(name: str, **keys: Any) -> list[str]:
        named = settings(ppo__actor=finished_run / "sft" / "model", ppo__reward_functions=f"[{rewards}:{name}]")
        return ["ppo", *named, *settings(ppo__reward_weight=0, **keys), "--output", str(rewards.parent / "run")]

    return arguments


def records(output: Path, key: str) -> list[float]:
    lines = (output / "ppo" / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


def test_functions_and_model_add_up_and_are_recorded_by_name(
    rlhf: Callable[..., Any], finished_run: Path, rewards: Path, tmp_path: Path
) -> None:
    functions = f"[{{function: {rewards}:please, weight: 2}}, {{function: {rewards}:words, weight: -0.1, name: long}}]"
    named = settings(ppo__actor=finished_run / "sft" / "model", ppo__reward_model=finished_run / "reward" / "model")
    rlhf(
        "ppo", *named, *settings(ppo__reward_functions=functions, ppo__reward_weight=0.5), "--output", tmp_path / "run"
    )
    for prefix, count in (("", 3), ("heldout_", 2)):
        names = ("reward_model", "reward/please", "reward/long")
        parts = [records(tmp_path / "run", prefix + key) for key in names]
        totals = records(tmp_path / "run", f"{prefix}reward")
        assert len(totals) == count and all(len(values) == count for values in parts)
        for model, please, words, total in zip(*parts, totals, strict=True):
            assert total == pytest.approx(0.5 * model + 2 * please - 0.1 * words, abs=1e-5)
            assert 0 <= please <= 1 and 0 < words <= 16


def test_run_without_reward_model_scores_each_row_once(
    rlhf: Callable[..., Any], finished_run: Path, alone: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Two ranks, three steps of four rows, and twice six held-out rows in batches of four: each row is scored once."""
    before = finished_run / "sft" / "model"
    rlhf(*alone("counted"), "--ranks", 2)
    calls = [path.read_text().splitlines() for path in tmp_path.glob("calls-*")]
    # A process that is asked for nothing leaves no file: those of the checks before the run.
    assert len(calls) == 2 and sum(map(len, calls)) == 3 * 4 + 2 * 6
    assert records(tmp_path / "run", "reward") == [0.0] * 3 and not records(tmp_path / "run", "reward_model")
    assert len(records(tmp_path / "run", "value_loss")) == 3
    assert weights(tmp_path / "run" / "ppo" / "model").keys() == weights(before).keys()


def test_run_resumes_after_the_failing_function_is_fixed(
    rlhf: Callable[..., Any], alone: Callable[..., list[str]], rewards: Path
) -> None:
    result = rlhf(*alone("until_fixed", ppo__checkpoint_every=1, ppo__steps=6), check=False)
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("rlhf: error: "))
    assert result.returncode == 2
    start = f"rlhf: error: reward function {rewards}:until_fixed: KeyError: 'answer' at {rewards}:"
    assert line.startswith(start) and line.endswith("with --resume if the run has completed a step")
    # 6 rows of the first evaluation, then 4 a step: the 20th is in the fourth step.
    assert (
        sorted(path.name for path in (rewards.parent / "run" / "ppo" / "checkpoints").iterdir())[-1] == "step-00000003"
    )
    (rewards.parent / "fixed").touch()
    rlhf("ppo", "--output", rewards.parent / "run", "--resume", recipe=None)
    assert len(records(rewards.parent / "run", "reward/until_fixed")) == 6


def test_only_the_rank_whose_function_fails_reports(
    rlhf: Callable[..., Any], alone: Callable[..., list[str]], rewards: Path
) -> None:
    result = rlhf(*alone("leaves_on_rank_1"), "--ranks", 2, check=False)
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("rlhf: error: "))
    assert result.returncode == 2 and f"{rewards}:leaves_on_rank_1: ended its process with exit code 7; for" in line


def test_dry_run_notes_a_reward_model_without_use(rlhf: Callable[..., Any], rewards: Path, tmp_path: Path) -> None:
    keys = settings(ppo__reward_weight=0, ppo__reward_functions=f"{rewards}:words")
    shown = " ".join(rlhf("--dry-run", *keys, "--output", tmp_path / "run").stdout.split())
    assert "ppo.reward_weight is 0: PPO does not use the reward model" in shown
    assert "ppo.reward_model" not in shown and "ppo.critic" in shown


@pytest.mark.slow
def test_critic_may_start_from_another_model(rlhf: Callable[..., Any], finished_run: Path, tmp_path: Path) -> None:
    """One that has a head keeps it: nothing is trained here, so its values are those of that model."""
    other = tmp_path / "critic"
    shutil.copytree(finished_run / "reward" / "model", other)
    named = {"ppo__actor": finished_run / "sft" / "model", "ppo__reward_model": finished_run / "reward" / "model"}
    still = {"ppo__critic_optimizer__learning_rate": 1e-30, "ppo__optimizer__learning_rate": 1e-30}
    still |= {"ppo__steps": 1, "ppo__eval_rows": 1}
    losses = []
    for number, critic in enumerate((None, other, finished_run / "sft" / "model")):
        keys = named | still | ({"ppo__critic": critic} if critic else {})
        rlhf("ppo", *settings(**keys), "--output", tmp_path / f"run-{number}")
        losses.append(records(tmp_path / f"run-{number}", "value_loss")[0])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["engine.zero_stage=0", "engine.zero_stage=3"])
def test_run_without_reward_model_with_lora_or_sharding(
    rlhf: Callable[..., Any], alone: Callable[..., list[str]], rewards: Path, engine: str
) -> None:
    """The critic has a separate base, and a head that is trained and kept."""
    lora = ["--set", "lora.rank=2"] if engine.endswith("0") else []
    result = rlhf(*alone("words"), "--set", engine, *lora)
    assert ("actor and reference share one frozen base; the others do not: the critic" in result.stdout) == bool(lora)
    assert len(records(rewards.parent / "run", "critic_grad_norm")) == 3


@pytest.mark.slow
def test_run_without_critic_and_without_reward_model(
    rlhf: Callable[..., Any], alone: Callable[..., list[str]], rewards: Path
) -> None:
    """Each completion of a prompt is seen, and only the policy and its reference are loaded."""
    rlhf(*alone("please", ppo__estimator="rloo", ppo__completions_per_prompt=2))
    run = rewards.parent / "run"
    assert max(records(run, "reward")) <= 1.0 and not records(run, "value_loss")
    assert json.loads((run / "ppo" / "stage.json").read_text())["parameters"].keys() == {"actor"}
