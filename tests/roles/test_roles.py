"""How models are held: what cannot be is refused before anything is loaded, with the nearest that can be."""

from __future__ import annotations

import pytest

from rlhf.config.schema import STAGES, build_config
from rlhf.errors import ConfigError
from rlhf.roles.roles import check_placements, model_placements


def configuration(**sections):
    return build_config(sections)


def refusal(stages=STAGES, ranks=1, **sections):
    with pytest.raises(ConfigError) as found:
        check_placements(configuration(**sections), stages, ranks)
    return str(found.value)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"engine": {"offload": "optimizer"}},
            "engine.offload: optimizer: DeepSpeed keeps an optimizer on the host from ZeRO 1 on, and the sft model is "
            "held at ZeRO 0; set engine.zero_stage=1, on one rank too, or engine.offload=none",
        ),
        (
            {"engine": {"zero_stage": 1}, "roles": {"critic": {"zero_stage": 0, "offload": "all"}}},
            "roles.critic.offload: all: DeepSpeed keeps an optimizer on the host from ZeRO 1 on, and the critic model "
            "is held at ZeRO 0; set roles.critic.zero_stage=1, on one rank too, or roles.critic.offload=none",
        ),
        (
            {"engine": {"zero_stage": 2}, "roles": {"actor": {"offload": "parameters"}}},
            "roles.actor.offload: parameters: weights that are trained wait on the host at ZeRO-3 only, and the actor "
            "model is held at ZeRO 2; set engine.zero_stage=3, or roles.actor.offload=optimizer",
        ),
        (
            {"engine": {"offload": "optimizer", "zero_stage": 1, "nvme": "/tmp"}},
            "engine.nvme: DeepSpeed uses a disk at ZeRO-3 only, and no model that is offloaded is held so; "
            "set engine.zero_stage=3, or leave engine.nvme out for the host's memory",
        ),
        (
            {"engine": {"zero_stage": 3, "nvme": "/tmp"}},
            "engine.nvme: nothing is offloaded; set engine.offload=all, or leave engine.nvme out",
        ),
        (
            {"engine": {"offload": "optimizer", "zero_stage": 3, "nvme": "/tmp"}, "ppo": {"ema": 0.9}},
            "ppo.ema: an average follows weights in memory, and engine.nvme has the actor's on a disk; leave one of "
            "them out, or set roles.actor.offload=none",
        ),
        (
            {"roles": {"reference": {"zero_stage": 1}}},
            "roles.reference.zero_stage: 1 shards an optimizer, and the reference is frozen; set 0, or 3 to shard its "
            "weights",
        ),
        (
            {"roles": {"reference": {"gradient_checkpointing": True}}},
            "roles.reference.gradient_checkpointing: is for a model that is trained, and the reference is frozen; "
            "leave it out, or set false",
        ),
        (
            {"roles": {"reference": {"lora_rank": 4}}},
            "roles.reference.lora_rank: is for a model that is trained, and the reference is frozen; leave it out, or "
            "set 0",
        ),
        (
            {"roles": {"reference": {"lora_learning_rate": 1e-4}}},
            "roles.reference.lora_learning_rate: is for a model that is trained, and the reference is frozen; leave "
            "it out",
        ),
        (
            {"roles": {"reference": {"offload": "optimizer"}}},
            "roles.reference.offload: the reference is frozen and has no optimizer; set parameters, or leave it out",
        ),
        (
            {"lora": {"rank": 4}, "roles": {"reference": {"offload": "parameters"}}},
            "roles.reference.offload: with LoRA the reference is the actor without its adapters, held as the actor is; "
            "leave it out, or set roles.actor.lora_rank=0",
        ),
    ],
)
def test_what_cannot_be_held_so_is_refused_with_the_nearest_that_can(sections, said):
    assert refusal(**sections) == said


