"""The level numerics: the CPU passes, a wrong operator of a device is named and no other, the list is not stale."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelerators.testing.numerics import compare_operators, entries, errors, inputs, replay
from accelerators.testing.numerics.entries import Call, Recorder, Spec
from tests.forks import Forks
from tests.helpers import mark_slow

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))
import operators

CALLS = list(entries.iterate_calls())
TABLE = errors.read_table()
CPU = torch.device("cpu")
WATCHED = {
    *("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten._softmax.default", "aten.masked_fill.Scalar"),
    *(
        "aten.gather.default",
        "aten.sum.dim_IntList",
        "aten.mul.Tensor",
        "aten.index_select.default",
        "aten.exp.default",
    ),
    *("aten.native_layer_norm.default", "aten.embedding.default", "aten.add_.Tensor", "aten.argmax.default"),
    *("aten.embedding_dense_backward.default", "aten.native_layer_norm_backward.default"),
    *("aten.silu.default", "aten.mean.dim", "aten.cumsum.default", "aten.where.self", "aten._to_copy.default"),
    entries.ATTENTION,
}


class Wrong(TorchDispatchMode):
    """Replaces the result of one operator."""

    def __init__(self, operator: str, change: Callable[..., Any]) -> None:
        super().__init__()
        self.operator, self.change = operator, change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == self.operator:
            return self.change(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def compare(monkeypatch: pytest.MonkeyPatch, mode: Wrong | None = None) -> list[replay.Comparison]:
    """Compare four calls of each watched operator on a device with a wrong one."""
    right = replay.run_on_device
    if mode is not None:

        def run(*arguments: Any) -> Any:
            with mode:
                return right(*arguments)

        monkeypatch.setattr(replay, "run_on_device", run)
    by_operator: dict[str, list[Call]] = {}
    for call in CALLS:
        if call.operator in WATCHED:
            by_operator.setdefault(call.operator, []).append(call)
    chosen = [
        one
        for calls in by_operator.values()
        for call in calls[:: -(-len(calls) // 4)]
        for one in replay.in_dtypes(call, (*HALF, torch.float64))
    ]
    return [one for call in chosen for one in replay.compare_call(call, CPU, TABLE[call.operator][call.dtype()])]


HALF = (torch.bfloat16,)


def test_cpu_is_within_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [comparison.describe() for comparison in compare(monkeypatch) if comparison.failed] == []


def sums_of_16_bits(func: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a product whose terms are added in bfloat16."""
    total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.bfloat16)
    for column in range(left.shape[1]):
        total = (total + (left[:, column, None] * right[None, column]).bfloat16()).bfloat16()
    return total.to(left.dtype)


def softmax_in_16_bits(func: Any, scores: torch.Tensor, dimension: int, half: bool) -> torch.Tensor:
    """Return softmax whose denominator is added in bfloat16."""
    powers = (scores - scores.amax(dimension, keepdim=True)).float().exp()
    total = torch.zeros_like(powers.select(dimension, 0), dtype=torch.bfloat16)
    for part in powers.unbind(dimension):
        total = (total + part).bfloat16()
    return (powers / total.float().unsqueeze(dimension)).to(scores.dtype)


LAST = torch.tensor(-1)


