"""The check `operations` of certificates tries every implementation, and names the wrong one."""

from __future__ import annotations

from typing import Any

import torch

from accelerators import OPERATIONS, KernelImpl, Support
from accelerators.testing.numerics.operations import compare_operations, find_check


def test_every_operation_has_a_check() -> None:
    assert len({find_check(operation).name for operation in OPERATIONS}) == len(OPERATIONS)


def test_wrong_implementation_is_named_though_a_better_one_is_right(monkeypatch: Any) -> None:
    import accelerators
    from accelerators.testing.numerics import operations

    monkeypatch.setattr(operations, "OPERATIONS", {"adamw": None, "clip_grad_norm": None})
    accelerator = accelerators.select("cpu", environ={}).create()
    accelerator.bind(0)
    yes = Support(True, "for a test")
    slow = KernelImpl(
        operation="clip_grad_norm",
        name="lazy",
        factory=lambda _: lambda parameters, most: torch.tensor(1.0),
        supported=lambda _: yes,
        priority=-50,
    )
    accelerator.kernels.add([slow])
    facts = compare_operations(accelerator)
    assert [failure["operator"] for failure in facts["failures"]] == ["clip_grad_norm: lazy"]
    assert "the norm: differs by" in facts["failures"][0]["failure"]
    tried = {(entry["operation"], entry["implementation"]): entry["result"] for entry in facts["implementations"]}
    assert tried["clip_grad_norm", "torch"] == "passed" and tried["adamw", "torch-foreach"] == "passed"
    assert accelerator.kernels.candidates("clip_grad_norm")[0][0].name == "torch"
