"""The comparisons of a first contact: the CPU passes, and each planted fault of a device is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from accelerators import AcceleratorError, CaptureError, register_attention
from accelerators.backends.cpu.backend import CPU
from accelerators.testing import COMPARISONS, compare_with_cpu
from accelerators.testing.first_contact import indexing
from rlhf.certify.decoding import FAMILIES, compare_decoding
from rlhf.certify.processes import CheckFailed
from tests.accelerators.broken import with_kernel
from tests.accelerators.fake_plugins import fast, raises
from tests.helpers import emulate_bf16


def moved(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the methods of a device to which tensors arrive changed."""
    return {"to_device": lambda self, batch: tree_map_only(Tensor, change, batch)}


class Device(Tensor):
    """A tensor of a device whose operators may have a fault."""

    fault: Callable[[Any, Any], Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.fault(func, super().__torch_function__(func, types, args, kwargs or {}))


def operators(fault: Callable[[Any, Any], Any]) -> dict[str, Any]:
    kind = type("Faulty", (Device,), {"fault": staticmethod(fault)})
    return moved(lambda tensor: tensor.clone().as_subclass(kind))


def garbage_of_topk(function: Any, result: Any) -> Any:
    return (result[0], result[1] * 0 - 2117107376) if function is Tensor.topk else result


def int32_of_cumsum(function: Any, result: Any) -> Any:
    return result.int() if function is Tensor.cumsum else result


def rounded_product(function: Any, result: Any) -> Any:
    return result.bfloat16().float() * 1.01 if function is Tensor.matmul or function is Tensor.__matmul__ else result


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **features: Any) -> Any:
    """As cuDNN's attention of pytorch #196678: gradients are not finite if there are 64 columns mod 128."""
    if query.shape[2] % 128 == 64:
        query = query * 1
        query.register_hook(lambda gradient: gradient * torch.nan)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return output.transpose(1, 2), None


def attend_to_padding(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **features: Any) -> Any:
    causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, causal, enable_gqa=True)
    return output.transpose(1, 2), None


