"""Llama-2-70B with LoRA on 8 devices of 40 GB: the plan, and runs of its shape with fewer layers on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.config.schema import build_config
from rlhf.memory.advice import plan_stages
from rlhf.memory.environment import describe_environment
from rlhf.memory.stage import build_models
from rlhf.models.shape import shape_of
from tests.helpers import sets, weights

STAGES: Any = ("sft", "reward", "ppo")
LINEARS = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
EMBEDDINGS, NORMS = 32000 * 8192, 161 * 8192
ADAPTERS = 80 * 8 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))


def configuration(frozen: str, **ppo: Any) -> Any:
    return build_config(
        {
            "model": {"path": "llama-2-70b", "gradient_checkpointing": True},
            "engine": {"zero_stage": 3, "frozen": frozen, "zero_persistence_threshold": 0},
            "lora": {"rank": 8},
            "ppo": {"batch_size": 8, "micro_batch_size": 1, "generation_weights": "layerwise", **ppo},
        }
    )


@pytest.mark.parametrize(
    ("frozen", "bytes_of_linears", "unpacking"),
    [("auto", 2 * LINEARS, 0), ("int8", LINEARS, 2 + 2), ("int4", LINEARS * 9 // 16, 1 + 4 + 2)],
)
def test_each_device_has_an_eighth_of_the_weights(frozen: str, bytes_of_linears: int, unpacking: int) -> None:
    environment = describe_environment(build_config({"precision": "bf16"}), 8, 40 * 10**9, None)
    actor = build_models(configuration(frozen), "ppo", environment)["actor"]
    whole = bytes_of_linears + 2 * (2 * EMBEDDINGS + NORMS + ADAPTERS)
    assert actor.weights() == whole // 8
    # One layer's weights are gathered at a time, and one matrix is unpacked for its product.
    gathered, *unpacked = (item.size for item in actor.gathered())
    assert gathered == max(bytes_of_linears // 80 + 2 * 2 * 8192, 2 * EMBEDDINGS)
    assert sum(unpacked) == unpacking * 8192 * 28672


def test_quantized_base_of_four_models_fits() -> None:
    environment = describe_environment(build_config({"precision": "bf16"}), 8, 40 * 10**9, None)
    fits = {
        frozen: all(stage.fits(environment) for stage in plan_stages(configuration(frozen), STAGES, environment))
        for frozen in ("auto", "int8", "int4")
    }
    assert fits == {"auto": False, "int8": True, "int4": True}


def save_shape(folder: Path, tokenizer: Any, width: int, layers: int) -> None:
    """Save a model of random weights with the proportions of Llama-2-70B."""
    shape, heads = shape_of("llama-2-70b"), 8
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=shape.intermediate * width // shape.hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads * shape.kv_heads // shape.heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("stage", ["sft", pytest.param("ppo", marks=pytest.mark.slow)])
def test_shape_trains_on_two_ranks(rlhf: Any, tokenizer: Any, tmp_path: Path, stage: str) -> None:
    save_shape(tmp_path / "base", tokenizer, 128, 2)
    output = tmp_path / "run"
    keys = ("lora.rank=8", "engine.frozen=int8", "engine.zero_stage=3", "engine.zero_persistence_threshold=0")
    steps = ("sft.max_steps=1", "reward.max_steps=1", "ppo.steps=1", "model.gradient_checkpointing=true")
    stages = () if stage == "ppo" else (stage,)
    log = rlhf(
        *stages, "--output", output, "--ranks", 2, *sets(f"model.path={tmp_path / 'base'}", *keys, *steps)
    ).stdout
    numbers = 2 * (2 * 128 * 128 + 2 * 128 * 16 + 3 * 128 * 448)
    assert f"sft: the {numbers:,} frozen weights of its linear layers are in int8" in log
    before, after = weights(tmp_path / "base"), weights(output / stage / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 14 and all(name.endswith("_proj.weight") for name in changed)
