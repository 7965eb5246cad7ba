"""How models are placed, and which placements are refused before anything is loaded."""

from __future__ import annotations

import pytest

from rlhf.config.schema import STAGES, build_config
from rlhf.errors import ConfigError
from rlhf.roles.roles import check_placements, model_placements


def configure(**sections):
    return build_config(sections)


def get_error(stages=STAGES, **sections):
    with pytest.raises(ConfigError) as caught:
        check_placements(build_config(sections), stages)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "key", "remedies"),
    [
        ({"engine": {"offload": "optimizer"}}, "engine.offload", ["engine.zero_stage=1", "engine.offload=none"]),
        (
            {"engine": {"zero_stage": 1}, "roles": {"critic": {"zero_stage": 0, "offload": "all"}}},
            "roles.critic.offload",
            ["roles.critic.zero_stage=1", "roles.critic.offload=none"],
        ),
        (
            {"engine": {"zero_stage": 2}, "roles": {"actor": {"offload": "parameters"}}},
            "roles.actor.offload",
            ["engine.zero_stage=3", "roles.actor.offload=optimizer"],
        ),
        (
            {"engine": {"offload": "optimizer", "zero_stage": 1, "nvme": "/tmp"}},
            "engine.nvme",
            ["engine.zero_stage=3", "remove engine.nvme"],
        ),
        ({"engine": {"zero_stage": 3, "nvme": "/tmp"}}, "engine.nvme", ["engine.offload=all", "remove engine.nvme"]),
        (
            {"engine": {"offload": "optimizer", "zero_stage": 3, "nvme": "/tmp"}, "ppo": {"ema": 0.9}},
            "ppo.ema",
            ["roles.actor.offload=none"],
        ),
        ({"roles": {"reference": {"zero_stage": 1}}}, "roles.reference.zero_stage", ["set 0, or 3"]),
        (
            {"roles": {"reference": {"gradient_checkpointing": True}}},
            "roles.reference.gradient_checkpointing",
            ["set false"],
        ),
        ({"roles": {"reference": {"lora_rank": 4}}}, "roles.reference.lora_rank", ["set 0"]),
        (
            {"roles": {"reference": {"lora_learning_rate": 1e-4}}},
            "roles.reference.lora_learning_rate",
            ["remove this key"],
        ),
        ({"roles": {"reference": {"offload": "optimizer"}}}, "roles.reference.offload", ["set parameters"]),
        (
            {"lora": {"rank": 4}, "roles": {"reference": {"offload": "parameters"}}},
            "roles.reference.offload",
            ["roles.actor.lora_rank=0"],
        ),
        ({"roles": {"actor": {"frozen": "int8"}}}, "roles.actor.frozen", ["set roles.actor.lora_rank"]),
        (
            {"engine": {"frozen": "int4", "zero_stage": 3}, "lora": {"rank": 4}},
            "engine.frozen",
            ["the sft model", "engine.zero_stage=2", "engine.frozen=auto"],
        ),
        (
            {"engine": {"frozen": "int8", "zero_stage": 3, "offload": "optimizer"}},
            "engine.frozen",
            ["the reference model", "engine.zero_stage=2", "engine.frozen=auto"],
        ),
        (
            {"roles": {"reward": {"frozen": "int8", "zero_stage": 3}}},
            "roles.reward.frozen",
            ["roles.reward.zero_stage=0", "roles.reward.frozen=auto"],
        ),
    ],
)
def test_check_placements_invalid_names_key_and_remedies(sections, key, remedies):
    message = get_error(**sections)
    assert message.startswith(f"{key}: ")
    assert [remedy for remedy in remedies if remedy not in message] == []


def test_dpo_reference_only_if_live_and_not_the_policy():
    def roles(**sections):
        return [*model_placements(build_config(sections), "dpo")]

    assert roles() == ["dpo"]
    beside = {"reference": "beside"}
    assert roles(dpo=beside) == ["dpo", "reference"]
    assert roles(dpo=beside, lora={"rank": 4}) == ["dpo"]
    assert roles(dpo=beside, lora={"rank": 4, "also_train": ["norms"]}) == ["dpo", "reference"]
    offloaded = {"reference": {"offload": "parameters"}}
    check_placements(configure(roles=offloaded), ["dpo"])  # meant for PPO
    check_placements(configure(roles=offloaded, dpo=beside), ["dpo"])
    message = get_error(["dpo"], roles=offloaded, dpo=beside, lora={"rank": 4})
    assert message.startswith("roles.reference.offload: ") and "roles.dpo.lora_rank=0" in message
    placements = model_placements(configure(dpo=beside | {"dropout": 0.3}, roles={"dpo": {"zero_stage": 2}}), "dpo")
    assert (placements["dpo"].zero_stage, placements["dpo"].dropout) == (2, 0.3)
    assert (placements["reference"].zero_stage, placements["reference"].dropout) == (0, 0.0)


