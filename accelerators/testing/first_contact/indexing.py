"""Operators that sampling and losses apply to logits and to int64: plain, and as the backend records or compiles them.

Logits are distinct, so every index has one right value, and the device must give the CPU's numbers exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerators.errors import CaptureError, describe_error
from accelerators.testing.reference import difference

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

Inputs = Mapping[str, Tensor]

CALLS = 3
"""Calls of a recorded operator, each with other inputs: the first may run unrecorded, and the second records."""

OPERATORS: Mapping[str, Callable[[Inputs], tuple[Tensor, ...]]] = {
    "argmax": lambda x: (x["logits"].argmax(-1),),
    "argsort of int64": lambda x: (x["order"].argsort(-1),),
    "comparison and where": lambda x: (torch.where(x["ids"] > 7, x["ids"], -1),),
    "cumsum of int64": lambda x: (x["ids"].cumsum(-1),),
    "gather from int64": lambda x: (x["ids"].gather(-1, x["columns"]),),
    "gather from int32": lambda x: (x["ids"].int().gather(-1, x["columns"]),),
    "gather from logits": lambda x: (x["logits"].gather(-1, x["ids"]),),
    "index_copy": lambda x: (x["ids"].index_copy(1, x["column"], x["token"]),),
    "index_select": lambda x: (x["ids"].index_select(1, x["columns"][0]),),
    "isin": lambda x: (torch.isin(x["ids"], x["ends"]),),
    "masked maximum": lambda x: ((x["columns"] * (x["ids"] > 3)).argmax(-1, keepdim=True),),
    "nextafter": lambda x: (torch.nextafter(x["sums"], torch.zeros_like(x["sums"])),),
    "scatter_add": lambda x: (torch.zeros_like(x["ids"]).scatter_add(-1, x["columns"], x["ids"]),),
    "searchsorted": lambda x: (torch.searchsorted(x["sums"], x["targets"], right=True),),
    "sort": lambda x: tuple(x["logits"].sort(-1, descending=True)),
    "topk": lambda x: tuple(x["logits"].topk(50, -1)),
    "topk of the whole vocabulary": lambda x: tuple(x["logits"].topk(x["logits"].shape[-1], -1)),
}
"""Functions of the inputs; each output has the same shape in every call."""

UNRECORDED = {
    "argsort of int64",
    "cumsum of int64",
    "gather from int64",
    "index_select",
    "masked maximum",
    "scatter_add",
    "sort",
}
"""Operators that recorded steps do without, because devices may refuse to record them: these are not recorded here."""

UNUSED = {"gather from int64", "scatter_add"}
"""Operators on int64 that rlhf does without, because devices may not have them: the report names failures."""


def compare(accelerator: Accelerator, *, full: bool) -> dict[str, Any]:
    """Compare operators plain and, but for `UNRECORDED`, through `Accelerator.capture`; return how they were run."""
    vocabulary = 128_256 if full else 1_000
    calls = [_inputs(vocabulary, seed) for seed in range(CALLS)]
    capture = accelerator.kernels.capabilities()["graph_capture"]
    before = accelerator.compilations()
    lacking = {}
    for name, function in OPERATORS.items():
        expected = [function(inputs) for inputs in calls]
        try:
            for inputs, outputs in zip(calls, expected):
                _assert_equal(f"{name}, plain", function(accelerator.to_device(inputs)), outputs)
        except (AssertionError, RuntimeError) as error:
            if name not in UNUSED:
                raise
            lacking[name] = describe_error(error)
        if name in UNRECORDED:
            continue
        what = f"{name}, through capture ({capture.implementation or 'plain'})"
        for results, outputs in zip(_captured(what, accelerator, function, calls), expected):
            _assert_equal(what, results, outputs)
    large = torch.tensor([2**40 + 1])
    after = accelerator.compilations()
    return {
        "operators": len(OPERATORS) - len(lacking),
        "lacking": lacking,
        "vocabulary": vocabulary,
        "capture": capture.implementation or capture.reason,
        "compilations": None if after is None or before is None else after - before,
        "int64 beyond 32 bits": torch.equal((accelerator.to_device(large) + 1).cpu(), large + 1),
    }


def _inputs(vocabulary: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = 8, 64
    order = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(rows)])
    sums = torch.rand(rows, vocabulary, generator=generator).double().cumsum(-1)
    return {
        "logits": order.float() / vocabulary * 20 - 10,  # distinct: float32 has more numbers than a vocabulary
        "order": order,
        "ids": torch.randint(vocabulary, (rows, tokens), generator=generator),
        "columns": torch.stack([torch.randperm(tokens, generator=generator) for _ in range(rows)]),
        "column": torch.randint(tokens, (1,), generator=generator),
        "token": torch.randint(vocabulary, (rows, 1), generator=generator),
        "ends": torch.randint(vocabulary, (3,), generator=generator),
        "sums": (sums / sums[:, -1:]).float(),
        "targets": torch.rand(rows, 1, generator=generator),
    }


def _captured(
    what: str,
    accelerator: Accelerator,
    function: Callable[[Inputs], tuple[Tensor, ...]],
    calls: list[dict[str, Tensor]],
) -> list[tuple[Tensor, ...]]:
    """Return the results of recorded calls; a recording reads its inputs where they were when it was made."""
    fixed = accelerator.to_device(calls[0])
    captured = accelerator.capture(lambda: function(fixed), key=what)
    results = []
    with torch.no_grad():
        for inputs in calls:
            for name, tensor in accelerator.to_device(inputs).items():
                fixed[name].copy_(tensor)
            try:
                results.append(tuple(output.clone() for output in captured()))
            except CaptureError as error:
                raise AssertionError(f"{what}: {error}") from error
    return results


def _assert_equal(what: str, results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for place, (result, right) in enumerate(zip(results, expected, strict=True)):
        on_host = result.cpu()
        assert on_host.dtype == right.dtype, f"{what}: output {place} is {on_host.dtype}, expected {right.dtype}"
        wrong = (on_host != right).float().mean().item()
        assert wrong == 0, (
            f"{what}: {wrong:.1%} of output {place} differ from the CPU's, by {difference(on_host, right):.2g} of the "
            "largest number"
        )
