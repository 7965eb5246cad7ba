"""One step of PPO: facts that hold before the first update, for any model."""

import pytest
import torch

from accelerators import Memory
from tests.families.table import BY_NAME
from tests.families.table import build as architecture
from tests.helpers import llama
from tests.in_process import build_ppo, ppo_models


def gpt2(vocabulary):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, **rates, **special))


def linear_attention(vocabulary):
    """A model whose cache has layers of another kind: states of one size instead of keys and values."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = BY_NAME["Qwen3.5"].configuration(vocab_size=vocabulary)
    return architecture(config, MODEL_FOR_CAUSAL_LM_MAPPING)


def scalar(model):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    model.config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(model.config)


@pytest.fixture
def build(accelerator, recipe, tokenizer, tmp_path):
    def ppo(model, *, zero_stage=0, precision="fp32", lora=None, **changes):
        size = len(tokenizer)
        models = ppo_models(model(size), model(size), scalar(model(size)), scalar(model(size)))
        options = {"engine": {"zero_stage": zero_stage}, "lora": lora, "precision": accelerator.precision(precision)}
        changes = {"batch_size": 8, "minibatch_size": 8, "ppo_epochs": 1, **changes}
        return build_ppo(accelerator, tmp_path, recipe, tokenizer, models, **options, **changes)

    return ppo


@pytest.mark.parametrize(("total", "is_kept"), [(1, False), (1 << 40, True)])
def test_evaluation_scores_without_large_caches(build, monkeypatch, total, is_kept):
    """As a rollout does: the plan counts no cache while completions are scored."""
    ppo, seen = build(llama), []
    monkeypatch.setattr(ppo.accelerator, "memory", lambda: Memory(0, 0, total=total))
    ppo.reward.register_forward_hook(lambda *call: seen.append(bool(ppo.decoder._states)))
    ppo.evaluate("before")
    ppo.step(0)
    assert len(seen) > 1 and set(seen) == {is_kept}


@pytest.mark.parametrize("lora", [None, {"rank": 2, "dropout": 0.5}])
def test_a_model_with_dropout_starts_at_a_ratio_of_one(build, lora):
    """With two updates of nothing (a rate of almost 0) no ratio leaves 1: old and new policy drop nothing."""
    optimizer = {"learning_rate": 1e-30, "warmup": 0}
    ppo = build(gpt2, lora=lora, optimizer=optimizer, critic_optimizer=optimizer, clip=1e-3, ppo_epochs=2)
    ppo.actor.engine.train()
    numbers = ppo.step(0)
    assert numbers["clip_fraction"] == 0.0
    assert abs(numbers["policy_loss"]) < 1e-6, "the mean of whitened advantages"
    assert numbers["grad_norm"] > 0


def test_a_model_with_linear_attention_takes_a_step(build):
    ppo = build(linear_attention)
    numbers = ppo.step(0)
    assert numbers["grad_norm"] > 0 and numbers["clip_fraction"] == 0.0
    (state,) = ppo.decoder._states
    linear, full = state.cache.layers
    tensors = [linear.conv_states[0], linear.recurrent_states[0], full.keys, full.values]
    size = sum(tensor.nbytes for tensor in tensors)
    assert size <= state.cache.nbytes() <= size + 64, "and a counter or two"


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_reference_is_the_policy_before_its_first_step(build, zero_stage):
    ppo = build(llama, zero_stage=zero_stage, precision="bf16")
    (prompts,) = ppo.batches.step(0)
    scored = ppo.score(ppo.generate(prompts))
    assert torch.equal(scored.log_probs, scored.ref_log_probs)
    assert ppo.step(0)["kl"] == 0.0
