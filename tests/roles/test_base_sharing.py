"""Which of PPO's models share a base: from settings and folders alone, and one line says it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.config.schema import load_config
from rlhf.errors import ConfigError
from rlhf.roles.base_sharing import adapter_folder, check_sharing, decide_sharing, record_base
from rlhf.roles.model_identity import fingerprint_model
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
        (tmp_path / name / "config.json").write_text(json.dumps({"rope_theta": 10000.0, "_name_or_path": name}))
    record_base(tmp_path / "reward" / "adapter", str(tmp_path / "actor"), str(tmp_path / "reward" / "model"))
    return str(tmp_path / "actor"), str(tmp_path / "reward" / "model")


def decide(folders, settings=""):
    """Return what is shared, and the line that describes it."""
    config = load_config(None, ["lora.rank=4", *settings.split()])
    placements = model_placements(config, "ppo")
    sharing = decide_sharing(config, placements, *folders)
    return dict(sharing.donors), sharing.describe(placements)


def change_weights(folder):
    file = f"{folder}/model.safetensors"
    weights = load_file(file)
    save_file({**weights, "a": weights["a"] * 1.001}, file)


@pytest.mark.parametrize(
    ("settings", "donors", "line"),
    [
        ("", {"critic": "actor", "reward": "critic"}, "actor, reference, critic and reward share one frozen base"),
        ("ppo.estimator=rloo", {"reward": "actor"}, "actor, reference and reward share one frozen base"),
        (
            "lora.also_train=[norms]",
            {"critic": "actor", "reference": "actor", "reward": "critic"},
            "actor, critic, reference and reward share one frozen base",
        ),
        ("lora.rank=0", {}, None),
        ("lora.share_base=false", {}, None),
        (
            "ppo.judge=j roles.judge.frozen=int8 ppo.estimator=rloo",
            {"reward": "actor"},
            "actor, reference and reward share one frozen base",
        ),
    ],
)
def test_reward_trained_on_the_actor_shares_its_base(folders, settings, donors, line):
    assert decide(folders, settings) == (donors, line)


@pytest.mark.parametrize(
    ("settings", "donors", "reason"),
    [
        ("roles.critic.lora_rank=0", {"reward": "actor"}, "the critic is trained in full"),
        ("roles.actor.lora_rank=0", {"reward": "critic"}, "the actor is trained in full"),
        ("engine.zero_stage=3", {}, "(actor, critic and reward)"),
        ("roles.reward.frozen=int8", {}, "have different precisions (roles.*.frozen)"),
    ],
)
def test_obstacle_is_described_or_raised(folders, settings, donors, reason):
    shared, line = decide(folders, settings)
    assert shared == donors and reason in line
    with pytest.raises(ConfigError, match=r"^lora.share_base: true, but .*; .*, or leave .* at auto$") as caught:
        decide(folders, f"lora.share_base=true {settings}")
    assert reason in str(caught.value)


def change_config(folder, **changes):
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


CHANGED = "the weights or the configuration of {actor} changed after {reward} was trained"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda actor, reward: change_weights(actor), CHANGED),
        (lambda actor, reward: change_config(actor, rope_theta=50.0), CHANGED),
        (lambda actor, reward: change_weights(reward), "the adapter next to {reward} belongs to another model"),
        (lambda actor, reward: shutil.rmtree(adapter_folder(reward)), "{reward} has no adapter next to it"),
    ],
)
def test_reward_of_other_weights_stays_apart(folders, damage, reason):
    damage(*folders)
    reason = reason.format(actor=folders[0], reward=folders[1])
    donors, line = decide(folders)
    assert donors == {"reward": "critic"}
    pairs = "actor and reference share one frozen base; critic and reward share one frozen base"
    assert line == f"{pairs}; the others do not: {reason}"
    rest = f"actor and reference share one frozen base; the others do not: {reason}"
    assert decide(folders, "ppo.estimator=rloo") == ({}, rest)


def test_moved_run_is_recognized_by_its_weights(folders, tmp_path):
    actor, reward = (shutil.move(folder, tmp_path / f"moved-{index}") for index, folder in enumerate(folders))
    (tmp_path / "new").mkdir()
    reward = shutil.move(reward, tmp_path / "new" / "model")
    shutil.move(adapter_folder(folders[1]), tmp_path / "new" / "adapter")
    assert decide((actor, reward))[0] == {"critic": "actor", "reward": "critic"}


def test_fingerprint_covers_configuration_and_not_notes(tmp_path, folders):
    """Neither the tokenizer nor the place."""
    assert fingerprint_model(folders[0]) == fingerprint_model(folders[1]) is not None
    (tmp_path / "actor" / "tokenizer.json").write_text("{}")
    change_config(folders[0], transformers_version="5.0", use_cache=False)
    assert fingerprint_model(folders[0]) == fingerprint_model(folders[1])
    change_config(folders[0], rms_norm_eps=1e-5)
    assert fingerprint_model(folders[0]) != fingerprint_model(folders[1])
    assert fingerprint_model(str(tmp_path)) is None and fingerprint_model("nobody/nothing") is None


def test_fingerprint_covers_every_byte_of_large_files(tmp_path):
    fingerprints = set()
    for name, position in (("a", None), ("b", 12_000_000), ("c", 20_000_001)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(32_000_000)
            if position:
                file.seek(position)
                file.write(b"1")
        fingerprints.add(fingerprint_model(str(tmp_path / name)))
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("", None),
        ("ppo.actor=./a reward.model=./a", None),
        ("ppo.actor=./a", "the reward model is trained on the model of the sft stage, and the actor starts"),
        ("reward.model=./a", "and the actor starts from the model of the sft stage; start both from the same"),
        ("roles.reward.lora_rank=0", "the reward model is trained in full; remove roles.reward.lora_rank"),
        ("lora.rank=0", "no model is trained with LoRA; set lora.rank"),
        ("engine.zero_stage=3", "at ZeRO-3 DeepSpeed shards each model's weights"),
        ("ppo.critic=opt-350m", "the critic does not start from the reward model; remove ppo.critic, or leave"),
    ],
)
def test_check_sharing_refuses_an_impossible_base(tmp_path, settings, reason):
    config = load_config(None, ["lora.rank=4", "lora.share_base=true", f"output={tmp_path}", *settings.split()])
    if reason is None:
        check_sharing(config, PENDING, RunDirectory(tmp_path).finished_model)
        return
    with pytest.raises(ConfigError, match=r"^lora\.share_base: true, but ") as caught:
        check_sharing(config, PENDING, RunDirectory(tmp_path).finished_model)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