def lacking(func: Any, *arguments: Any, **options: Any) -> Any:
    raise NotImplementedError("not built")


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "float32 is rounded": ("aten.mm.default", lambda f, a, b: f(a.bfloat16(), b.bfloat16()).to(a.dtype)),
    "sums in bfloat16": ("aten.mm.default", sums_of_16_bits),
    "strides are ignored": (
        "aten.bmm.default",
        lambda f, a, b: f(a.as_strided(a.shape, torch.empty(a.shape).stride()), b),
    ),
    "a mask is dropped": ("aten.masked_fill.Scalar", lambda f, a, mask, value: a.clone()),
    "an empty row is NaN": (
        "aten._softmax.default",
        lambda f, a, *rest: f(a, *rest).masked_fill((a == 0).all(-1, keepdim=True), math.nan),
    ),
    "a masked row is not NaN": ("aten._softmax.default", lambda f, a, *rest: f(a, *rest).nan_to_num()),
    "off by one": ("aten.gather.default", lambda f, a, d, index: f(a, d, (index + 1).clamp_max(a.shape[d] - 1))),
    "wrong scale": ("aten.mul.Tensor", lambda f, a, b: f(a, b) * (1 + 2**-6)),
    "float16 overflows": ("aten.mm.default", lambda f, a, b: f(a, b).clamp(-65504, 65504)),
    "the last row is left out": (
        "aten.sum.dim_IntList",
        lambda f, a, *rest, **more: f(a.index_fill(0, LAST, 0), *rest, **more),
    ),
    "a row of a product is dropped": ("aten.mm.default", lambda f, a, b: f(a, b).index_fill(0, LAST, 0)),
    "softmax adds in bfloat16": ("aten._softmax.default", softmax_in_16_bits),
    "the gradient of an embedding lacks a row": (
        "aten.embedding_dense_backward.default",
        lambda f, gradient, *rest: f(gradient.index_fill(-2, LAST, 0), *rest),
    ),
    "a wrong epsilon": ("aten.native_layer_norm.default", lambda f, a, s, w, b, e: f(a, s, w, b, e * 100)),
    "an approximation": ("aten.silu.default", lambda f, a: a * (a.clamp(-3, 3) / 6 + 0.5)),
    "in place is not in place": ("aten.add_.Tensor", lambda f, a, b, **more: a + b),
    "lacking": ("aten.cumsum.default", lacking),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_operator_of_a_device_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    operator, change = FAULTS[fault]
    comparisons = compare(monkeypatch, Wrong(operator, change))
    facts = replay.summarize(comparisons)
    named = {failure["operator"]: failure["failure"] for failure in facts["failures"]}
    made_of_it = {entries.ATTENTION} if operator == "aten.bmm.default" else set()
    assert operator in named and named.keys() <= {operator} | made_of_it
    assert named[operator].startswith(f"{operator} in ")
    assert (fault == "lacking") == ("the device lacks it: NotImplementedError: not built" in str(facts["failures"]))


def test_every_call_survives_its_line() -> None:
    assert [call for call in CALLS if Call.decode(call.encode()) != call] == []


@pytest.mark.parametrize("granted", [replay.ALL_DTYPES, HALF, ()], ids=["all", "bfloat16 alone", "float32 alone"])
def test_every_recorded_operator_has_its_tolerances(granted: tuple[torch.dtype, ...]) -> None:
    lacking = {
        (one.operator, one.dtype())
        for call in CALLS
        for one in replay.in_dtypes(call, granted)
        if one.dtype() not in TABLE.get(one.operator, {})
    }
    assert lacking == set()


def test_table_has_recorded_operators_alone() -> None:
    assert TABLE.keys() == {call.operator for call in CALLS}


@pytest.mark.parametrize(("largest", "factor"), [(0.0, 0.0), (0.4, 4.0), (1.0, 4.0), (1.1, 8.0), (3.9, 16.0)])
def test_factor_is_four_times_the_largest_error_up_to_a_power_of_two(largest: float, factor: float) -> None:
    assert errors.derive_factor(largest, "float32") == factor


def test_factor_in_float64_is_not_measured_because_the_reference_is_the_same() -> None:
    assert errors.derive_factor(0.0, "float64") == errors.LEAST


def test_unit_of_a_product_grows_with_the_root_of_its_terms() -> None:
    """By hand: the spread of a product of ones with one change of sign each is about sqrt(n), in both arguments."""
    specs = tuple(Spec("float32", shape, None, "unit") for shape in ((8, 64), (64, 8)))
    call = Call("aten.mm.default", specs, {})
    ones = (torch.ones(8, 64), torch.ones(64, 8)), {}
    (reference,), _ = replay._refer(call, ones)
    (spread,) = replay._measure_spreads(call, ones, [reference], seed=0)
    assert reference is not None and spread is not None
    assert torch.equal(reference, torch.full((8, 8), 64.0, dtype=torch.float64))
    assert 0.8 * 2 * 8 < spread.mean() < 2 * 2 * 8
    off = errors.measure_error(call, torch.full((8, 8), 64.0 + 2**-10), reference, spread)
    eps = 2.0**-23
    assert off.units == pytest.approx(2**-10 / (eps * 64 + eps * 8 * float(spread.min())), rel=1e-3)


