"""Train the adapters of translated recipes as DeepSpeed-Chat does, at the rate of its version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from rlhf.contrib.deepspeed_chat.translate import translate_commands
from rlhf.models.lora import add_adapters
from rlhf.roles.roles import model_placements
from tests.contrib.deepspeed_chat.test_translation import MAIN, loaded, text


@pytest.mark.parametrize("layer", ["self_attn.q_proj", "fc2"])  # fc2: an input of 4 x width
def test_adapters_are_trained_as_in_deepspeed_chat(layer: str, tmp_path: Path) -> None:
    """DeepSpeed-Chat: right drawn within 1 / sqrt(dim), left zeros, output + input @ right @ left / dim."""
    width, dim = 64, 8
    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(vocab_size=32, hidden_size=width, ffn_dim=4 * width, num_hidden_layers=1, num_attention_heads=4)
    )
    flags = f"--model_name_or_path m --lora_dim {dim} --only_optimize_lora"
    config = loaded(text(f"deepspeed --num_gpus 1 {MAIN['sft']} {flags}"), tmp_path)
    add_adapters(model, model_placements(config, "sft")["sft"].lora, seed=0)
    here = model.get_submodule(f"model.decoder.layers.0.{layer}")
    right = here.lora_A["default"].weight.detach().T.clone().requires_grad_()
    assert right.abs().max().item() == pytest.approx(dim**-0.5, rel=0.02)
    assert right.std().item() == pytest.approx((3 * dim) ** -0.5, rel=0.1), "uniform"
    left = torch.zeros(dim, width, requires_grad=True)
    rows, target = torch.randn(16, len(right)), torch.randn(16, width)

    with torch.no_grad():
        frozen = here.get_base_layer()(rows)
    factors = [here.lora_A["default"].weight, here.lora_B["default"].weight]
    outputs = (lambda: here(rows), lambda: frozen + rows @ right @ left / dim)
    for parameters, output in zip((factors, [right, left]), outputs):
        optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.0)
        for _ in range(20):
            optimizer.zero_grad()
            (output() - target).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(here.get_delta_weight("default"), (right @ left / dim).T, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "flags", "rate", "noted"),
    [
        ("sft", "--lora_dim 8 --learning_rate 1e-4", 5e-4, True),  # nothing tells the version
        ("sft", "--lora_dim 8 --learning_rate 1e-4 --lora_learning_rate 2e-3", 2e-3, False),
        ("sft", "--lora_dim 8 --learning_rate 1e-4 --dtype bf16", 5e-4, False),
        ("sft", "--lora_dim 8 --learning_rate 1e-4 --disable_dropout", 1e-4, False),
        ("ppo", "--actor_lora_dim 8 --actor_learning_rate 3e-4 --per_device_mini_train_batch_size 2", 3e-4, False),
        ("ppo", "--actor_lora_dim 8 --actor_learning_rate 3e-4 --per_device_training_batch_size 2", 5e-4, False),
    ],
)
def test_flags_date_the_rate_of_adapters(stage: str, flags: str, rate: float, noted: bool) -> None:
    recipe = translate_commands([f"deepspeed --num_gpus 1 {MAIN[stage]} {flags}"], {})
    key = f"roles.{'actor' if stage == 'ppo' else stage}.lora_learning_rate"
    assert recipe.settings[key].value == rate
    assert any("before, adapters learned at --" in note for note in recipe.notes) == noted


def test_published_walkthrough_of_13b_trains_adapters_at_the_stages_rate() -> None:
    steps = [
        f"deepspeed --num_gpus 8 {MAIN['sft']} --lora_dim 128 --learning_rate 1e-4 --disable_dropout",
        f"deepspeed --num_gpus 8 {MAIN['ppo']} --actor_lora_dim 128 --actor_learning_rate 5e-4 "
        "--per_device_train_batch_size 16 --per_device_mini_train_batch_size 16 --disable_actor_dropout",
    ]
    recipe = translate_commands(steps, {})
    rates = [recipe.settings[f"roles.{role}.lora_learning_rate"].value for role in ("sft", "actor")]
    assert rates == [1e-4, 5e-4]
