"""How models are placed, and which placements are refused before anything is loaded."""

from __future__ import annotations

import pytest

from rlhf.config.schema import STAGES, Config, load_config
from rlhf.errors import ConfigError
from rlhf.roles.roles import check_placements, model_placements


def configure(settings: str) -> Config:
    """Return the configuration of settings as on the command line, divided by spaces."""
    return load_config(None, settings.split())


@pytest.mark.parametrize(
    ("stages", "settings", "key", "remedies"),
    [
        (STAGES, "engine.offload=optimizer", "engine.offload", "engine.zero_stage=1 engine.offload=none"),
        (["sft"], "engine.offload=parameters", "engine.offload", "engine.zero_stage=3 engine.offload=none"),
        (
            ["sft"],
            "engine.offload=parameters engine.zero_stage=1",
            "engine.offload",
            "engine.zero_stage=3 engine.offload=optimizer",
        ),
        (
            STAGES,
            "engine.zero_stage=1 roles.critic.zero_stage=0 roles.critic.offload=all",
            "roles.critic.offload",
            "roles.critic.zero_stage=1 roles.critic.offload=none",
        ),
        (
            STAGES,
            "engine.zero_stage=2 roles.actor.offload=parameters",
            "roles.actor.offload",
            "engine.zero_stage=3 roles.actor.offload=optimizer",
        ),
        (
            STAGES,
            "engine.offload=optimizer engine.zero_stage=1 engine.nvme=/tmp",
            "engine.nvme",
            "engine.zero_stage=3 engine.nvme",
        ),
        (STAGES, "engine.zero_stage=3 engine.nvme=/tmp", "engine.nvme", "engine.offload=all engine.nvme"),
        (
            STAGES,
            "engine.offload=optimizer engine.zero_stage=3 engine.nvme=/tmp ppo.ema=0.9",
            "ppo.ema",
            "roles.actor.offload=none",
        ),
        (STAGES, "roles.reference.zero_stage=1", "roles.reference.zero_stage", "0 3"),
        (STAGES, "roles.reference.gradient_checkpointing=true", "roles.reference.gradient_checkpointing", "false"),
        (STAGES, "roles.reference.lora_rank=4", "roles.reference.lora_rank", "0"),
        (STAGES, "roles.reference.lora_learning_rate=1e-4", "roles.reference.lora_learning_rate", "remove"),
        (STAGES, "roles.reference.offload=optimizer", "roles.reference.offload", "parameters"),
        (
            STAGES,
            "lora.rank=4 roles.reference.offload=parameters",
            "roles.reference.offload",
            "roles.actor.lora_rank=0",
        ),
        (["ppo"], "ppo.judge=j roles.judge.zero_stage=2", "roles.judge.zero_stage", "judge 0 3"),
        (["ppo"], "ppo.judge=j roles.judge.lora_rank=4", "roles.judge.lora_rank", "judge 0"),
        (STAGES, "roles.judge.offload=parameters", "roles.judge.offload", "ppo.judge remove"),
        (
            ["dpo"],
            "lora.rank=4 roles.reference.offload=parameters dpo.reference=beside",
            "roles.reference.offload",
            "roles.dpo.lora_rank=0",
        ),
        (STAGES, "roles.actor.frozen=int8", "roles.actor.frozen", "roles.actor.lora_rank"),
        (
            STAGES,
            "engine.frozen=int4 engine.zero_stage=3 lora.rank=4 engine.offload=all engine.nvme=disk",
            "engine.nvme",
            "sft int4 engine.frozen=auto",
        ),
        *(
            (
                ["ppo"],
                f'engine.frozen=int8 engine.zero_stage=3 engine.deepspeed={{"zero_optimization":{{"{key}":true}}}}',
                f"engine.deepspeed.zero_optimization.{key}",
                "reference int8 engine.frozen=auto",
            )
            for key in (
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "stage3_use_all_reduce_for_fetch_params",
            )
        ),
    ],
)
def test_invalid_placement_is_refused_with_key_and_remedies(stages, settings, key, remedies):
    with pytest.raises(ConfigError) as caught:
        check_placements(configure(settings), stages)
    message = str(caught.value)
    assert message.startswith(f"{key}: ") and "\n" not in message
    assert [remedy for remedy in remedies.split() if remedy not in message.removeprefix(key)] == []


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        (STAGES, "engine.offload=parameters"),  # PPO's frozen models
        (STAGES, "engine.offload=all engine.zero_stage=1"),
        (STAGES, "engine.offload=all engine.zero_stage=3"),
        (["sft"], "engine.offload=optimizer engine.zero_stage=1"),
        (["reward"], "roles.reward.offload=parameters"),  # meant for PPO
        (["dpo"], "roles.reference.offload=parameters"),  # meant for PPO
        (["dpo"], "roles.reference.offload=parameters dpo.reference=beside"),
        (["ppo"], "engine.zero_stage=1 roles.reward.offload=optimizer"),  # meant for training it
        (["sft"], "roles.critic.offload=all roles.reference.zero_stage=1"),  # not run
        (["ppo"], "lora.rank=4 roles.actor.lora_rank=0 roles.reference.offload=parameters"),
        (
            ["ppo"],
            "roles.reference.gradient_checkpointing=false roles.reference.lora_rank=0 roles.reference.zero_stage=3",
        ),
        (["ppo"], "engine.offload=parameters engine.nvme=/tmp roles.reward.zero_stage=3"),
        (["ppo"], "ppo.judge=j roles.judge.offload=parameters"),
        (["sft"], "roles.judge.offload=parameters"),  # not run
    ],
)
def test_setting_that_some_model_uses_passes(stages, settings):
    check_placements(configure(settings), stages)


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ("", ["dpo"]),
        ("dpo.reference=beside", ["dpo", "reference"]),
        ("dpo.reference=beside lora.rank=4", ["dpo"]),
        ("dpo.reference=beside lora.rank=4 lora.also_train=[norms]", ["dpo", "reference"]),
    ],
)
def test_dpo_has_a_reference_if_live_and_not_the_policy(settings, roles):
    assert [*model_placements(configure(settings), "dpo")] == roles


