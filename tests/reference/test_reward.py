"""Steps of the reward model are those of the plain reference: loss, accuracy, scores, gradient's norm, weights."""

from __future__ import annotations

import pytest

from tests.reference import cases, expected, real

CASES = {
    "ZeRO 1, the last batch filled up": ("llama", {}),
    "ZeRO 0, LoRA": ("llama", {"engine": {"zero_stage": 0}, "lora": cases.LORA}),
    "the last tokens alone": ("llama", {"loss": "last"}),
    "a margin for all, and scores around 0": ("llama", {"margin": 0.7, "center": 0.3}),
    "the last tokens with a margin, around 0": ("llama", {"loss": "last", "margin": 1.5, "center": 0.1}),
    "ZeRO 0, GPT-2, one micro-batch": ("gpt2", {"engine": {"zero_stage": 0}, "micro_batch_size": None}),
}
ROWS = 6  # the second batch of 4 lacks two


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_reference(accelerator, tmp_path, name):
    kind, changes = CASES[name]
    config, model = cases.configuration("reward", **changes), cases.scalar_model(1, kind)
    actual = real.supervised("reward", accelerator, config, model, ROWS, tmp_path)
    assert len(actual.steps) == config.reward.max_steps
    wanted = expected.supervised("reward", config, model, ROWS)
    assert any(step["accuracy"] != 0.5 for step in wanted.steps)  # which would be the same if it were inverted
    cases.assert_same(actual, wanted)