def test_sums_of_16_bit_numbers_are_judged_as_sums_in_float32() -> None:
    """By hand: 0.5 is the distance of 64 to the next number in bfloat16, one rounding; 64 terms allow no more."""
    specs = tuple(Spec("bfloat16", shape, None, "unit") for shape in ((8, 64), (64, 8)))
    reference, spread = torch.full((8, 8), 64.0, dtype=torch.float64), torch.full((8, 8), 16.0, dtype=torch.float64)
    result = torch.full((8, 8), 64.5, dtype=torch.bfloat16)
    off = errors.measure_error(Call("aten.mm.default", specs, {}), result, reference, spread)
    assert off.units == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("operator", "shapes", "elements", "length"),
    [
        ("aten.exp.default", [(4, 32)], 128, 1),
        ("aten.bmm.default", [(2, 3, 5), (2, 5, 7)], 42, 5),
        ("aten._grouped_mm.default", [(6, 5), (2, 5, 3), (2,)], 18, 5),
        ("aten.sum.default", [(4, 32)], 1, 128),
        ("aten.sum.dim_IntList", [(4, 32)], 4, 32),
        ("aten._softmax.default", [(4, 24, 24)], 4 * 24 * 24, 24),
    ],
)
def test_length_of_the_longest_sum(operator: str, shapes: list[tuple[int, ...]], elements: int, length: int) -> None:
    call = Call(operator, tuple(spec(*shape) for shape in shapes), {})
    assert errors.find_length(call, elements) == length


def test_recorder_sees_operators_shapes_strides_and_kinds_of_values() -> None:
    with Recorder() as recorder:
        scores = torch.zeros(2, 3).masked_fill(torch.tensor([True, False, False]), -torch.inf)
        scores.t() @ torch.ones(2, 4)
        torch.arange(3)[torch.tensor([2, 0])]
    calls = {call.operator: call for call in recorder.calls.values()}
    product, index = calls["aten.mm.default"], calls["aten.index.Tensor"]
    assert product.args == (Spec("float32", (3, 2), (1, 3), "unit-masked"), Spec("float32", (2, 4), None, "unit"))
    assert index.specs()[0].values == "integer-rising-distinct 0 2"
    assert index.specs()[1].values == "integer-distinct 0 2"


def test_calls_that_differ_in_sizes_are_reduced_to_the_largest_and_the_smallest() -> None:
    def line(rows: int, dim: int = 1) -> str:
        return Call("aten.sum.dim_IntList", (Spec("float32", (rows, 4), None, "any"), [dim]), {}).encode()

    kept = entries.reduce({line(2): 1, line(3): 2, line(5): 4, line(3, dim=0): 8})
    assert kept == {line(2): 7, line(5): 7, line(3, dim=0): 8}


def test_cases_are_as_they_are_named() -> None:
    call = Call("aten._softmax.default", (Spec("float32", (3, 4), None, "any-masked"), -1, False), {})
    (plain, *_), _ = inputs.draw_arguments(call, "plain", 0)
    (large, *_), _ = inputs.draw_arguments(call, "large", 0)
    (masked, *_), _ = inputs.draw_arguments(call, "masked", 0)
    (empty, *_), _ = inputs.draw_arguments(call, "empty", 0)
    (strided, *_), _ = inputs.draw_arguments(call, "strided", 0)
    assert torch.equal(large, plain * 1024) and torch.equal(strided, plain) and not strided.is_contiguous()
    assert masked[0].isneginf().all() and not masked[1, 1:].isneginf().any()
    assert not empty[0].any() and torch.equal(empty[1:], plain[1:])


