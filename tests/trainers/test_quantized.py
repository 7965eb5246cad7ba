"""The three stages with frozen weights in few bits: adapters learn, frozen models score, and what is left is whole."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf.models.forward import last_token_scores
from rlhf.models.quantized import count_quantized, find_quantized_layers
from rlhf.trainers.stage_models import ModelFactory
from tests.helpers import sets, weights
from tests.in_process import given, scalar_llama, stage_context

STAGES = ("sft", "reward", "ppo")


@pytest.fixture(scope="module", params=[pytest.param("int8", marks=pytest.mark.slow), "int4"])
def quantized_run(request, rlhf, tmp_path_factory) -> tuple[Path, str]:
    """The directory of a complete run of the tiny recipe with LoRA on quantized weights, and its output."""
    output = tmp_path_factory.mktemp("quantized") / "run"
    steps = ("sft.max_steps=1", "reward.max_steps=1", "ppo.steps=1")
    done = rlhf("--output", output, *sets("lora.rank=4", f"engine.frozen={request.param}", *steps))
    return output, done.stdout


@pytest.mark.parametrize("stage", STAGES)
def test_plain_models_differ_in_adapted_layers_alone(quantized_run, model_folder, stage):
    output, _ = quantized_run
    before = weights(model_folder if stage == "sft" else output / "sft" / "model")
    after = weights(output / stage / "model")
    different = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(different) == 2 * 7 and all(name.endswith("_proj.weight") for name in different)
    assert after.keys() - before.keys() == ({"score.weight"} if stage == "reward" else set())
    # What training adds has the rank of the adapters: no trace of the steps that the base was rounded to.
    for name in different:
        change = (after[name].double() - before[name].double()).float()
        assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 4


def test_run_reports_and_counts_quantized_weights(quantized_run):
    output, log = quantized_run
    assert "sft: the 15,360 frozen weights of its linear layers are in int" in log
    assert log.count("are in int") == 3  # of PPO's models on one base once
    assert "share one frozen base" in log
    assert json.loads((output / "ppo" / "stage.json").read_text())["before"]["kl"] == 0.0
    base = sum(tensor.numel() for tensor in weights(output / "sft" / "model").values())
    counts = json.loads((output / "sft" / "stage.json").read_text())["parameters"]
    assert counts["all"] - counts["trainable"] == base


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.01), ("int4", 0.2)])
def test_a_frozen_reward_model_scores_nearly_as_it_does_whole(accelerator, tmp_path, kind, most):
    model = scalar_llama(60)
    context = stage_context(accelerator, tmp_path, "ppo", {"engine": {"frozen": kind}})
    frozen = context.frozen("reward", given(scalar_llama(60)))
    assert count_quantized(frozen) == 15_360
    assert all(layer.source is None for layer in find_quantized_layers(frozen).values())
    ids = torch.randint(3, 60, (16, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        scores = last_token_scores(frozen(ids, mask), mask)
        expected = model(input_ids=ids, attention_mask=mask).logits.flatten()
    assert 0 < (scores - expected).norm() / expected.norm() < most


def test_stage_packs_each_layer_as_it_is_read(accelerator, tmp_path, model_folder):
    """Otherwise a model would be in memory whole first, without any number that is different."""
    values = {"engine": {"frozen": "int8"}, "lora": {"rank": 4}, "model": {"path": str(model_folder)}}
    context = stage_context(accelerator, tmp_path, "sft", values)
    assert count_quantized(ModelFactory(context).causal_lm("sft")) == 15_360


def test_a_reward_model_saved_from_quantized_weights_scores(quantized_run):
    output, _ = quantized_run
    model = AutoModelForSequenceClassification.from_pretrained(output / "reward" / "model")
    assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.isfinite().all()
