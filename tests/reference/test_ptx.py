"""With raw text beside its rollouts PPO's steps are those of the plain reference: two losses, one step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference import cases, expected, real

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two micro-batches of it": ("llama", {}),
    "one micro-batch of it, LoRA, updates that end early": (
        "llama",
        {"ptx_batch_size": 2, "kl_stop": 0.002, "steps": 3, "lora": cases.LORA | {"learning_rate": 5e-3}},
    ),
    "ZeRO 0, GPT-2": ("gpt2", {"ptx_coef": 0.3, "engine": {"zero_stage": 0}}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_reference(accelerator: Any, tmp_path: Any, name: str) -> None:
    kind, changes = CASES[name]
    config = cases.configuration("ppo", **cases.PTX | changes)
    models = cases.Models.build(kind, lora=bool(config.lora.rank))
    actual = real.reinforced(accelerator, config, models, 14, tmp_path)
    wanted, _ = expected.reinforced(config, models, actual.rollouts, actual.heldout)
    assert all(step["ptx_loss"] > 1 for step in wanted.steps)
    cases.assert_same(actual, wanted)