def test_facts_of_a_device_name_dtypes_seed_and_table(monkeypatch: pytest.MonkeyPatch, accelerator: Any) -> None:
    monkeypatch.setattr(entries, "iterate_calls", lambda: iter(CALLS[:40]))
    published: list[dict[str, Any]] = []
    facts = compare_operators(accelerator, published.append)
    assert facts["failures"] == [] and facts["seed"] == 0 and "float32" in facts["dtypes"]
    assert facts["tolerances"] == {operator: TABLE[operator] for operator in facts["tolerances"]}
    assert published[0]["reached"].startswith("call 0 of ") and len(facts["worst"]) <= 25
    json.dumps(facts)


SOURCES = {name: name for name in operators.sources()}


RECORD = """
import json, sys
sys.path.insert(0, "ci")
import operators
print(json.dumps(operators.record_apart(sys.argv[1])[0]))
"""


@pytest.mark.parametrize("name", mark_slow(SOURCES, except_for={"Qwen3, fp32"}))
def test_list_is_what_a_source_calls_today(forks: Forks, name: str) -> None:
    """In a new process, as it is recorded: DeepSpeed replaces functions of torch at ZeRO 3, for all that follows."""
    document = json.loads(entries.DATA.read_text())
    if document["versions"] != operators.recorded_versions():
        pytest.skip(f"recorded with other versions: {document['versions']}")
    assert document["sources"] == list(SOURCES), "run python ci/operators.py --write"
    done = forks.python("-c", RECORD, name, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    calls = {line: Call.decode(line) for line in json.loads(done.stdout.splitlines()[-1])}
    new, gone = operators.find_stale(name, calls)
    assert (new, gone) == ([], []), "run python ci/operators.py --write"


def test_list_was_recorded_with_the_locked_versions() -> None:
    lock = (Path(__file__).parents[2] / "ci" / "lock" / "py311.txt").read_text()
    locked = dict(line.split(" ")[0].split("==") for line in lock.splitlines() if re.match(r"[\w.-]+==", line))
    recorded = json.loads(entries.DATA.read_text())["versions"]
    assert {name: locked[name] for name in ("transformers", "deepspeed")} == {
        name: recorded[name] for name in ("transformers", "deepspeed")
    }, "run python ci/operators.py --write"


def spec(*shape: int, dtype: str = "float32", values: str = "any", strides: tuple[int, ...] | None = None) -> Spec:
    return Spec(dtype, shape, strides, values)


def test_product_of_groups_is_compared_with_its_definition() -> None:
    """By hand: rows 0 and 1 belong to the first matrix, row 2 to the second."""
    left, right = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[10.0]], [[100.0]]])
    assert replay._multiply_groups(left, right, torch.tensor([2, 3])).flatten().tolist() == [10, 20, 300]
    turned = replay._multiply_groups(left.T, left, torch.tensor([2, 3]))
    assert turned.flatten().tolist() == [1 + 4, 9]


def test_output_that_is_missing_on_the_device_is_an_error() -> None:
    call = Call("aten.neg.default", (spec(2),), {})
    assert replay._compare(call, [None], [torch.ones(2)], [None], None).units == math.inf


def test_call_in_float64_becomes_one_in_float32_on_a_device_without() -> None:
    call = Call("aten._to_copy.default", (spec(2, dtype="float32"),), {"dtype": torch.float64})
    assert replay.in_dtypes(call, [torch.float64]) == [call]
    assert [one.kwargs["dtype"] for one in replay.in_dtypes(call, [])] == [torch.float32]


def test_recorder_keeps_calls_that_differ_in_a_dimension_only() -> None:
    """After `LOOKS` calls over one dimension, one over another is new."""
    ones = torch.ones(3, 3)
    with Recorder() as recorder:
        for dimension in (0, 0, 0, 0, 1):
            ones.sum(dimension)
    assert [call.args[1] for call in recorder.calls.values()] == [[0], [1]]
