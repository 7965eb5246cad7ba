"""The fork's HL_* variables become the arguments of `rlhf` that mean the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlhf.config.schema import load_config
from rlhf.contrib.deepspeed_chat.tables import load_variables
from rlhf.contrib.deepspeed_chat.variables import to_arguments
from rlhf.errors import ConfigError

# Read off the six scripts of the fork's example_scripts: every variable that one of them expands.
OF_STEP = {
    "sft": "DATA_DIR_ROOT TAG BASE_OUT_PATH NUM_NODES DEVICES_PER_NODE ACTOR_ZERO_STAGE ACTOR_CP_ACT SEED MBS GBS "
    "TENSORBOARD_PATH TENSORBOARD_ENABLED LOG_FILE CHECKPOINT_PATH MASTER_PORT ACTOR_MODEL DATASET_PATH LEARNING_RATE "
    "LORA_LEARNING_RATE WEIGHT_DECAY LORA_DIM DROPOUT EPOCHS HPZ_ENABLED ONLY_OPTIMIZE_LORA MAX_SEQ_LEN",
    "reward": "DATA_DIR_ROOT TAG BASE_OUT_PATH NUM_NODES DEVICES_PER_NODE CRITIC_ZERO_STAGE CRITIC_CP_ACT SEED MBS GBS "
    "TENSORBOARD_PATH TENSORBOARD_ENABLED LOG_FILE CHECKPOINT_PATH MASTER_PORT CRITIC_MODEL DATASET_PATH "
    "LEARNING_RATE LORA_LEARNING_RATE WEIGHT_DECAY EPOCHS LORA_DIM DROPOUT HPZ_ENABLED ONLY_OPTIMIZE_LORA MAX_SEQ_LEN",
    "ppo": "TAG BASE_OUT_PATH ACTOR_MODEL_PATH CRITIC_MODEL_PATH ACTOR_MODEL CRITIC_MODEL DATASET_PATH NUM_NODES "
    "DEVICES_PER_NODE ACTOR_CP_ACT CRITIC_CP_ACT ACTOR_ZERO_STAGE CRITIC_ZERO_STAGE SEED MBS GBS TENSORBOARD_PATH "
    "LOG_FILE CHECKPOINT_PATH MASTER_PORT HYBRID_ENGINE ACTOR_LR ACTOR_LEARNING_RATE LORA_ACTOR_LR ACTOR_WD "
    "ACTOR_WEIGHT_DECAY CRITIC_LR CRITIC_LEARNING_RATE LORA_CRITIC_LR CRITIC_WD CRITIC_WEIGHT_DECAY LORA_DIM "
    "ONLY_OPTIMIZE_LORA ACTOR_DROPOUT CRITIC_DROPOUT EPOCHS NUM_WARMUP_STEPS PRINT_ANSWERS_INTERVAL HPZ_ENABLED_ACTOR "
    "HPZ_ENABLED_CRITIC ENABLE_HPU_GRAPHS RUN_STEPS",
}


def arguments(*stages: str, **environment: str) -> list[str]:
    return to_arguments({f"HL_{name}": value for name, value in environment.items()}, stages)[0]


def test_table_has_exactly_the_variables_of_the_scripts() -> None:
    expanded = {f"HL_{name}" for names in OF_STEP.values() for name in names.split()}
    assert set(load_variables()) == expanded
    for row in load_variables().values():
        assert sum(map(bool, (row.keys, row.option, row.automatic, row.nothing))) == 1, row.name


@pytest.mark.parametrize(
    ("stage", "environment", "expected"),
    [
        ("sft", {"LEARNING_RATE": "2e-5"}, {"sft.optimizer.learning_rate": 2e-5}),
        ("reward", {"LEARNING_RATE": "2e-5"}, {"reward.optimizer.learning_rate": 2e-5}),
        ("sft", {"GBS": "128", "MBS": "8"}, {"sft.batch_size": 128, "sft.micro_batch_size": 8}),
        (
            "ppo",
            {"GBS": "64", "MBS": "2"},
            {
                "ppo.batch_size": 64,
                "ppo.minibatch_size": 64,
                "ppo.micro_batch_size": 2,
                "ppo.generation_batch_size": 2,
            },
        ),
        ("sft", {"MAX_SEQ_LEN": "512"}, {"data.max_prompt_length": 256, "data.max_completion_length": 256}),
        ("ppo", {"ACTOR_ZERO_STAGE": "3"}, {"roles.actor.zero_stage": 3}),
        ("ppo", {"CRITIC_ZERO_STAGE": "1"}, {"roles.critic.zero_stage": 1}),
        ("sft", {"ACTOR_ZERO_STAGE": "3"}, {"roles.sft.zero_stage": 3}),
        ("ppo", {"ACTOR_CP_ACT": "1"}, {"roles.actor.gradient_checkpointing": True}),
        ("reward", {"LORA_DIM": "64"}, {"roles.reward.lora_rank": 64}),
        ("reward", {"LORA_DIM": "0"}, {"roles.reward.lora_rank": 0}),
        ("ppo", {"LORA_ACTOR_LR": "4e-4", "LORA_CRITIC_LR": "6e-4"},
         {"roles.actor.lora_learning_rate": 4e-4, "roles.critic.lora_learning_rate": 6e-4}),
        ("sft", {"ONLY_OPTIMIZE_LORA": "1"}, {"lora.also_train": ()}),
        ("sft", {"ONLY_OPTIMIZE_LORA": "0"}, {"lora.also_train": ("norms", "biases", "embeddings")}),
        ("ppo", {"NUM_WARMUP_STEPS": "100"}, {"ppo.optimizer.warmup": 100.0, "ppo.critic_optimizer.warmup": 100.0}),
        ("ppo", {"RUN_STEPS": "5"}, {"ppo.steps": 5}),
        ("ppo", {"RUN_STEPS": "0"}, {}),
        ("sft", {"CHECKPOINT_PATH": "", "GBS": " "}, {}),
        ("ppo", {"ENABLE_HPU_GRAPHS": "0"}, {"engine.kernels": {"graph_capture": "none"}}),
        ("ppo", {"ENABLE_HPU_GRAPHS": "1", "HYBRID_ENGINE": "1"}, {}),
        ("ppo", {"EPOCHS": "2"}, {"ppo.epochs": 2}),
        ("ppo", {"ACTOR_MODEL": "a/b"}, {"ppo.actor": "a/b"}),
        ("ppo", {"CRITIC_DROPOUT": "0.1"}, {"ppo.critic_dropout": 0.1}),
        ("sft", {"SEED": "10"}, {"seed": 10}),
        ("ppo", {"LEARNING_RATE": "1"}, {}),  # of steps 1 and 2 alone
    ],
)  # fmt: skip
def test_variable_sets_its_keys(stage: str, environment: dict[str, str], expected: dict[str, object]) -> None:
    options = arguments(stage, **environment)
    assert options[::2] == ["--set"] * (len(options) // 2)
    config = load_config(None, options[1::2], example=False)
    for key, value in expected.items():
        section: object = config
        for part in key.split("."):
            section = getattr(section, part)
        assert section == value, key
    given = {pair.partition("=")[0] for pair in options[1::2]}
    assert given == {"engine.kernels.graph_capture" if key == "engine.kernels" else key for key in expected}


def test_several_stages_get_their_keys() -> None:
    assert arguments("sft", "reward", EPOCHS="4") == ["--set", "sft.epochs=4", "--set", "reward.epochs=4"]
    assert arguments("sft", "reward", "ppo", SEED="1") == ["--set", "seed=1"]


def test_model_of_an_earlier_stage_needs_no_name() -> None:
    models = {"ACTOR_MODEL": "big", "CRITIC_MODEL": "small"}
    assert arguments("sft", "reward", "ppo", **models) == ["--set", "model.path=big", "--set", "reward.model=small"]
    assert arguments("ppo", **models) == ["--set", "ppo.actor=big", "--set", "ppo.reward_model=small"]


def test_some_variables_become_options() -> None:
    assert arguments("sft", DEVICES_PER_NODE="8", NUM_NODES="1") == ["--ranks", "8"]
    assert arguments("sft", DEVICES_PER_NODE="8", NUM_NODES="2") == ["--ranks", "8", "--nodes", "2"]
    assert arguments("sft", BASE_OUT_PATH="/logs", TAG="mine") == ["--output", "/logs/mine"]
    assert arguments("sft", BASE_OUT_PATH="/logs") == ["--output", "/logs/default_tag"]
    assert arguments("sft", CHECKPOINT_PATH="/here", TAG="mine") == ["--output", "/here"]


def test_sources_are_a_list() -> None:
    config = load_config(
        None, arguments("sft", DATASET_PATH="Dahoas/rm-static Dahoas/full-hh-rlhf")[1::2], example=False
    )
    assert [source.path for source in config.data.datasets] == ["Dahoas/rm-static", "Dahoas/full-hh-rlhf"]
    assert [source.heldout_split for source in config.data.datasets] == ["test", "test"]
    assert arguments("sft", DATASET_PATH="mine") == ["--set", "data.datasets=[mine]"]


def test_hpz_needs_several_machines_and_zero_3() -> None:
    given = {"HPZ_ENABLED": "1", "ACTOR_ZERO_STAGE": "3", "NUM_NODES": "2", "DEVICES_PER_NODE": "8"}
    pair = "engine.deepspeed.zero_optimization.zero_hpz_partition_size=8"
    assert pair in arguments("sft", **given)
    assert pair not in arguments("sft", **given | {"NUM_NODES": "1"})
    assert pair not in arguments("sft", **given | {"ACTOR_ZERO_STAGE": "2"})
    with pytest.raises(ConfigError, match="HL_DEVICES_PER_NODE: unset, and hpZ needs the number of devices"):
        arguments("sft", **{name: value for name, value in given.items() if name != "DEVICES_PER_NODE"})


@pytest.mark.parametrize(
    ("name", "value", "stage", "line"),
    [
        ("HL_ACTOR_ZERO_STAG", "1", "sft", "unknown variable of the fork's scripts; did you mean HL_ACTOR_ZERO_STAGE?"),
        ("HL_QWERTZUIOPQWERTZ", "1", "sft", "docs/deepspeed-chat.md lists the variables"),
        ("HL_MBS", "two", "sft", "HL_MBS: expected a whole number, got 'two'"),
        ("HL_DROPOUT", "inf", "sft", "HL_DROPOUT: expected a number, got 'inf'"),
        ("HL_ACTOR_CP_ACT", "yes", "sft", "HL_ACTOR_CP_ACT: expected 0 or 1, got 'yes'"),
        ("HL_SEED", "1", "step1", "step1: unknown stage; name some of sft, reward, dpo, ppo, distill, or none"),
    ],
)
def test_mistake_is_one_line(name: str, value: str, stage: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        to_arguments({name: value}, [stage])
    assert line in str(error.value) and "\n" not in str(error.value)


def test_program_prints_arguments_and_meanings_apart() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    command = [sys.executable, "-m", "rlhf.contrib.deepspeed_chat.variables", "ppo"]
    environment |= {"HL_RUN_STEPS": "5", "HL_LOG_FILE": "x.txt"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "--set\nppo.steps=5\n"
    first, second = done.stderr.splitlines()
    assert first == "HL_RUN_STEPS=5: ppo.steps=5"
    assert second.startswith("HL_LOG_FILE=x.txt: nothing here: the records are in")
    done = subprocess.run(command, env=environment | {"HL_X": "1"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
