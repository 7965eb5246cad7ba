"""Draws of the CPU are those of float64; draws with a fault are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.certify import sampling, verdicts
from rlhf.certify.golden import Quantity, Verdict
from rlhf.certify.sampling import SETTINGS, SLACK, VOCABULARY, Draws, compare_sampling, make_logits, measure
from rlhf.certify.trace import Name
from rlhf.config.schema import SamplingConfig


def test_logits_are_exact_in_float32_and_differ() -> None:
    logits = make_logits()
    assert torch.equal(logits, logits.float().double()) and len(set(logits.tolist())) == VOCABULARY


def test_cpu_draws_the_tokens_of_float64(accelerator: Any) -> None:
    found = compare_sampling(accelerator)
    assert found.keys() == SETTINGS.keys()
    assert max(max(draws) for draws in found.values()) < SLACK / 10


def test_measure_knows_a_distribution_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/4; with top-p 0.6 they are 2/3, 1/3, 0."""
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log() + torch.tensor([0, 1e-9, 0])
    uniform = torch.tensor([0.4, 0.6, 0.9], dtype=torch.float64)
    for config, tokens in ((SamplingConfig(), [0, 1, 2]), (SamplingConfig(top_p=0.6), [0, 0, 1])):
        drawn = torch.tensor(tokens)
        assert max(measure(logits, uniform, drawn, logits[drawn], config)) < 1e-8
    assert measure(logits, uniform, torch.tensor([0, 1, 1]), logits[[0, 1, 1]], SamplingConfig()).distance == (
        pytest.approx(0.15)
    )
    assert measure(logits, uniform, torch.tensor([0, 0, 2]), logits[[0, 0, 2]], SamplingConfig(top_p=0.6))[0] == (
        float("inf")
    )


FAULTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "one token is never drawn": lambda drawn, log_probs: (drawn - (drawn == 137).long(), log_probs),
    "ids of 512 and more wrap": lambda drawn, log_probs: (drawn % 512, log_probs),
    "an id outside of the vocabulary": lambda drawn, log_probs: (drawn + VOCABULARY - 1, log_probs),
    "log-probabilities are NaN": lambda drawn, log_probs: (drawn, log_probs * float("nan")),
    "numbers in half precision": lambda drawn, log_probs: (drawn, log_probs.half().float()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(accelerator: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda *given, **named: FAULTS[fault](*right(*given, **named)))
    assert max(compare_sampling(accelerator)["all tokens"]) > SLACK


def test_numbers_that_favor_a_part_are_found(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampling.sample
    monkeypatch.setattr(
        sampling, "sample", lambda logits, uniform, *given, **named: right(logits, uniform**1.01, *given, **named)
    )
    assert all(draws.distance > SLACK for draws in compare_sampling(accelerator).values())


def test_check_names_the_setting_and_keeps_the_others_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    quantity = Quantity(Name("rollout", "actor", "log-probability plus entropy"), "mean")
    found = {"all tokens": Draws(0.0, 1e-7), "top-k": Draws(0.02, 1e-7), "top-p": Draws(float("inf"), float("nan"))}
    monkeypatch.setattr(verdicts, "compare_sampling", lambda accelerator: found)
    monkeypatch.setattr(verdicts, "trace_steps", lambda side, steps: None)
    monkeypatch.setattr(verdicts, "judge_draws", lambda *arguments: Verdict(quantity, 0.1, 0.0, 0.5, "100 steps"))
    facts = verdicts.compare_draws(SimpleNamespace(accelerator=None), "fp32", 100)
    assert facts["failure"] == (
        "top-k: the draws are 0.02 from those in float64, more than 0.0001; "
        "top-p: the draws are inf from those in float64, more than 0.0001"
    )
    assert json.loads(json.dumps(facts, allow_nan=False))["tokens of fixed logits, from float64"] == (
        {"all tokens": 1e-7, "top-k": 0.02, "top-p": "inf"}
    )
