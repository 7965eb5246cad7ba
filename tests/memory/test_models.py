"""The plan counts frozen weights once for all models that will stand on them, and no more than once for each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import build_config
from rlhf.memory.advice import plan_stages
from rlhf.memory.environment import Environment, MemoryLimits
from rlhf.memory.stage import EMBEDDED, build_models
from rlhf.roles.base_sharing import record_base

LORA = {"rank": 8}


def shared(**settings: Any) -> set[str]:
    config = build_config({"model": {"path": "opt-125m"}, "lora": LORA, **settings})
    return {name for name, model in build_models(config, "ppo", Environment()).items() if model.shared}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"critic", "reward"}),  # and the reference is the actor without its adapters
        ({"lora": LORA | {"also_train": ["norms"]}}, {"critic", "reference", "reward"}),
        ({"lora": LORA | {"share_base": False}}, set()),
        ({"lora": {"rank": 0}}, set()),
        ({"engine": {"zero_stage": 3}}, set()),
        ({"roles": {"reward": {"frozen": "int8"}}}, set()),
        ({"roles": {"critic": {"lora_rank": 0}}}, {"reward"}),  # on the actor's base
        ({"roles": {"actor": {"lora_rank": 0}}}, {"reward"}),  # on the critic's
        ({"roles": {"reward": {"lora_rank": 0}}}, {"reward"}),  # merged into no base: on the critic's
        ({"reward": {"model": "opt-350m"}}, {"reward"}),
        ({"ppo": {"actor": "opt-125m"}}, {"reward"}),  # the reward model is trained on that of the sft stage
    ],
)
def test_models_on_one_base(settings: dict[str, Any], expected: set[str]) -> None:
    assert shared(**settings) == expected


def test_a_reward_model_that_is_named_shares_what_it_was_trained_on(tmp_path: Path) -> None:
    """So says the record that the reward stage left beside it."""
    reward = tmp_path / "reward" / "model"
    reward.mkdir(parents=True)
    (reward / "config.json").write_text(json.dumps(EMBEDDED))
    named: dict[str, Any] = {"ppo": {"actor": "opt-125m", "reward_model": str(reward)}}
    assert shared(**named) == {"reward"}
    (tmp_path / "reward" / "adapter").mkdir()
    record_base(tmp_path / "reward" / "adapter", "opt-125m")
    assert shared(**named) == {"critic", "reward"}


def test_the_bucket_for_gradients_is_planned_as_deepspeed_is_told_its_size() -> None:
    """On a device all of it is allocated, however little is trained."""

    def most(**deepspeed: Any) -> int:
        values = {"model": {"path": "opt-125m"}, "lora": LORA, "engine": {"zero_stage": 2, "deepspeed": deepspeed}}
        (found,) = plan_stages(build_config(values), ["sft"], Environment(2, "bf16"))
        return found.fullest.device

    larger = most(zero_optimization={"reduce_bucket_size": 500_000_000})
    assert larger - most() == pytest.approx(2 * 500_000_000, rel=0.01)


def test_passes_that_are_reused_are_kept_beside_each_other() -> None:
    """Four micro-batches: the actor's update begins with three more of its own, and four of the critic's."""
    values = {"model": {"path": "llama-2-7b"}, "lora": LORA, "ppo": {"batch_size": 8, "micro_batch_size": 2}}
    sizes = {}
    for reuse in (True, False):
        config = build_config({**values, "ppo": {**values["ppo"], "reuse_forward": reuse}})
        (found,) = plan_stages(config, ["ppo"], Environment(1, "bf16"))
        for phase in found.phases:
            for role in ("actor", "critic"):
                kept = [item.size for item in phase.items if (item.role, item.kind) == (role, "activations")]
                sizes[reuse, phase.name, role] = sum(kept)
    actor, critic = "training of the actor", "training of the critic"
    once = sizes[False, actor, "actor"]
    assert once > 0 and sizes[False, actor, "critic"] == 0
    assert (sizes[True, actor, "actor"], sizes[True, actor, "critic"]) == (4 * once, 4 * once)
    assert (sizes[True, critic, "actor"], sizes[True, critic, "critic"]) == (0, 4 * once)


def test_a_plan_reuses_passes_where_there_is_room_for_them() -> None:
    config = build_config({"model": {"path": "llama-2-7b"}, "ppo": {"batch_size": 64, "micro_batch_size": 2}})
    environment = Environment(1, "bf16")
    (roomy,) = plan_stages(config, ["ppo"], environment)
    apart = config.model_copy(update={"ppo": config.ppo.model_copy(update={"reuse_forward": False})})
    (tight,) = plan_stages(apart, ["ppo"], environment)
    assert tight.fullest.device < roomy.fullest.device
    assert plan_stages(config, ["ppo"], environment, limits=MemoryLimits(roomy.fullest.device)) == [roomy]
    assert plan_stages(config, ["ppo"], environment, limits=MemoryLimits(roomy.fullest.device - 1)) == [tight]
