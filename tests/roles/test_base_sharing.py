"""Which of PPO's models share a base: from settings and folders alone, and one line says it."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.config.schema import build_config
from rlhf.errors import ConfigError
from rlhf.roles.base_sharing import adapter_folder, check_sharing, decide_sharing, fingerprint_weights, record_base
from rlhf.roles.roles import model_placements
from rlhf.runs.directory import RunDirectory

PENDING = ("sft", "reward", "ppo")


@pytest.fixture
def folders(tmp_path):
    """The actor's folder, and that of a reward model whose adapter was trained on it."""
    for name in ("actor", "reward/model", "reward/adapter"):
        (tmp_path / name).mkdir(parents=True)
        torch.manual_seed(0)
        save_file({"a": torch.randn(300, 300), "b": torch.randn(7)}, tmp_path / name / "model.safetensors")
    record_base(tmp_path / "reward" / "adapter", str(tmp_path / "actor"), str(tmp_path / "reward" / "model"))
    return str(tmp_path / "actor"), str(tmp_path / "reward" / "model")


def found(folders, *, roles=None, engine=None, **lora):
    config = build_config({"lora": {"rank": 4, **lora}, "roles": roles or {}, "engine": engine or {}})
    held = model_placements(config, "ppo")
    sharing = decide_sharing(config, held, *folders)
    return dict(sharing.donors), sharing.describe(held)


def test_decide_sharing_reward_trained_on_actor_shares_all(folders):
    donors, line = found(folders)
    assert donors == {"critic": "actor", "reward": "critic"}
    assert line == "actor, reference, critic and reward share one frozen base"


def test_decide_sharing_without_critic_reward_on_actor(folders, tmp_path):
    def decided(folders):
        config = build_config({"lora": {"rank": 4}, "ppo": {"estimator": "rloo"}})
        sharing = decide_sharing(config, model_placements(config, "ppo"), *folders)
        return dict(sharing.donors), sharing.adapter, sharing.describe(model_placements(config, "ppo"))

    line = "actor, reference and reward share one frozen base"
    assert decided(folders) == ({"reward": "actor"}, adapter_folder(folders[1]), line)
    shutil.rmtree(adapter_folder(folders[1]))
    donors, adapter, line = decided(folders)
    assert (donors, adapter) == ({}, None)
    assert line.startswith("actor and reference share one frozen base; the others do not: ")


def test_decide_sharing_moved_run_is_recognized_by_weights(folders, tmp_path):
    actor, reward = (shutil.move(folder, tmp_path / f"moved-{index}") for index, folder in enumerate(folders))
    (tmp_path / "there").mkdir()
    reward = shutil.move(reward, tmp_path / "there" / "model")
    shutil.move(adapter_folder(folders[1]), tmp_path / "there" / "adapter")
    assert found((actor, reward))[0] == {"critic": "actor", "reward": "critic"}


def test_decide_sharing_changed_actor_keeps_reward_apart(folders, tmp_path):
    file = tmp_path / "actor" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "a": weights["a"] * 1.001}, file)
    donors, line = found(folders)
    assert donors == {"reward": "critic"}
    assert line.endswith(f"the others do not: the weights of {folders[0]} changed after {folders[1]} was trained")


def test_decide_sharing_adapter_of_another_model_is_ignored(folders):
    file = f"{folders[1]}/model.safetensors"
    weights = load_file(file)
    save_file({**weights, "a": weights["a"] * 1.001}, file)
    donors, line = found(folders)
    assert donors == {"reward": "critic"}
    assert line.endswith(f"the others do not: the adapter next to {folders[1]} belongs to another model")


def test_fingerprint_weights_ignores_other_files(tmp_path, folders):
    assert fingerprint_weights(folders[0]) == fingerprint_weights(folders[1]) is not None
    (tmp_path / "actor" / "config.json").write_text("{}")
    assert fingerprint_weights(folders[0]) == fingerprint_weights(folders[1])
    assert fingerprint_weights(str(tmp_path)) is None and fingerprint_weights("nobody/nothing") is None


def test_decide_sharing_reward_without_adapter_stays_apart(folders):
    shutil.rmtree(adapter_folder(folders[1]))
    donors, line = found(folders)
    assert donors == {"reward": "critic"}
    assert line == (
        "actor and reference share one frozen base; critic and reward share one frozen base; "
        f"the others do not: {folders[1]} has no adapter next to it"
    )


@pytest.mark.parametrize(
    ("settings", "donors", "words"),
    [
        (
            {"roles": {"critic": {"lora_rank": 0}}},
            {"reward": "actor"},
            "the others do not: the critic is trained in full",
        ),
        (
            {"roles": {"actor": {"lora_rank": 0}}},
            {"reward": "critic"},
            "the others do not: the actor is trained in full",
        ),
        ({"engine": {"zero_stage": 3}}, {}, "(actor, critic and reward)"),
        ({"roles": {"reward": {"frozen": "int8"}}}, {}, "have different precisions (roles.*.frozen)"),
    ],
)
def test_decide_sharing_obstacle_is_described_or_raised(folders, settings, donors, words):
    found_donors, line = found(folders, **settings)
    assert found_donors == donors and words in line
    with pytest.raises(
        ConfigError, match=r"^lora.share_base: true, but .*; .*, or leave lora.share_base at auto$"
    ) as caught:
        found(folders, share_base=True, **settings)
    assert words.removeprefix("the others do not: ") in str(caught.value)


def test_decide_sharing_also_train_reference_on_actor(folders):
    assert found(folders, also_train=["norms"])[0] == {"critic": "actor", "reference": "actor", "reward": "critic"}


@pytest.mark.parametrize("lora", [{"rank": 0}, {"share_base": False}])
def test_decide_sharing_without_lora_or_turned_off_is_silent(folders, lora):
    assert found(folders, **lora) == ({}, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, None),
        ({"ppo": {"actor": "./a"}, "reward": {"model": "./a"}}, None),
        ({"ppo": {"actor": "./a"}}, "the reward model is trained on the model of the sft stage, and the actor starts"),
        ({"reward": {"model": "./a"}}, "and the actor starts from the model of the sft stage; start both from the"),
        ({"roles": {"reward": {"lora_rank": 0}}}, "the reward model is trained in full; remove roles.reward.lora_rank"),
        ({"lora": {"rank": 0}}, "no model is trained with LoRA; set lora.rank"),
        ({"engine": {"zero_stage": 3}}, "at ZeRO-3 DeepSpeed shards each model's weights"),
    ],
)
def test_check_sharing_required_base_impossible_raises(tmp_path, values, words):
    lora = {"rank": 4, **values.get("lora", {}), "share_base": True}
    config = build_config({**values, "lora": lora, "output": str(tmp_path)})
    if words is None:
        check_sharing(config, PENDING, RunDirectory(tmp_path).finished_model)
        return
    with pytest.raises(ConfigError, match=r"^lora\.share_base: true, but ") as caught:
        check_sharing(config, PENDING, RunDirectory(tmp_path).finished_model)
    assert words in str(caught.value) and "\n" not in str(caught.value)