def attend_wrongly_with_one_key_head(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **features: Any
) -> Any:
    """As torch's memory-efficient attention of pytorch #191937, at 1 mod 32 columns."""
    if key.shape[1] == 1 and key.shape[2] % 32 == 1:
        mask = mask.roll(1, -1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return output.transpose(1, 2), None


def with_attention(function: Any) -> dict[str, Any]:
    made = lambda accelerator: register_attention(function.__name__, function)  # noqa: E731
    kernel = fast("attention", None, factory=made)
    return {"kernel_implementations": lambda self: (*CPU.kernel_implementations(self), kernel)}


def repeats_the_first(self: Any, fn: Callable[[], Any], key: str) -> Callable[[], Any]:
    """A recording that replays the numbers of the step that it saw."""
    results: list[Any] = []

    def call() -> Any:
        results.append(results[0] if results else fn())
        return results[0]

    return call


@pytest.fixture
def device(created):
    """Create a CPU with a fault, and bind it."""

    def create(methods: dict[str, Any]) -> Any:
        accelerator = created(**methods)
        accelerator.bind(0)
        return accelerator

    return create


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_cpu_passes(device, comparison: str) -> None:
    assert compare_with_cpu(comparison, device({}), full=False)


def test_attention_in_bf16_is_within_its_tolerance(device) -> None:
    accelerator = device({})
    emulate_bf16(accelerator)
    refused = accelerator.precision
    accelerator.precision = lambda wish="auto": refused("bf16" if wish == "auto" else wish)
    facts = compare_with_cpu("attention", accelerator, full=False)
    assert facts["precision"] == "bf16"
    assert all(1e-3 < off < 0.02 for off in facts["differences"].values())


@pytest.mark.parametrize(
    ("comparison", "methods", "line"),
    [
        ("product", operators(rounded_product), "product of two 64 x 64 matrices in fp32: differs by 0.01"),
        ("product", moved(lambda x: x * (1 + 1e-5)), "factor 0 was changed on the device"),
        ("product", {"precision": raises(RuntimeError("synStatus 26"))}, "synStatus 26"),
        ("attention", with_attention(attend), "4/2 heads, 64 columns: gradient of .*not finite"),
        ("attention", with_attention(attend_to_padding), "4/2 heads, 64 columns: logits differ by"),
        ("attention", with_attention(attend_wrongly_with_one_key_head), "4/1 heads, 97 columns: logits differ by"),
        ("indexing", operators(garbage_of_topk), "topk, plain: 100.0% of output 1 differ"),
        (
            "indexing",
            operators(int32_of_cumsum),
            "cumsum of int64, plain: output 0 is torch.int32, expected torch.int64",
        ),
        ("indexing", {"capture": repeats_the_first}, r"argmax, through capture \(plain\): 100.0% of output 0 differ"),
        (
            "indexing",
            {"capture": lambda self, fn, key: raises(CaptureError("cpu fallback is not supported"))},
            "argmax, through capture .*: cpu fallback is not supported",
        ),
    ],
)
def test_fault_of_a_device_is_found(device, comparison: str, methods: dict[str, Any], line: str) -> None:
    with pytest.raises((AssertionError, AcceleratorError), match=line):
        compare_with_cpu(comparison, device(methods), full=False)


def test_operators_that_are_not_recorded_are_among_the_compared() -> None:
    assert indexing.OPERATORS.keys() > indexing.UNRECORDED > indexing.UNUSED


def test_operators_that_rlhf_does_without_may_be_lacking(device) -> None:
    def lacks(function: Any, result: Any) -> Any:
        if function is Tensor.gather and result.dtype == torch.int64:
            raise RuntimeError("gather of int64 cannot be compiled")
        return result

    facts = compare_with_cpu("indexing", device(operators(lacks)), full=False)
    assert facts["lacking"] == {"gather from int64": "RuntimeError: gather of int64 cannot be compiled"}
    assert facts["operators"] == len(indexing.OPERATORS) - 1


def test_cpu_decodes_the_same_tokens(device) -> None:
    facts = compare_decoding(device({}), full=False)
    for family in FAMILIES:
        assert facts[f"{family} in fp32"]["equal tokens"] == 1.0
        assert facts[f"{family} in fp32"]["recorded by"].startswith("nothing (operators run on the calling thread")


def stale_in_part(self: Any, fn: Callable[[], Any], key: str) -> Callable[[], Any]:
    """A recording whose every fifth replay does nothing."""
    calls = [0]

    def call() -> None:
        calls[0] += 1
        if calls[0] % 5:
            fn()

    return call


def refuse(self: Any, fn: Callable[[], Any], key: str) -> Any:
    raise CaptureError("operation not permitted when stream is capturing")


COUNTED = iter(range(10**6))
RECORDS = {"kernel_implementations": with_kernel("graph_capture", lambda fn, key: fn)["kernel_implementations"]}


@pytest.mark.parametrize(
    ("methods", "line"),
    [
        ({"capture": stale_in_part}, "llama in fp32: recorded steps drew tokens whose logits are"),
        (RECORDS | {"capture": refuse}, "llama in fp32: generation is slower than possible"),
        (RECORDS | {"compilations": lambda self: 7}, "llama in fp32: fast has recorded no step"),
        (RECORDS | {"compilations": lambda self: next(COUNTED)}, "more graphs for shapes that were known"),
        (with_attention(attend_to_padding), "llama in fp32: recorded steps drew tokens whose logits are"),
    ],
)
def test_fault_of_decoding_is_found(device, methods: dict[str, Any], line: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        compare_decoding(device(methods), full=False)
    assert line in str(failure.value)
    assert failure.value.facts["llama in fp32"]["tokens per second"]
