"""What a stage starts from is known by its content: damage and other models under the same path are refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.config.schema import load_config
from rlhf.errors import ModelError
from rlhf.evaluation.models import check_reward_folder, find_base_model
from rlhf.roles.base_sharing import identify_bases
from rlhf.roles.lineage import REWARD_MODEL, ResolvedBaseModel
from rlhf.utils.manifest import write_manifest
from tests.helpers import kill_at, sets


@pytest.fixture(scope="module")
def adapted(rlhf, finished_run, tmp_path_factory):
    """The folder of a reward stage with LoRA: a model and an adapter."""
    output = tmp_path_factory.mktemp("adapted") / "run"
    model = f"reward.model={finished_run / 'sft' / 'model'}"
    rlhf("reward", "--output", output, *sets(model, "lora.rank=4", "reward.max_steps=1"))
    return output / "reward"


def damages(data):
    """Return damaged contents of a file; None: there is no file."""
    third, half = len(data) // 3, len(data) // 2
    flipped = data[:third] + bytes([data[third] ^ 1]) + data[third + 1 :]
    return [flipped, data[:half] + bytes(len(data) - half), data[:half], data + b"\0", None]


def test_damage_of_every_file_of_a_model_is_named(finished_run, adapted, tmp_path):
    """README.md is for people."""
    folders = [path.parent for root in (finished_run, adapted) for path in sorted(root.rglob("manifest.json"))]
    assert {folder.relative_to(folder.parents[1]).as_posix() for folder in folders} >= {
        *("sft/model", "reward/model", "reward/adapter", "ppo/model", "ppo/critic")
    }
    for number, folder in enumerate(folders):
        copy = Path(shutil.copytree(folder, tmp_path / str(number)))
        find = check_reward_folder if folder.parent.name == "reward" and folder.name == "model" else find_base_model
        find(copy)
        for file in sorted(path for path in copy.rglob("*") if path.is_file()):
            intact = file.read_bytes()
            for damaged in damages(intact):
                file.unlink() if damaged is None else file.write_bytes(damaged)
                if file.name == "README.md" or (file.name == "manifest.json" and damaged is None):
                    find(copy)
                    continue
                with pytest.raises(ModelError, match=rf"{re.escape(file.name)}|holds no"):
                    find(copy)
            file.write_bytes(intact)
        find(copy)


def test_commands_refuse_damaged_weights(rlhf, finished_run, data_file, tmp_path):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    file = run / "sft" / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    shutil.rmtree(run / "ppo")
    folder, other = file.parent, finished_run / "ppo"
    commands = [
        ["chat", folder],
        ["evaluate", "--text", data_file, folder],
        ["compare", folder, other, "--prompts", data_file],
        ["ppo", "--output", run],
        ["ppo", "--output", run, "--dry-run"],
    ]
    for command in commands:
        done = rlhf(*command, recipe=None, check=False)
        assert done.returncode == 2, (command, done)
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith(f"rlhf: error: {folder}: is damaged: model.safetensors has other content than"), line
        assert line.endswith(f"restore it, or delete {folder / 'manifest.json'} if the change is intended")
    assert not (run / "ppo" / "metrics.jsonl").exists()


@pytest.mark.parametrize("damaged", ["reward/model", "reward/adapter"])
def test_damage_during_a_run_is_noticed_by_its_later_stages(adapted, tmp_path, damaged):
    """A stage identifies its models when it begins, maybe days after the run has checked everything."""
    run = Path(shutil.copytree(adapted, tmp_path / "reward")).parent
    model = run / "reward" / "model"
    bases = [ResolvedBaseModel(REWARD_MODEL, str(model))]
    assert identify_bases(load_config(None, []), "ppo", bases)["ppo.reward_model"].path == str(model)
    (file,) = (run / damaged).glob("*.safetensors")
    file.write_bytes(damages(file.read_bytes())[0])
    with pytest.raises(ModelError, match=rf"{run / damaged}: is damaged: {file.name}"):
        identify_bases(load_config(None, []), "ppo", bases)


def change_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_json(name, **changes):
    def change(folder):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def test_resume_refuses_another_model_of_the_same_path(rlhf, model_folder, tmp_path):
    """The checkpoint has the adapters alone."""
    model, output = Path(shutil.copytree(model_folder, tmp_path / "model")), tmp_path / "run"
    keys = sets(f"model.path={model}", "lora.rank=4", "sft.max_steps=3", "sft.checkpoint_every=1")
    kill_at(output / "sft" / "checkpoints" / "step-00000002", rlhf, "sft", "--output", output, *keys)
    before = (output / "run.json").read_bytes()
    digests = json.loads(before)["stages"]["sft"]["models"]["model.path"]
    assert digests["path"] == str(model) and {"weights", "configuration", "tokenizer"} <= set(digests["identity"])
    for change, part in (
        (change_weights, "weights"),
        (change_json("config.json", rms_norm_eps=0.5), "configuration"),
        (change_json("tokenizer_config.json", padding_side="left", added="x"), "tokenizer"),
    ):
        change(model)
        done = rlhf("sft", "--output", output, "--resume", recipe=None, check=False)
        (line,) = done.stderr.strip().splitlines()
        assert done.returncode == 2 and line == (
            f"rlhf: error: {output}: this run was made with other models: {model} (other {part}); "
            "restore the original models, or choose another --output"
        )
        assert (output / "run.json").read_bytes() == before
        shutil.rmtree(model)
        shutil.copytree(model_folder, model)
    change_json("config.json", transformers_version="0", use_cache=False)(model)  # no model reads it
    rlhf("sft", "--output", output, "--resume", recipe=None)


def test_later_stage_refuses_another_model_of_an_earlier_one(rlhf, finished_run, tmp_path):
    """The reward model was trained on it."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    shutil.rmtree(run / "ppo")
    change_weights(run / "sft" / "model")
    write_manifest(run / "sft" / "model")
    done = rlhf("ppo", "--output", run, recipe=None, check=False)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and f"other models: {run / 'sft' / 'model'} (other weights); restore" in line


def test_stage_records_models_that_earlier_ones_trained(finished_run):
    stages = json.loads((finished_run / "run.json").read_text())["stages"]
    started = {stage: {key: model["path"] for key, model in stages[stage]["models"].items()} for stage in stages}
    sft, reward = (str(finished_run / stage / "model") for stage in ("sft", "reward"))
    assert started["reward"] == {"reward.model": sft} and len(started["sft"]) == 1
    assert started["ppo"] == {"ppo.actor": sft, "ppo.reward_model": reward}
    identities = [
        stages[stage]["models"][key]["identity"] for stage, key in (("reward", "reward.model"), ("ppo", "ppo.actor"))
    ]
    assert identities[0] == identities[1]
