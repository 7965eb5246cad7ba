"""Adapters in folders of their own: peft loads them, and so does a model on a shared base."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.checkpoint.export import save_adapter, save_model
from rlhf.config.schema import LoraConfig, ModelConfig, OptimizerConfig, build_config
from rlhf.engine.engine import TrainingEngine
from rlhf.models.forward import ScalarHead
from rlhf.models.lora import FROZEN_ADAPTER, add_adapters, read_adapter_config, read_adapter_tensors
from rlhf.models.scalar_head import reset_final_norm
from rlhf.models.shared_base import SharedBase, build_on_base
from rlhf.roles.roles import model_placements
from tests.helpers import build_tokenizer, llama
from tests.in_process import scalar_llama

IDS = torch.randint(2, 60, (3, 7), generator=torch.Generator().manual_seed(0))


def engine(accelerator, model, stage="sft", zero_stage=1, **lora):
    """A model under an engine, all that it trains moved away from where it began."""
    config = build_config(
        {"engine": {"zero_stage": zero_stage, "zero_persistence_threshold": 0}, "lora": {"rank": 4, **lora}}
    )
    add_adapters(model, LoraConfig(rank=4, **lora), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return TrainingEngine(
        "test",
        ScalarHead(model) if stage == "reward" else model,
        accelerator=accelerator,
        precision=accelerator.precision("fp32"),
        placement=model_placements(config, stage)[stage],
        optimizer=OptimizerConfig(),
        total_steps=1,
        micro_batch_size=1,
        accumulation=1,
    )


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("also", [[], ["norms"], ["biases"], ["embeddings"], ["norms", "biases", "embeddings"]])
def test_peft_computes_what_the_merged_model_does(accelerator, tmp_path, also):
    model = llama(60, attention_bias=True, mlp_bias=True)
    model.save_pretrained(tmp_path / "base")
    trained = engine(accelerator, model, also_train=also)
    save_adapter(trained, tmp_path / "adapter", str(tmp_path / "base"))
    save_model(trained, build_tokenizer(), tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    actual = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(actual, expected)
    assert (actual - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))).abs().max() > 0.01


def test_an_adapter_names_its_base(accelerator, tmp_path):
    model = llama(60)
    model.save_pretrained(tmp_path / "base")
    save_adapter(engine(accelerator, model), tmp_path / "adapter", str(tmp_path / "base"))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert settings["task_type"] == "CAUSAL_LM" and settings["r"] == 4
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_reward_model_s_adapter_carries_its_head(accelerator, tmp_path, zero_stage):
    scalar_llama(60).save_pretrained(tmp_path / "base")
    model = scalar_llama(60)
    trained = engine(accelerator, model, "reward", zero_stage)
    save_adapter(trained, tmp_path / "adapter", str(tmp_path / "base"))
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    with trained.whole_weights():
        expected = logits(model)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), expected)


def test_a_reward_model_is_its_language_model_and_its_adapter(accelerator, tmp_path):
    language = llama(60)
    model = scalar_llama(60)
    model.model.load_state_dict(language.model.state_dict())
    trained = engine(accelerator, model, "reward")
    save_adapter(trained, tmp_path / "adapter", None)
    rebuilt = build_on_base(
        SharedBase(language.requires_grad_(False)),
        ModelConfig(),
        attention="sdpa",
        scalar_head=True,
        adapter=tmp_path / "adapter",
    )
    torch.testing.assert_close(logits(rebuilt), logits(model))
    assert rebuilt.model.norm.weight is language.model.norm.weight
    assert {
        name.split(".lora_")[1]
        for name in read_adapter_tensors(tmp_path / "adapter", FROZEN_ADAPTER)
        if ".lora_" in name
    } == {
        f"A.{FROZEN_ADAPTER}.weight",
        f"B.{FROZEN_ADAPTER}.weight",
    }
    assert read_adapter_config(tmp_path / "adapter").modules_to_save is None


def test_reset_norm_is_saved_with_the_adapter(accelerator, tmp_path):
    language = llama(60)
    with torch.no_grad():
        language.model.norm.weight.uniform_(0.5, 2)
    model = scalar_llama(60)
    model.model.load_state_dict(language.model.state_dict())
    assert reset_final_norm(model, True)
    trained = engine(accelerator, model, "reward")
    save_adapter(trained, tmp_path / "adapter", None)
    base = SharedBase(language.requires_grad_(False))
    rebuilt = build_on_base(base, ModelConfig(), attention="sdpa", scalar_head=True, adapter=tmp_path / "adapter")
    torch.testing.assert_close(logits(rebuilt), logits(model))
    assert rebuilt.model.norm.weight is not language.model.norm.weight