def test_dpo_has_a_reference_where_it_is_held_beside_the_policy_and_is_not_the_policy_itself():
    def roles(**sections):
        return [*model_placements(configuration(**sections), "dpo")]

    assert roles() == ["dpo"]
    beside = {"reference": "beside"}
    assert roles(dpo=beside) == ["dpo", "reference"]
    assert roles(dpo=beside, lora={"rank": 4}) == ["dpo"]
    assert roles(dpo=beside, lora={"rank": 4, "also_train": ["norms"]}) == ["dpo", "reference"]
    offloaded = {"reference": {"offload": "parameters"}}
    check_placements(configuration(roles=offloaded), ["dpo"], 1)  # meant for PPO
    check_placements(configuration(roles=offloaded, dpo=beside), ["dpo"], 1)
    assert refusal(["dpo"], roles=offloaded, dpo=beside, lora={"rank": 4}) == (
        "roles.reference.offload: with LoRA the reference is the policy without its adapters, held as the policy is; "
        "leave it out, or set roles.dpo.lora_rank=0"
    )
    held = model_placements(configuration(dpo=beside | {"dropout": 0.3}, roles={"dpo": {"zero_stage": 2}}), "dpo")
    assert (held["dpo"].zero_stage, held["dpo"].dropout) == (2, 0.3)
    assert (held["reference"].zero_stage, held["reference"].dropout) == (0, 0.0)


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
def test_what_some_model_can_use_is_accepted(stages, sections):
    check_placements(configuration(**sections), stages, 1)


def test_weights_that_nothing_of_the_stage_could_offload_are_refused():
    said = refusal(["sft"], engine={"offload": "parameters", "zero_stage": 1})
    assert said.startswith("engine.offload: parameters: ") and "set engine.zero_stage=3, or engine.offload=op" in said
    assert refusal(["sft"], engine={"offload": "parameters"}).endswith("or engine.offload=none")


@pytest.mark.parametrize(
    ("zero_stage", "offload", "optimizers", "parameters"),
    [
        (1, "optimizer", {"actor", "critic"}, set()),
        (1, "all", {"actor", "critic"}, {"reference", "reward"}),
        (3, "parameters", set(), {"actor", "critic", "reference", "reward"}),
        (3, "all", {"actor", "critic"}, {"actor", "critic", "reference", "reward"}),
    ],
)
def test_what_waits_on_the_host(zero_stage, offload, optimizers, parameters):
    held = model_placements(configuration(engine={"zero_stage": zero_stage, "offload": offload}), "ppo")
    assert {name for name, placement in held.items() if placement.offloads_optimizer} == optimizers
    assert {name for name, placement in held.items() if placement.offloads_parameters} == parameters


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"roles": {"actor": {"frozen": "int8"}}},
            "roles.actor.frozen: int8: the actor model is trained whole, and has no frozen weights; set "
            "roles.actor.lora_rank, or leave it out",
        ),
        (
            {"engine": {"frozen": "int4", "zero_stage": 3}, "lora": {"rank": 4}},
            "engine.frozen: int4: ZeRO-3 shards the weights of the sft model, and quantized ones lie whole on every "
            "rank; set engine.zero_stage=2, or engine.frozen=auto",
        ),
        (
            {"engine": {"frozen": "int8", "zero_stage": 3, "offload": "optimizer"}},
            "engine.frozen: int8: ZeRO-3 shards the weights of the reference model, and quantized ones lie whole on "
            "every rank; set engine.zero_stage=2, or engine.frozen=auto",
        ),
        (
            {"roles": {"reward": {"frozen": "int8", "zero_stage": 3}}},
            "roles.reward.frozen: int8: ZeRO-3 shards the weights of the reward model, and quantized ones lie whole on "
            "every rank; set roles.reward.zero_stage=0, or roles.reward.frozen=auto",
        ),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused_with_the_nearest_that_can(sections, said):
    assert refusal(**sections) == said


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
def test_what_is_quantized_is_what_is_frozen(sections, stage, quantized):
    config = configuration(**sections)
    check_placements(config, STAGES, 1)
    held = model_placements(config, stage)
    assert {name: placement.quantization for name, placement in held.items() if placement.quantization} == quantized


def test_adapters_of_each_model_may_have_a_rate_of_their_own():
    rates = {"actor": {"lora_learning_rate": 4e-4}, "reward": {"lora_learning_rate": 5e-3}}
    config = configuration(lora={"rank": 4, "learning_rate": 1e-4}, roles=rates)
    assert {
        role: held.lora.learning_rate for stage in STAGES for role, held in model_placements(config, stage).items()
    } == {
        "sft": 1e-4,
        "reward": 5e-3,
        "actor": 4e-4,
        "critic": 1e-4,
    }
