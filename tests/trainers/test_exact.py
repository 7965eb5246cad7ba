"""`ppo.generation_exact`: drawn log-probabilities equal scored and trained ones, bit for bit, in real steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlhf.config.schema import build_config
from rlhf.errors import ConfigError
from rlhf.trainers.ppo.exact import exact_numbers
from tests.helpers import llama, mark_slow
from tests.in_process import build_ppo, ppo_models, scalar_llama
from tests.trainers.test_elastic import interrupt_at

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
FAMILIES = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {**SIZES, "intermediate_size": 100},
    "qwen3": {**SIZES, "intermediate_size": 100, "num_key_value_heads": 2, "head_dim": 12},
    "phi3": {**SIZES, "intermediate_size": 50, "num_key_value_heads": 2, "pad_token_id": 0},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4},
    "gpt_neo": {**SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gemma2": {**SIZES, "intermediate_size": 100, "num_key_value_heads": 2, "head_dim": 12},
}
EAGER = {"gemma2", "bloom", "gpt_neo"}
"""Families whose attention only their own code computes."""


def policy(family: str, vocabulary: int, attention: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        return llama(vocabulary, attn_implementation=attention)
    config = AutoConfig.for_model(family, vocab_size=vocabulary, eos_token_id=1, bos_token_id=None, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.fixture
def build(accelerator, recipe, tokenizer, tmp_path):
    """PPO with `ppo.generation_exact` inside the block that its stage would run in, and its rollouts."""
    contexts = []

    def build(family="llama", attention=None, **changes: Any) -> tuple[Any, list[Any]]:
        name = attention or accelerator.kernels.get("attention")
        values = {**recipe, "ppo": {**recipe["ppo"], "generation_exact": True}}
        values["precision"] = changes.pop("precision", "fp32")
        values["model"] = {**recipe["model"], "gradient_checkpointing": changes.pop("checkpointing", False)}
        context = exact_numbers(build_config(values), "ppo", accelerator)
        context.__enter__()
        contexts.append(context)
        given = changes.get("lora", {}).get("rank", 0)
        reference = None if given else policy(family, len(tokenizer), name)
        critic, reward = (scalar_llama(len(tokenizer), seed=seed, attn_implementation=name) for seed in (1, 2))
        models = ppo_models(policy(family, len(tokenizer), name), reference, critic, reward)
        ppo = build_ppo(accelerator, tmp_path, values, tokenizer, models, **changes)
        rollouts, generate = [], ppo.generate
        ppo.generate = lambda *given: rollouts.append(generate(*given)) or rollouts[-1]
        return ppo, rollouts

    yield build
    for context in reversed(contexts):
        context.__exit__(None, None, None)


def assert_exact(ppo: Any, rollouts: list[Any], steps: int = 2) -> None:
    """Take steps, and compare what was drawn with what was scored and with what the first update computed."""
    for index in range(steps):
        metrics = ppo.step(index)
        drawn, mask = rollouts[-1].drawn_log_probs, rollouts[-1].action_mask.bool()
        assert mask.sum() > 10 and drawn[mask].std() > 0
        assert torch.equal(ppo.experience.log_probs[mask], drawn[mask])
        assert metrics["draw_gap"] == metrics["draw_gap_max"] == metrics["draw_kl"] == 0
        assert metrics["update_gap"] == 0
        assert metrics["grad_norm"] > 0


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reused passes": {"minibatch_size": None, "ppo_epochs": 1},
    "micro-batches of one": {"micro_batch_size": 1, "engine": {"shapes": "dynamic"}},
    "dynamic shapes": {"engine": {"shapes": "dynamic", "zero_stage": 0}, "generation_batch_size": 3},
    "LoRA": {"lora": {"rank": 4}, "engine": {"zero_stage": 0}},
    "gradient checkpointing": {"checkpointing": True, "engine": {"zero_stage": 2}},
    "truncated sampling": {"sampling": {"temperature": 0.7, "top_k": 20, "top_p": 0.9}},
    "groups": {"estimator": "rloo", "completions_per_prompt": 2, "micro_batch_size": 2},
    "moving average": {"ema": 0.9},
    "quantized to 8 bits": {"lora": {"rank": 4}, "engine": {"frozen": "int8", "zero_stage": 2}},
    "quantized to 4 bits": {"lora": {"rank": 4}, "engine": {"frozen": "int4", "zero_stage": 3}},
    "ZeRO 3": {"engine": {"zero_stage": 3}},
    "ZeRO 3, layer by layer": {"engine": {"zero_stage": 3}, "generation_weights": "layerwise", "lora": {"rank": 4}},
}
SELDOM = {"quantized to 4 bits", "ZeRO 3, layer by layer"}  # slow; "LoRA", "8 bits" and "ZeRO 3" are often


@pytest.mark.parametrize("case", mark_slow(CASES, except_for=CASES.keys() - SELDOM))
def test_drawn_log_probabilities_are_those_of_training_bit_for_bit(build, case):
    assert_exact(*build(**case))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_exact(build, family):
    assert_exact(*build(family, attention="eager" if family in EAGER else None), steps=1)


def test_bf16_is_exact(build):
    assert_exact(*build(precision="bf16"))


def test_steps_after_an_evaluation_of_many_completions_are_exact(build):
    ppo, rollouts = build(best_of=3)
    ppo.evaluate("before")
    assert_exact(ppo, rollouts, steps=1)


def refusal(function: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_a_model_whose_attention_depends_on_the_batch_is_refused_with_its_first_module(build):
    line = refusal(build, attention="sdpa")
    assert "first in model.layers.0.self_attn" in line and "engine.kernels={attention: eager}" in line


def test_first_module_that_depends_on_the_batch_is_named_though_padding_is_left_out(build, monkeypatch):
    plain, seen = LlamaDecoderLayer.forward, set()

    def scaled(module: LlamaDecoderLayer, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.add(hidden.shape[:2])
        return plain(module, hidden, **options) * (1 + hidden.shape[:2].numel() / 1000)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    assert "first in model.layers.0 (LlamaDecoderLayer)" in refusal(build)
    assert (1, 64) in seen  # 60 real tokens of 4 x 24


def test_quantized_weights_with_a_product_for_few_rows_are_refused_until_another_is_chosen(build, accelerator):
    settings = {"lora": {"rank": 4}, "engine": {"frozen": "int8", "zero_stage": 0}, "precision": "bf16"}
    line = refusal(build, **settings)
    assert "(QuantizedLinear); set engine.kernels={quantized_weights: torch}" in line
    accelerator.kernels.choose("quantized_weights", "torch")
    try:
        assert_exact(*build(**settings), steps=1)
    finally:
        accelerator.kernels.choose("quantized_weights", "auto")


def test_dropout_is_refused(build):
    assert refusal(build, family="gpt2", dropout=0.1).endswith("set ppo.dropout=0")


def test_a_device_without_such_operators_is_refused_with_the_operator_in_the_way(accelerator):
    config = build_config({"precision": "fp32", "ppo": {"generation_exact": True}})
    accelerator.kernels.choose("batch_invariant", "none")
    try:
        line = refusal(exact_numbers(config, "ppo", accelerator).__enter__)
    finally:
        accelerator.kernels.choose("batch_invariant", "auto")
    assert "not possible on cpu: its matmul depends on the number of rows" in line and "none was chosen" in line


def test_other_stages_and_runs_compute_as_before(accelerator):
    first, second = torch.randn(16, 576), torch.randn(50, 576).T
    before = first @ second
    for stage, exact in (("sft", True), ("ppo", False)):
        config = build_config({"precision": "fp32", "ppo": {"generation_exact": exact}})
        with exact_numbers(config, stage, accelerator):
            assert torch.equal(first @ second, before)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_runs_of_two_ranks_are_exact_and_resume(rlhf, finished_run, tmp_path, zero_stage):
    models = (f"ppo.actor={finished_run / 'sft' / 'model'}", f"ppo.reward_model={finished_run / 'reward' / 'model'}")
    settings = [*models, "ppo.generation_exact=true", f"engine.zero_stage={zero_stage}", "ppo.checkpoint_every=1"]
    arguments = ("ppo", "--output", tmp_path, "--ranks", 2, *(word for line in settings for word in ("--set", line)))
    interrupt_at(1, rlhf, *arguments)
    rlhf(*arguments, "--resume")
    lines = (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "draw_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert {record[key] for record in steps for key in ("draw_gap", "draw_gap_max", "update_gap")} == {0}
