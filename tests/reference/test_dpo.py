"""Steps of DPO are those of the plain reference: loss, accuracy, implicit rewards, gradient's norm, weights."""

from __future__ import annotations

import pytest

from tests.reference import cases, expected, real

CASES = {
    "ZeRO 1, the last batch filled up": ("llama", {}),
    "doubted labels, the reference beside": ("llama", {"label_smoothing": 0.2, "reference": "beside"}),
    "ipo": ("llama", {"loss": "ipo"}),
    "robust": ("llama", {"loss": "robust", "label_smoothing": 0.1}),
    "ZeRO 0, LoRA": ("llama", {"engine": {"zero_stage": 0}, "lora": cases.LORA}),
    "LoRA, its adapters off": ("llama", {"lora": cases.LORA, "reference": "beside"}),
    "ZeRO 0, GPT-2, one micro-batch": ("gpt2", {"engine": {"zero_stage": 0}, "micro_batch_size": None}),
    "activations recomputed": ("llama", {"model": {"gradient_checkpointing": True}}),
}
ROWS = 6  # the second batch of 4 lacks two; the third is of the second epoch


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_reference(accelerator, tmp_path, name):
    kind, changes = CASES[name]
    config, model = cases.configuration("dpo", **changes), cases.language_model(1, kind)
    actual = real.supervised("dpo", accelerator, config, model, ROWS, tmp_path)
    assert len(actual.steps) == config.dpo.max_steps
    wanted = expected.supervised("dpo", config, model, ROWS)
    assert wanted.before["accuracy"] == 0.5
    assert wanted.steps[-1]["accuracy"] != 0.5  # which would be the same if it were inverted
    cases.assert_same(actual, wanted)