def test_frozen_reference_has_no_dropout_and_no_shards():
    placements = model_placements(configure("dpo.reference=beside dpo.dropout=0.3 roles.dpo.zero_stage=2"), "dpo")
    assert (placements["dpo"].zero_stage, placements["dpo"].dropout) == (2, 0.3)
    assert (placements["reference"].zero_stage, placements["reference"].dropout) == (0, 0.0)


@pytest.mark.parametrize(
    ("zero_stage", "offload", "optimizers", "parameters"),
    [
        (1, "optimizer", {"actor", "critic"}, set()),
        (1, "all", {"actor", "critic"}, {"reference", "reward"}),
        (3, "parameters", set(), {"actor", "critic", "reference", "reward"}),
        (3, "all", {"actor", "critic"}, {"actor", "critic", "reference", "reward"}),
    ],
)
def test_offload_by_role(zero_stage, offload, optimizers, parameters):
    placements = model_placements(configure(f"engine.zero_stage={zero_stage} engine.offload={offload}"), "ppo")
    assert {name for name, placement in placements.items() if placement.offloads_optimizer} == optimizers
    assert {name for name, placement in placements.items() if placement.offloads_parameters} == parameters


@pytest.mark.parametrize(
    ("settings", "stage", "quantized"),
    [
        ("engine.frozen=int8", "ppo", {"reference": "int8", "reward": "int8"}),
        ("engine.frozen=int8", "sft", {}),
        ("engine.frozen=int8 lora.rank=4", "sft", {"sft": "int8"}),
        ("engine.frozen=int4 lora.rank=4 roles.critic.frozen=auto", "ppo", {"actor": "int4", "reward": "int4"}),
        ("roles.reward.frozen=int8", "ppo", {"reward": "int8"}),
        ("roles.reward.frozen=int8", "reward", {}),
        ("lora.rank=4", "ppo", {}),
    ],
)
def test_only_frozen_weights_are_quantized(settings, stage, quantized):
    config = configure(settings)
    check_placements(config, STAGES)
    kinds = {name: placement.quantization for name, placement in model_placements(config, stage).items()}
    assert {name: kind for name, kind in kinds.items() if kind} == quantized


def test_adapter_learning_rate_by_role():
    rates = "lora.learning_rate=1e-4 roles.actor.lora_learning_rate=4e-4 roles.reward.lora_learning_rate=5e-3"
    config = configure(f"lora.rank=4 {rates}")
    placements = {role: place for stage in STAGES for role, place in model_placements(config, stage).items()}
    expected = {"sft": 1e-4, "reward": 5e-3, "actor": 4e-4, "critic": 1e-4}
    assert {role: place.lora.learning_rate for role, place in placements.items()} == expected


@pytest.mark.parametrize(
    ("settings", "actor", "critic"),
    [
        ("", "ppo.optimizer.learning_rate", "ppo.critic_optimizer.learning_rate"),
        ("lora.rank=4", "ppo.optimizer.learning_rate", "ppo.critic_optimizer.learning_rate"),  # ten times the stage's
        ("lora.learning_rate=1e-4", "ppo.optimizer.learning_rate", "ppo.critic_optimizer.learning_rate"),  # no adapters
        ("lora.rank=4 lora.learning_rate=1e-4", "lora.learning_rate", "lora.learning_rate"),
        (
            "lora.rank=4 lora.learning_rate=1e-4 roles.critic.lora_learning_rate=1e-5",
            "lora.learning_rate",
            "roles.critic.lora_learning_rate",
        ),
        (
            "lora.rank=4 lora.learning_rate=1e-4 roles.critic.lora_rank=0",
            "lora.learning_rate",
            "ppo.critic_optimizer.learning_rate",
        ),
    ],
)
def test_each_model_knows_the_key_of_its_learning_rate(settings, actor, critic):
    placements = model_placements(configure(settings), "ppo")
    assert [placements[name].rate_key for name in ("actor", "critic")] == [actor, critic]
