"""A toy copy is small, and keeps what decides on operators and shapes beside the hidden sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gaudi_sim.toy import shrink, toy_copy

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError

FAMILIES = ["Llama", "GPT2", "OPT", "Bloom", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi", "GPTNeoX"]
FAMILIES += ["Falcon", "GPTJ", "GPTNeo", "CodeGen", "Mpt", "StableLm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_toy_of_every_family_computes(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(vocab_size=1000)
    before = config.to_dict()
    shrink(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.shape == (1, 4, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert config.architectures == before["architectures"]
    for key in ("sliding_window", "tie_word_embeddings", "eos_token_id"):
        assert getattr(config, key, None) == before.get(key, getattr(config, key, None))


def test_grouped_heads_and_every_kind_of_layer_stay() -> None:
    llama = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=8)
    shrink(llama)
    assert llama.num_key_value_heads < llama.num_attention_heads
    gemma = transformers.Gemma2Config()
    kinds = set(gemma.layer_types)
    shrink(gemma)
    assert set(gemma.layer_types) == kinds


@pytest.mark.parametrize(
    "changes", [{"alibi": True, "multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 8}]
)
def test_a_toy_of_every_falcon_computes(changes: dict[str, Any]) -> None:
    config = transformers.FalconConfig(vocab_size=1000, num_attention_heads=64, hidden_size=4096, **changes)
    shrink(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.shape == (1, 4, 1000)


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no-such-model: no toy copy can be made of it .*; check model.path"):
        toy_copy(ModelConfig(path=str(tmp_path / "no-such-model")), tmp_path / "toy")
