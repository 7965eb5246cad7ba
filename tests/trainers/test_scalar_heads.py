"""All stages with a family that transformers has no sequence classifier of: runs, their folders, and their messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.table import BY_NAME
from tests.helpers import assert_same_weights, build_tokenizer, kill_at, models_of, sets, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Cohere 2 with its tokenizer."""
    from transformers import Cohere2ForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("tiny-cohere2"), build_tokenizer()
    torch.manual_seed(0)
    changes = {"max_position_embeddings": 128, "sliding_window": 16, "eos_token_id": 1}
    config = BY_NAME["Cohere 2"].configuration(vocab_size=len(tokenizer), **changes)
    Cohere2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(rlhf: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of all stages, and what it printed."""
    output = tmp_path_factory.mktemp("heads") / "run"
    done = rlhf("--output", output, "--set", f"model.path={model}")
    return output, done.stdout + done.stderr


def test_all_stages_run_and_label_the_reward_model(finished: tuple[Path, str]) -> None:
    output, log = finished
    folder = output / "reward" / "model"
    assert json.loads((output / "ppo" / "stage.json").read_text())["steps"] == 3
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Cohere2ScalarHead"]
    instructions = "transformers has no sequence classifier of"
    assert instructions in (folder / "README.md").read_text(encoding="utf-8")
    assert instructions not in (output / "ppo" / "model" / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in log.splitlines() if "plain transformers does not load it" in line)
    assert line.startswith(f"note: {folder}: transformers has no class for cohere2 with a scalar head")


def test_the_policy_loads_with_plain_transformers(finished: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(finished[0] / "ppo" / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize("lora", [pytest.param("lora.rank=0", marks=pytest.mark.slow), "lora.rank=4"])
def test_a_later_ppo_takes_the_reward_model_by_its_folder(
    rlhf: Any, finished: tuple[Path, str], tmp_path: Path, lora: str
) -> None:
    output, short = tmp_path / "run", ("ppo.steps=1", "data.max_completion_length=4")
    rlhf("ppo", "--output", output, *sets(*models_of(finished[0]), *short, "engine.zero_stage=3", lora))
    summary = json.loads((output / "ppo" / "stage.json").read_text())
    assert summary["steps"] == 1 and summary["after"]["response_length"] > 0


def test_zero_and_ranks_change_no_weight_of_the_reward_model(
    rlhf: Any, finished: tuple[Path, str], tmp_path: Path
) -> None:
    keys = (f"reward.model={finished[0] / 'sft' / 'model'}", "engine.zero_stage=3")
    rlhf("reward", "--output", tmp_path / "run", "--ranks", 2, *sets(*keys))
    assert_same_weights(tmp_path / "run" / "reward" / "model", finished[0] / "reward" / "model", atol=2e-5)


@pytest.mark.slow
def test_adapters_and_the_head_are_trained_and_merged(rlhf: Any, finished: tuple[Path, str], tmp_path: Path) -> None:
    run = finished[0]
    rlhf("reward", "--output", tmp_path / "run", *sets(f"reward.model={run / 'sft' / 'model'}", "lora.rank=4"))
    after, before = weights(tmp_path / "run" / "reward" / "model"), weights(run / "sft" / "model")
    assert after.keys() - before.keys() == {"score.weight"}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[0].rpartition("_")[2] for name in changed} == {"proj"}


@pytest.mark.slow
def test_killed_reward_stage_resumes_to_the_same_weights(rlhf: Any, finished: tuple[Path, str], tmp_path: Path) -> None:
    model = f"reward.model={finished[0] / 'sft' / 'model'}"
    keys = sets(model, "reward.checkpoint_every=1", "reward.max_steps=12")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rlhf("reward", "--output", whole, *keys)
    kill_at(killed / "reward" / "checkpoints" / "step-00000002", rlhf, "reward", "--output", killed, *keys)
    assert "resumed after step" in rlhf("reward", "--output", killed, "--resume", *keys).stdout
    assert_same_weights(killed / "reward" / "model", whole / "reward" / "model")


def test_a_language_model_of_the_family_is_no_reward_model(
    rlhf: Any, finished: tuple[Path, str], model: Path, tmp_path: Path
) -> None:
    keys = (f"ppo.reward_model={model}", f"ppo.actor={model}")
    done = rlhf("ppo", "--output", tmp_path / "run", *sets(*keys), check=False)
    assert done.returncode == 2 and "its weights lack score.weight" in done.stderr


def test_chat_refuses_the_reward_model(finished: tuple[Path, str], rlhf: Any) -> None:
    done = rlhf("chat", finished[0] / "reward" / "model", recipe=None, check=False)
    assert done.returncode == 2 and "is a reward model, which cannot generate text" in done.stderr
