"""Fused kernels are compared with their definitions, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accelerators import RealTokens, register_attention
from rlhf.lockstep.kernels import attend_exactly, judge_kernels, update_exactly

Blamed = list[tuple[Any, ...]]


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, 6, 8, generator=random) for heads in (4, 2, 2))


def left_padded() -> torch.Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[1, :, :, :2] = False
    return mask


def test_attention_equals_pytorchs_in_float64(inputs: tuple[torch.Tensor, ...]) -> None:
    query, key, value = (part.double() for part in inputs)
    mask = left_padded()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    result, seen = attend_exactly(query, key, value, mask, True, None)
    assert seen[1, :2].sum() == 0 and seen.sum() == 4 * 10
    assert torch.allclose(torch.where(seen, result, 0.0), torch.where(seen, expected.transpose(1, 2), 0.0))


def attend(drop: bool) -> Callable[..., Any]:
    def function(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        part = None if drop else mask
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value, part, enable_gqa=True)
        return result.transpose(1, 2), None

    return function


@pytest.mark.parametrize("drop", [False, True])
def test_attention_without_its_mask_is_blamed(
    inputs: tuple[torch.Tensor, ...], drop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "mine", attend(drop))
    blamed: Blamed = []
    with judge_kernels({"mine"}, lambda *fault: blamed.append(fault)):
        ALL_ATTENTION_FUNCTIONS["mine"](None, *inputs, left_padded())
    assert [fault[0] for fault in blamed] == (["attention (mine)"] if drop else [])


@pytest.mark.parametrize("drop", [False, True])
def test_attention_of_real_tokens_is_judged_in_the_rows_of_its_mask(
    inputs: tuple[torch.Tensor, ...], drop: bool
) -> None:
    name = register_attention(f"of-real-tokens-{drop}", attend(drop), takes_real_tokens=True)
    # left_padded() pads the second row's start; here the first row's end is padding too.
    tokens = RealTokens(torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]))
    heads = [tokens.select(part.transpose(1, 2)).transpose(1, 2) for part in inputs]
    blamed: Blamed = []
    with judge_kernels({name}, lambda *fault: blamed.append(fault)):
        ALL_ATTENTION_FUNCTIONS[name](None, *heads, left_padded(), real_tokens=tokens)
    assert [fault[0] for fault in blamed] == ([f"attention ({name})"] if drop else [])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_update_equals_torchs_adamw(weight_decay: float) -> None:
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.8, 0.9), weight_decay=weight_decay)
    for step in range(3):
        weight.grad = torch.randn(5, dtype=torch.float64)
        state = optimizer.state.get(weight, {})
        known = [state[name].clone() if state else None for name in ("exp_avg", "exp_avg_sq")]
        after, before = update_exactly(weight.detach().clone(), weight.grad, *known, step, optimizer.param_groups[0])
        optimizer.step()
        assert torch.allclose(weight, after, rtol=1e-12)
        assert not torch.equal(after, before)


@pytest.mark.parametrize("beta", [0.9, 0.99])
def test_optimizer_with_another_beta_is_blamed(beta: float) -> None:
    class Mine(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            group = self.param_groups[0]
            given, group["betas"] = group["betas"], (beta, 0.999)
            super().step()
            group["betas"] = given

    torch.optim.AdamW([torch.zeros(1)])  # the first object of a class lets its step call the hooks, below Mine's
    weight = torch.nn.Parameter(torch.randn(5))
    optimizer, blamed = Mine([weight], lr=0.01, betas=(0.9, 0.999)), []
    with judge_kernels(set(), lambda *fault: blamed.append(fault)):
        for _ in range(2):
            weight.grad = torch.randn(5)
            optimizer.step()
    # The first step starts from no moments, and is the same with every beta.
    assert {fault[0] for fault in blamed} == (set() if beta == 0.9 else {"adamw (Mine)"})


def test_optimizer_that_divides_the_gradients_is_not_blamed() -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    optimizer, blamed = torch.optim.AdamW([weight], lr=0.01, fused=True), []
    with judge_kernels(set(), lambda *fault: blamed.append(fault)):
        for divisor in (1.0, 3.0):
            weight.grad = torch.randn(5)
            optimizer.grad_scale = torch.tensor(divisor)
            optimizer.step()
    assert not blamed
