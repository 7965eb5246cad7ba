"""Alarms during training: rollouts from stale weights are found in the second step, and `alarms.stop` ends the run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rlhf.data.stage_dataset import StageData
from rlhf.errors import DivergedError
from rlhf.reporting.recorder import Recorder
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import loop
from rlhf.trainers.ppo import policy_decoder
from rlhf.trainers.ppo.trainer import PPOTrainer
from tests.helpers import llama
from tests.in_process import ppo_models, scalar_llama, stage_context
from tests.optimum import language

OPTIMIZER = {"learning_rate": 0.01, "schedule": "constant", "warmup": 0}
STEPS = 4


@pytest.fixture
def train(accelerator: Any, tmp_path: Path) -> Any:
    """Train PPO for four steps, and return the records of the folder, or the error."""

    def run(*, stop: bool) -> list[dict[str, Any]]:
        directory = RunDirectory(tmp_path).stage("ppo")
        values = {
            "alarms": {"stop": stop},
            "data": {"max_prompt_length": 3, "max_completion_length": 3},
            "ppo": {"batch_size": 4, "steps": STEPS, "optimizer": OPTIMIZER, "critic_optimizer": OPTIMIZER},
        }
        with Recorder(directory) as recorder:
            context = stage_context(accelerator, tmp_path, "ppo", values, recorder=recorder)
            actor, reference = (llama(4, eos_token_id=3, num_hidden_layers=1) for _ in range(2))
            critic = scalar_llama(4, eos_token_id=3, num_hidden_layers=1)
            models = ppo_models(actor, reference, critic, language.TableOfRewards(seed=0))
            prompts = [language.prompt(1), language.prompt(2, 3), language.prompt(3, 1, 2), language.prompt(1, 1)]
            loop.fit(PPOTrainer(context, models, language.tokenizer(), StageData(prompts, prompts, [])), context)
        return [json.loads(line) for line in directory.metrics.read_text(encoding="utf-8").splitlines()]

    return run


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts always read the weights of the first one, as if no update were delivered."""
    real, first = policy_decoder.generation_mode, []

    @contextmanager
    def generation_mode(engine: Any, *arguments: Any, **options: Any) -> Iterator[nn.Module]:
        with real(engine, *arguments, **options) as model:
            if not first:
                first.append(copy.deepcopy(model))
            yield first[0]

    monkeypatch.setattr(policy_decoder, "generation_mode", generation_mode)


def alarms(records: list[dict[str, Any]]) -> list[tuple[int, str]]:
    invariants = ("first KL", "drawing")
    return [(record["step"], record["rule"]) for record in records if record.get("rule") in invariants]


def test_correct_run_breaks_no_invariant(train: Any) -> None:
    records = train(stop=True)
    assert alarms(records) == [] and max(record["step"] for record in records) == STEPS
    gaps = [record["draw_gap"] for record in records if "draw_gap" in record]
    assert len(gaps) == STEPS and max(gaps) < 1e-5


def test_stale_rollouts_are_found_in_the_second_step(train: Any, stale: None) -> None:
    records = train(stop=False)
    assert alarms(records) == [(2, "drawing")], "said once"
    assert max(record["step"] for record in records) == STEPS, "and training continues"


def test_alarm_ends_the_run_if_the_settings_say_so(train: Any, stale: None, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"ended by alarms\.stop: drawing, step 2: the rollout was not") as ended:
        train(stop=True)
    assert "no checkpoint yet" in str(ended.value)
    lines = (tmp_path / "ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert alarms(records) == [(2, "drawing")]
    assert [record["step"] for record in records if "draw_gap" in record] == [1, 2], "the records say why"


def test_policy_unlike_its_reference_is_found_in_the_first_step(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is another model than the policy's start."""
    build = PPOTrainer.__init__

    def changed(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        for parameter in self.reference.parameters():
            parameter.data.mul_(1.05)

    monkeypatch.setattr(PPOTrainer, "__init__", changed)
    with pytest.raises(DivergedError, match="differs from its reference before the first update"):
        train(stop=True)