@pytest.mark.parametrize(
    ("stages", "sections"),
    [
        (STAGES, {"engine": {"offload": "parameters"}}),  # PPO's frozen models
        (STAGES, {"engine": {"offload": "all", "zero_stage": 1}}),
        (STAGES, {"engine": {"offload": "all", "zero_stage": 3}}),
        (["sft"], {"engine": {"offload": "optimizer", "zero_stage": 1}}),
        (["reward"], {"roles": {"reward": {"offload": "parameters"}}}),  # meant for PPO
        (
            ["ppo"],
            {"engine": {"zero_stage": 1}, "roles": {"reward": {"offload": "optimizer"}}},
        ),  # meant for training it
        (["sft"], {"roles": {"critic": {"offload": "all"}, "reference": {"zero_stage": 1}}}),  # not run
        (["ppo"], {"lora": {"rank": 4}, "roles": {"actor": {"lora_rank": 0}, "reference": {"offload": "parameters"}}}),
        (["ppo"], {"roles": {"reference": {"gradient_checkpointing": False, "lora_rank": 0, "zero_stage": 3}}}),
        (["ppo"], {"engine": {"offload": "parameters", "nvme": "/tmp"}, "roles": {"reward": {"zero_stage": 3}}}),
    ],
)
def test_check_placements_setting_that_some_model_uses_passes(stages, sections):
    check_placements(build_config(sections), stages)


def test_check_placements_offload_without_use_raises():
    message = get_error(["sft"], engine={"offload": "parameters", "zero_stage": 1})
    assert (
        message.startswith("engine.offload: parameters: ")
        and "set engine.zero_stage=3, or engine.offload=op" in message
    )
    assert get_error(["sft"], engine={"offload": "parameters"}).endswith("or engine.offload=none")


@pytest.mark.parametrize(
    ("zero_stage", "offload", "optimizers", "parameters"),
    [
        (1, "optimizer", {"actor", "critic"}, set()),
        (1, "all", {"actor", "critic"}, {"reference", "reward"}),
        (3, "parameters", set(), {"actor", "critic", "reference", "reward"}),
        (3, "all", {"actor", "critic"}, {"actor", "critic", "reference", "reward"}),
    ],
)
def test_model_placements_offload_by_role(zero_stage, offload, optimizers, parameters):
    placements = model_placements(configure(engine={"zero_stage": zero_stage, "offload": offload}), "ppo")
    assert {name for name, placement in placements.items() if placement.offloads_optimizer} == optimizers
    assert {name for name, placement in placements.items() if placement.offloads_parameters} == parameters


@pytest.mark.parametrize(
    ("sections", "stage", "quantized"),
    [
        ({"engine": {"frozen": "int8"}}, "ppo", {"reference": "int8", "reward": "int8"}),
        ({"engine": {"frozen": "int8"}}, "sft", {}),
        ({"engine": {"frozen": "int8"}, "lora": {"rank": 4}}, "sft", {"sft": "int8"}),
        (
            {"engine": {"frozen": "int4"}, "lora": {"rank": 4}, "roles": {"critic": {"frozen": "auto"}}},
            "ppo",
            {"actor": "int4", "reward": "int4"},
        ),
        ({"roles": {"reward": {"frozen": "int8"}}}, "ppo", {"reward": "int8"}),
        ({"roles": {"reward": {"frozen": "int8"}}}, "reward", {}),
        ({"lora": {"rank": 4}}, "ppo", {}),
    ],
)
def test_model_placements_quantize_frozen_weights_only(sections, stage, quantized):
    config = build_config(sections)
    check_placements(config, STAGES)
    placements = model_placements(config, stage)
    assert {
        name: placement.quantization for name, placement in placements.items() if placement.quantization
    } == quantized


def test_model_placements_adapter_rate_by_role():
    rates = {"actor": {"lora_learning_rate": 4e-4}, "reward": {"lora_learning_rate": 5e-3}}
    config = configure(lora={"rank": 4, "learning_rate": 1e-4}, roles=rates)
    assert {
        role: placement.lora.learning_rate
        for stage in STAGES
        for role, placement in model_placements(config, stage).items()
    } == {
        "sft": 1e-4,
        "reward": 5e-3,
        "actor": 4e-4,
        "critic": 1e-4,
    }
