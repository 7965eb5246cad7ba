"""PPO and the reward stage start from a reward model that DeepSpeed-Chat saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import build_tokenizer, sets
from tests.models.test_deepspeed_chat import RewardModel, saved


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, RewardModel]:
    """The folders of an OPT and of DeepSpeed-Chat's reward model of one, and the latter."""
    from transformers import OPTConfig, OPTForCausalLM

    folder = tmp_path_factory.mktemp("chat")
    reward = saved(folder / "reward", "opt")
    config = OPTConfig(**json.loads((folder / "reward" / "config.json").read_text()))
    torch.manual_seed(1)
    OPTForCausalLM(config).save_pretrained(folder / "actor")
    build_tokenizer().save_pretrained(folder / "actor")
    return folder / "actor", folder / "reward", reward


@pytest.mark.slow
def test_ppo_scores_are_the_same_at_every_zero_stage_and_lora(
    rlhf: Any, models: tuple[Path, Path, RewardModel], tmp_path: Path
) -> None:
    """Sharded or on the critic's base, the model scores replies at the same token."""
    actor, reward, _ = models
    before = []
    sharded = ["engine.zero_stage=3", "engine.zero_persistence_threshold=0"]
    for number, keys in enumerate(([], sharded, ["lora.rank=2"])):
        named = [f"ppo.actor={actor}", f"ppo.reward_model={reward}", *keys]
        output = tmp_path / str(number)
        done = rlhf("ppo", "--output", output, *sets(*named))
        assert done.stdout.count("is a reward model of DeepSpeed-Chat") == 1
        summary = json.loads((output / "ppo" / "stage.json").read_text())
        assert summary["steps"] == 3 and summary["before"]["reward_std"] > 0
        before.append(summary["before"]["reward"])
    assert before[1:] == pytest.approx(before[:1] * 2, rel=1e-3)


def test_reward_stage_saves_a_model_of_transformers(
    rlhf: Any, models: tuple[Path, Path, RewardModel], tmp_path: Path
) -> None:
    named = [f"reward.model={models[1]}", "reward.max_steps=1", "reward.optimizer.learning_rate=1e-9"]
    rlhf("reward", "--output", tmp_path / "run", *sets(*named))
    saved = load_file(tmp_path / "run" / "reward" / "model" / "model.safetensors")
    torch.testing.assert_close(saved["score.weight"].float(), models[2].v_head.weight, atol=1e-2, rtol=1e-2)
    assert {name.split(".")[0] for name in saved} == {"model", "score"}
