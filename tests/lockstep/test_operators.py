"""The judge of operators names the operator that is wrong, and no operator that passes a wrong number on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.lockstep.operators import Fault, OperatorJudge
from rlhf.lockstep.places import Places
from rlhf.lockstep.rounding import base_name

Replace = Callable[..., Any]


class Faulty(TorchDispatchMode):
    """A device on which one operator is wrong."""

    def __init__(self, name: str, replace: Replace) -> None:
        super().__init__()
        self.name, self.replace = name, replace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if base_name(func) == self.name:
            return self.replace(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def judge(name: str, replace: Replace, run: Callable[[], object], synchronize: Any = lambda: None) -> list[Fault]:
    judge = OperatorJudge(Places(), synchronize)
    with Faulty(name, replace), judge:
        run()
    assert judge.number > 0 and not judge.not_judged
    return judge.faults


def layer(dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    """Return a step of a small network, forward and backward."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Embedding(19, 48),
        torch.nn.LayerNorm(48),
        torch.nn.Linear(48, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 19),
    ).to(dtype)
    ids = torch.randint(0, 19, (3, 7))

    def run() -> None:
        logits = network(ids).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.01)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_judge_correct_step_blames_nothing(dtype: torch.dtype) -> None:
    assert judge("", lambda func: None, layer(dtype)) == []


def test_judge_wrong_product_is_the_only_one_blamed() -> None:
    faults = judge("addmm", lambda func, *args: func(*args) * 1.001, layer())
    assert {fault.operator for fault in faults} == {"aten::addmm"}
    assert [fault.occurrence for fault in faults] == [0, 1]
    assert faults[0].kind == "wrong"
    assert faults[0].value == pytest.approx(1.001 * faults[0].truth)


def test_judge_wrong_backward_operator_has_the_place_of_its_forward() -> None:
    (fault,) = judge("gelu_backward", lambda func, *args, **options: func(*args, **options) + 1e-3, layer())
    assert (fault.operator, fault.backward) == ("aten::gelu_backward", True)


def test_judge_accumulation_in_bf16_is_blamed() -> None:
    def product(func: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(first.shape[0], second.shape[1], dtype=torch.bfloat16)
        for column in range(first.shape[1]):
            total += first[:, column : column + 1].bfloat16() * second[column : column + 1].bfloat16()
        return total.to(first.dtype)

    first, second = torch.randn(5, 128), torch.randn(128, 6)
    assert judge("mm", product, lambda: first @ second)
    assert judge("mm", product, lambda: first.bfloat16() @ second.bfloat16())


def test_judge_operator_that_changes_its_input_is_blamed() -> None:
    def spoil(func: Any, values: torch.Tensor) -> Any:
        result = func(values)
        values.zero_()
        return result

    (fault,) = judge("exp", spoil, lambda: torch.ones(3).exp())
    assert (fault.operator, fault.kind, fault.value, fault.truth) == ("aten::exp", "changed input", 0.0, 1.0)


def test_judge_result_that_is_right_after_a_wait_was_read_early() -> None:
    pending: list[torch.Tensor] = []

    def start(func: Any, values: torch.Tensor) -> torch.Tensor:
        pending.append(torch.zeros_like(values))
        return pending[-1]

    (fault,) = judge("exp", start, lambda: torch.ones(3).exp(), lambda: [result.fill_(math.e) for result in pending])
    assert (fault.operator, fault.kind) == ("aten::exp", "read early")


def test_judge_memory_that_changes_between_two_operators_is_blamed() -> None:
    values = torch.ones(3)

    def run() -> None:
        result = values.exp()
        result.numpy()[0] = 7.0  # behind the back of PyTorch
        result.sin()

    (fault,) = judge("", lambda func: None, run)
    assert (fault.operator, fault.kind, fault.value) == ("aten::sin", "changed between", 7.0)


def test_judge_memory_that_another_tensor_took_over_is_not_blamed() -> None:
    memory = bytearray(12)

    def run() -> None:
        torch.frombuffer(memory, dtype=torch.float32).fill_(2.0)
        memory[:] = bytes(12)
        torch.frombuffer(memory, dtype=torch.float32).cos()

    assert judge("", lambda func: None, run) == []


def test_judge_random_numbers_that_repeat_are_blamed() -> None:
    def repeat(func: Any, *args: Any, **options: Any) -> Any:
        return func(*args, **options).copy_(torch.linspace(0, 1, 100))

    (fault,) = judge("rand", repeat, lambda: (torch.rand(100), torch.rand(100)))
    assert (fault.operator, fault.kind) == ("aten::rand", "random")
    assert judge("", lambda func: None, lambda: (torch.rand(100), torch.rand(100), torch.randn(100).exp())) == []


def test_judge_number_beyond_the_range_of_fp16_may_overflow() -> None:
    large = torch.full((4,), 60000.0, dtype=torch.float16)
    assert judge("", lambda func: None, lambda: large * 2) == []
    (fault,) = judge("mul", lambda func, *args: func(*args) * float("inf"), lambda: large * 0.5)
    assert fault.value == float("inf") and fault.truth == 30000
