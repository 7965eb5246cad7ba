"""Steps of supervised fine-tuning are those of the plain reference: loss, gradient's norm, learning rate, weights."""

from __future__ import annotations

import pytest
import torch

from tests.reference import cases, expected, real

SCHEDULE = {"epochs": 2, "max_steps": 4, "optimizer": cases.OPTIMIZER | {"warmup": 0.25, "min_lr_ratio": 0.2}}
LORA = cases.LORA | {"learning_rate": 0.02}
CASES = {
    "ZeRO 1, the last batch filled up": ("llama", {}),
    "ZeRO 0, LoRA": ("llama", {"engine": {"zero_stage": 0}, "lora": cases.LORA}),
    "LoRA, gradient checkpointing": (
        "llama",
        {"lora": LORA, "model": {"gradient_checkpointing": True}},
    ),
    "ZeRO 0, GPT-2, loss on all tokens": ("gpt2", {"engine": {"zero_stage": 0}, "loss_on": "all"}),
    "cosine": ("llama", SCHEDULE | {"optimizer": SCHEDULE["optimizer"] | {"schedule": "cosine"}}),
    "linear": ("llama", SCHEDULE | {"optimizer": SCHEDULE["optimizer"] | {"schedule": "linear"}}),
}
ROWS = 6  # the second batch of 4 lacks two


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_reference(accelerator, tmp_path, name):
    kind, changes = CASES[name]
    config, model = cases.configuration("sft", **changes), cases.language_model(1, kind)
    actual = real.supervised("sft", accelerator, config, model, ROWS, tmp_path)
    assert len(actual.steps) == config.sft.max_steps
    cases.assert_same(actual, expected.supervised("sft", config, model, ROWS))


def test_gradient_checkpointing_computes_each_layer_twice(accelerator, tmp_path, monkeypatch):
    """That it is on where the comparison above says so."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    counts, forward = {True: 0, False: 0}, LlamaAttention.forward
    for on in counts:

        def counted(*arguments, on=on, **named):
            counts[on] += 1
            return forward(*arguments, **named)

        monkeypatch.setattr(LlamaAttention, "forward", counted)
        config = cases.configuration("sft", lora=cases.LORA, model={"gradient_checkpointing": on}, max_steps=1)
        real.supervised("sft", accelerator, config, cases.language_model(1), ROWS, tmp_path / str(on))
    layers, micro_batches = 2, 2
    assert counts[True] - counts[False] == layers * micro_batches


def test_loss_is_that_of_transformers_from_labels(accelerator, tmp_path):
    """A third opinion, on one row whose targets are all its tokens but the first."""
    config, model = cases.configuration("sft", batch_size=1, micro_batch_size=1, loss_on="all"), cases.language_model(1)
    actual = real.supervised("sft", accelerator, config, model, 1, tmp_path)
    prompt, completion = expected.tokens(cases.data("sft", 1).train[0])
    ids = torch.tensor([prompt + completion])
    assert actual.steps[0]["loss"] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
