"""What PPO starts from depends on what rewards come from, and on its estimator: in plan, check and record alike."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.schema import Config, build_config
from rlhf.errors import ConfigError
from rlhf.memory.duration import count_flops
from rlhf.memory.environment import Environment
from rlhf.memory.stage import build_models, plan_stage
from rlhf.roles.base_sharing import Sharing, predict_sharing
from rlhf.roles.lineage import CRITIC, base_models, resolve_base_model
from rlhf.roles.roles import model_placements
from rlhf.runs.resume import find_differences, find_started_from

FUNCTION = {"reward_weight": 0, "reward_functions": ["rewards:f"]}


def configured(**ppo: Any) -> Config:
    return build_config({"ppo": ppo})


@pytest.mark.parametrize(
    ("ppo", "models", "bases"),
    [
        ({}, ["ppo.actor", "ppo.reward_model"], {"critic": "ppo.reward_model", "reward": "ppo.reward_model"}),
        ({"critic": "c"}, ["ppo.actor", "ppo.reward_model", "ppo.critic"], {"critic": "ppo.critic"}),
        (FUNCTION, ["ppo.actor", "ppo.critic"], {"critic": "ppo.critic", "reward": None}),
        ({"estimator": "rloo"}, ["ppo.actor", "ppo.reward_model"], {"critic": None, "reward": "ppo.reward_model"}),
        (FUNCTION | {"estimator": "rloo"}, ["ppo.actor"], {"critic": None, "reward": None}),
    ],
)
def test_base_models_of_ppo_are_those_it_reads(
    ppo: dict[str, Any], models: list[str], bases: dict[str, str | None]
) -> None:
    config = configured(**ppo)
    assert [ref.key for ref in base_models(config, "ppo")] == models
    placements = {str(name): placement.role.base.key for name, placement in model_placements(config, "ppo").items()}
    assert placements["actor"] == placements["reference"] == "ppo.actor"
    assert {name: placements.get(name) for name in bases} == bases


def test_critic_without_reward_model_starts_as_the_policy() -> None:
    assert CRITIC in base_models(configured(**FUNCTION), "ppo")
    assert CRITIC.named_in(configured(**FUNCTION, actor="a")) == "a"
    assert CRITIC.named_in(configured(**FUNCTION, actor="a", critic="c")) == "c"
    assert resolve_base_model(configured(**FUNCTION), CRITIC, ("sft", "ppo")).through == ("sft",)


@pytest.mark.parametrize(
    ("pending", "path", "through"),
    [
        (("sft", "reward", "ppo"), "m", ("sft", "reward")),
        (("reward", "ppo"), "sft/model", ("reward",)),
        (("ppo",), "reward/model", ()),
    ],
)
def test_resolve_base_model_follows_pending_stages(
    pending: tuple[Any, ...], path: str, through: tuple[str, ...]
) -> None:
    config = build_config({"model": {"path": "m"}})
    ref = base_models(config, "ppo")[1]
    base = resolve_base_model(config, ref, pending, lambda stage, key: f"{stage}/model")
    assert (base.ref.key, base.path, base.through) == ("ppo.reward_model", path, through)


def test_find_started_from_reads_recorded_config() -> None:
    """One of an earlier version has none of these keys."""
    assert find_started_from({"config": {"ppo": {}}}, "ppo") == ["sft", "reward"]
    assert set(find_started_from({"config": configured(**FUNCTION).model_dump(mode="json")}, "ppo")) == {"sft"}
    assert find_started_from({}, "reward") == ["sft"]


def test_find_differences_missing_keys_of_earlier_version_none() -> None:
    config = configured()
    recorded = config.model_dump(mode="json")
    for key in ("reward_weight", "reward_functions", "reward_timeout", "critic"):
        del recorded["ppo"][key]
    assert find_differences({"config": recorded}, config, ["ppo"]) == []
    assert find_differences({"config": recorded}, configured(reward_timeout=1), ["ppo"]) == []
    assert "ppo.reward_weight (1.0 there, 2.0 now)" in find_differences(
        {"config": recorded}, configured(reward_weight=2), ["ppo"]
    )


@pytest.mark.parametrize(
    ("ppo", "key", "words"),
    [
        ({"reward_weight": 0}, "reward_weight", "there is no reward"),
        ({"reward_weight": 0, "reward_functions": [{"function": "a:b", "weight": 0}]}, "reward_weight", "no reward"),
        ({"reward_weight": -1}, "reward_weight", "expected a number of at least 0"),
        (FUNCTION | {"reward_model": "r"}, "reward_model", "not used if ppo.reward_weight is 0"),
        ({"reward_functions": ["a:f", "b:f"]}, "reward_functions", "2 functions are called f; give each a different"),
        ({"reward_functions": ["f"]}, "reward_functions.0.function", "expected module:function"),
        ({"reward_functions": [{"function": "a:f", "name": "x y"}]}, "reward_functions.0.name", "letters, digits"),
        ({"critic": "c", "estimator": "rloo"}, "critic", "rloo has no critic"),
    ],
)
def test_contradicting_ppo_settings_are_refused(ppo: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(**ppo)
    assert f"ppo.{key}: " in str(caught.value) and words in str(caught.value)


def shared(**sections: Any) -> Sharing:
    config = build_config({"model": {"path": "opt-125m"}, "lora": {"rank": 4}, **sections})
    return predict_sharing(config, "ppo", model_placements(config, "ppo"))


def test_predict_sharing_by_base_models() -> None:
    """The reward model may use the actor's base; a critic with other weights uses none."""
    other = shared(ppo={"critic": "opt-350m"})
    assert dict(other.donors) == {"reward": "actor"}
    assert other.obstacle and "does not start from the" in other.obstacle.reason
    alone = shared(ppo=FUNCTION)
    assert dict(alone.donors) == {} and alone.obstacle and alone.obstacle.remedy == "set ppo.reward_weight"
    assert dict(shared(ppo={"estimator": "rloo"}).donors) == {"reward": "actor"}
    nothing = shared(ppo=FUNCTION | {"estimator": "rloo"})
    assert dict(nothing.donors) == {} and nothing.obstacle is None
    assert dict(shared().donors) == {"critic": "actor", "reward": "critic"}


def test_plan_stage_counts_only_needed_models() -> None:
    sizes = {}
    for name, ppo in {"all": {}, "no model": FUNCTION, "rloo": FUNCTION | {"estimator": "rloo"}}.items():
        config = configured(**ppo)
        models = build_models(config, "ppo", Environment())
        assert models.keys() == model_placements(config, "ppo").keys()
        plan = plan_stage(config, "ppo", Environment())
        assert ("critic" in plan.parameters) == (name != "rloo")
        sizes[name] = plan.fullest.device, sum(count_flops(config, "ppo", models))
    assert sizes["all"] > sizes["no model"] > sizes["rloo"]
    assert sizes["all"][1] > sizes["no model"][1] > sizes["rloo"][1]
