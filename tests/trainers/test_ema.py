"""A run with `ppo.ema`: its models as transformers and peft load them, and that it resumes where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.evaluation.models import model_folder
from tests.helpers import models_of, sets, weights

ONE_UPDATE = ("ppo.steps=1", "ppo.ppo_epochs=1", "ppo.minibatch_size=4", "ppo.kl_coef=0", "ppo.save_critic=false")


def arguments(finished_run: Path, output: Path, *keys: str) -> list[str]:
    return ["ppo", "--output", str(output), *sets(*models_of(finished_run), "ppo.ema=0.75", *keys)]


@pytest.fixture(scope="module")
def one_update(rlhf, finished_run, tmp_path_factory) -> tuple[Path, str]:
    """The folder of PPO after a single update, and what was printed."""
    output = tmp_path_factory.mktemp("one") / "run"
    done = rlhf(*arguments(finished_run, output, *ONE_UPDATE))
    return output / "ppo", done.stdout


def test_average_after_one_update_lies_between_the_weights(one_update, finished_run):
    folder, _ = one_update
    first, last, average = (
        weights(path) for path in (finished_run / "sft" / "model", folder / "model", folder / "model-ema")
    )
    assert average.keys() == last.keys()
    for name, tensor in average.items():
        expected = 0.75 * first[name].double() + 0.25 * last[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=2e-7, atol=1e-9)
    assert any(not torch.equal(last[name], tensor) for name, tensor in average.items())


def test_it_is_a_model_with_its_tokenizer(one_update):
    folder, printed = one_update
    AutoModelForCausalLM.from_pretrained(folder / "model-ema")
    assert len(AutoTokenizer.from_pretrained(folder / "model-ema")) > 0
    assert f"ppo: the moving average of its weights is saved in {folder / 'model-ema'}" in printed
    assert json.loads((folder / "stage.json").read_text())["average"] == ["model-ema"]
    assert not (folder / "critic").exists(), "ppo.save_critic=false"


def test_heldout_numbers_are_those_of_a_run_that_starts_from_it(one_update, rlhf, finished_run, tmp_path):
    """But for the divergence, which is from what each began with."""
    folder, printed = one_update
    rlhf(*arguments(finished_run, tmp_path / "run", f"ppo.actor={folder / 'model-ema'}", *ONE_UPDATE))
    before = json.loads((tmp_path / "run" / "ppo" / "stage.json").read_text())["before"]
    after = json.loads((folder / "stage.json").read_text())["after"]
    assert {key for key in after if key.startswith("ema_")} == {f"ema_{key}" for key in before}
    for key in before.keys() - {"kl"}:
        assert after[f"ema_{key}"] == pytest.approx(before[key], rel=1e-5), key
    assert after["ema_kl"] != after["kl"] and after["ema_reward"] != after["reward"]
    assert "ema reward" in printed


@pytest.mark.slow
def test_average_of_an_adapter_without_shared_base_is_saved(rlhf, finished_run, tmp_path):
    """With a shared base: tests/trainers/test_shared_base.py."""
    rlhf(*arguments(finished_run, tmp_path / "run", "ppo.steps=1", "lora.rank=2", "lora.save=both"))
    folder = tmp_path / "run" / "ppo"
    last, average = (load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "adapter-ema"))
    assert last.keys() == average.keys()
    assert any(not torch.equal(last[name], tensor) for name, tensor in average.items())
    base = AutoModelForCausalLM.from_pretrained(finished_run / "sft" / "model")
    merged = PeftModel.from_pretrained(base, folder / "adapter-ema").merge_and_unload().state_dict()
    for name, tensor in weights(folder / "model-ema").items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-7)


def test_chat_answers_with_it_on_request(one_update):
    folder, _ = one_update
    assert model_folder(folder.parent) == folder / "model"
    for named in (folder.parent, folder):
        assert model_folder(named, ema=True) == folder / "model-ema"
