"""The critic that PPO leaves: a later PPO can begin with it, and nobody has to keep one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import assert_same_weights, weights


@pytest.fixture
def ppo(rlhf: Any, finished_run: Path, tmp_path: Path) -> Any:
    """Run one step of PPO that moves almost nothing; gives what it leaves."""

    def run(*settings: str) -> Path:
        starts = [f"ppo.actor={finished_run / 'sft/model'}", f"ppo.reward_model={finished_run / 'reward/model'}"]
        slow = ["ppo.steps=1", "ppo.eval_rows=2", "ppo.critic_optimizer.learning_rate=1.0e-12"]
        rlhf(
            "ppo",
            "--output",
            tmp_path / "run",
            *(part for key in starts + slow + [*settings] for part in ("--set", key)),
        )
        return tmp_path / "run" / "ppo"

    return run


def test_ppo_can_begin_with_the_critic_that_another_has_left(ppo: Any, finished_run: Path) -> None:
    critic, reward = finished_run / "ppo/critic", finished_run / "reward/model"
    with pytest.raises(AssertionError):  # it has learned
        assert_same_weights(critic, reward, atol=1e-4)
    assert weights(critic).keys() == weights(reward).keys()
    assert_same_weights(ppo(f"ppo.critic={critic}") / "critic", critic, atol=1e-6)


def test_no_critic_is_left_where_none_is_wanted(ppo: Any) -> None:
    left = ppo("ppo.save_critic=false")
    assert not (left / "critic").exists() and (left / "model/config.json").is_file()
