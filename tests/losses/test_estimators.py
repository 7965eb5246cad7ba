"""Advantage estimators against loops from the papers, on rows that end early, and their entries in the registry."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rlhf.config.estimators import ESTIMATORS
from rlhf.config.schema import PPOConfig
from rlhf.losses import advantages
from rlhf.losses.log_probs import masked_mean, token_weights
from tests.reference import estimators

LENGTHS = (3, 1, 4, 2, 4, 3, 1, 2)


def rewards(seed: int, offset: float = 0.0) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.gauss(offset, 1) for _ in range(length)] for length in LENGTHS]


def padded(rows: list[list[float]], filler: float = 0.0) -> torch.Tensor:
    width = max(map(len, rows)) + 1  # a column that no row reaches
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


CASES: list[dict[str, Any]] = [
    {"estimator": "rloo"},
    {"estimator": "rloo", "completions_per_prompt": 2},
    {"estimator": "grpo"},
    {"estimator": "grpo", "completions_per_prompt": 4},
    {"estimator": "grpo", "completions_per_prompt": 2, "group_std": False},
    {"estimator": "reinforce++"},
    {"estimator": "reinforce++", "gamma": 0.8, "completions_per_prompt": 2},
]


@pytest.mark.parametrize("values", CASES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_advantages_and_returns_are_those_of_the_loops(values: dict[str, Any], offset: float) -> None:
    settings, rows = PPOConfig(**values), rewards(1, offset)
    mask = padded([[1.0] * len(row) for row in rows])
    function = getattr(advantages, settings.method.function)
    actual = function(padded(rows), torch.zeros_like(mask), mask, settings)
    for tensor, wanted in zip(actual, estimators.estimate(rows, settings)):
        assert tensor.dtype == torch.float32 and not tensor.requires_grad
        torch.testing.assert_close(tensor * mask, padded(wanted), rtol=2e-5, atol=2e-4 if offset else 1e-6)
        assert tensor.shape == mask.shape
    assert not (actual[0] * (1 - mask)).any(), "advantages stand on actions alone"


def test_rewards_that_differ_by_rounding_have_no_advantage() -> None:
    settings = PPOConfig(estimator="grpo", completions_per_prompt=2)
    earned = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.1, 0.2]])
    actual, _ = advantages.grpo(earned, torch.zeros(2, 3), torch.ones(2, 3), settings)
    assert actual.abs().max() < 1e-2


@pytest.mark.parametrize("loss_mean", ["token", "sequence", "constant"])
def test_loss_mean_is_the_loops_for_any_division_of_rows(loss_mean: Any) -> None:
    values, longest = rewards(2), 7
    shares = estimators.shares(LENGTHS, loss_mean, longest)
    wanted = sum(share * value for share, row in zip(shares, values) for value in row)
    tokens, sequences = torch.tensor(float(sum(LENGTHS))), torch.tensor(float(len(LENGTHS)))
    actual = 0.0
    for start in (0, 3):
        part = values[start : 3 if start == 0 else None]
        mask = padded([[1.0] * len(row) for row in part])
        weights = token_weights(mask, loss_mean, tokens=tokens, sequences=sequences, longest=longest)
        actual += masked_mean(padded(part, 99.0), weights, tokens).item()
    assert actual == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_entry_names_a_function_and_keys_of_ppo(name: str) -> None:
    entry = ESTIMATORS[name]
    assert callable(getattr(advantages, entry.function))
    assert set(entry.keys) <= set(PPOConfig.model_fields)
    assert entry.group_size >= entry.min_group_size
    assert name in (PPOConfig.model_fields["estimator"].description or "")


def test_the_papers_settings() -> None:
    """RLOO: a sum over tokens, the KL in the reward. GRPO: k3 in the loss, a mean over sequences. Neither whitens."""
    rloo, grpo, plus = (PPOConfig(estimator=name).method for name in ("rloo", "grpo", "reinforce++"))
    assert (rloo.kl_in, rloo.kl_estimator, rloo.loss_mean, rloo.whiten_advantages) == (
        "reward",
        "k1",
        "constant",
        False,
    )
    assert (grpo.kl_in, grpo.kl_estimator, grpo.loss_mean, grpo.whiten_advantages) == ("loss", "k3", "sequence", False)
    assert (plus.kl_in, plus.kl_estimator, plus.loss_mean, plus.whiten_advantages) == ("reward", "k1", "token", True)
    assert [entry.critic for entry in (rloo, grpo, plus)] == [False] * 3
