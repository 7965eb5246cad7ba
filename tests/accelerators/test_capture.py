"""Functions that are captured: what a recording repeats, what it does not, and what cannot be recorded.

Recordings are made by `stand_in.record`, which repeats operators as a device's graph does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from accelerators import CaptureError
from accelerators.capture import Graph, checked
from accelerators.testing import stand_in

X = torch.tensor([1.0, 2.0])


def recorded(fn: Callable[..., Any]) -> Graph:
    """`fn` after the two calls with which a recording begins."""
    graph = Graph(fn, "step", stand_in.record)
    graph(X)
    graph(X)
    return graph


# what a recording repeats


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * 2 + 1,
        lambda x: (x[:1].expand(3) * x.sum(), {"max": x.max()}),
        lambda x: x.reshape(2, 1).mm(x.view(1, 2)).t().contiguous(),
        lambda x: torch.cat(x.split(1)).softmax(-1),
        lambda x: x.clone().add_(1).unsqueeze_(0).mul_(x),
        lambda x: torch.where(x > 1, x, torch.zeros_like(x)).sort(descending=True).indices,
        lambda x: torch.empty(2).copy_(x).relu_(),
        lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 2, 1)] * 3),
    ],
    ids=["arithmetic", "views", "matrix", "split", "in place", "select", "buffer", "attention"],
)
def test_a_replay_computes_what_the_function_does(fn):
    graph = recorded(fn)
    for x in (torch.tensor([3.0, 4.0]), torch.tensor([-1.0, 5.0])):
        torch.testing.assert_close(graph(x), fn(x), rtol=0, atol=0)


def test_tensors_that_the_function_holds_change_once_a_call():
    counter, history = torch.zeros(1, dtype=torch.long), torch.zeros(6)

    def step(x):
        history.index_copy_(0, counter, x.sum().view(1))
        counter.add_(1)

    graph = Graph(step, "step", stand_in.record)
    for value in range(6):
        graph(torch.full((2,), float(value)))
    assert counter.item() == 6
    assert history.tolist() == [0, 2, 4, 6, 8, 10]


def test_recording_that_runs_nothing_leaves_expanded_tensors_too():
    tape, column = stand_in.UndoableTape(), torch.ones(2, 1)
    with tape:
        product = column.expand(2, 3) * 2
    tape.undo()
    assert product.eq(0).all() and column.eq(1).all()
    tape.replay()
    assert product.eq(2).all()


# arguments and results belong to the caller


def test_results_are_not_overwritten_by_later_calls():
    buffer = torch.zeros(2)
    graph = Graph(lambda x: buffer.copy_(x), "step", stand_in.record)
    results = [graph(X * factor) for factor in (1, 2, 3, 4)]
    assert [result.tolist() for result in results] == [[1, 2], [2, 4], [3, 6], [4, 8]]


def test_returned_argument_is_no_part_of_the_recording():
    graph = recorded(lambda x: x)
    first = torch.tensor([5.0, 6.0])
    result = graph(first)
    graph(X)
    assert result.tolist() == first.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(3),), r"step: recorded for torch.float32 \(2,\), called with torch.float32 \(3,\)"),
        ((torch.ones(2, dtype=torch.long),), r"recorded for torch.float32 \(2,\), called with torch.int64 \(2,\)"),
        ((1.5,), r"recorded for torch.float32 \(2,\), called with 1.5"),
        ((X, X), "step: called with other arguments"),
        ((X, 3), "recorded for 2, called with 3"),
        ((X, 2.0), "recorded for 2, called with 2.0"),
    ],
)
def test_other_arguments_than_the_recorded_are_refused(arguments, message):
    scaled = len(arguments) > 1 and not isinstance(arguments[1], torch.Tensor)
    graph = Graph(lambda x, factor=1: x * factor, "step", stand_in.record)
    for _ in range(2):
        graph(*((X, 2) if scaled else (X,)))
    with pytest.raises(CaptureError, match=message):
        graph(*arguments)


def test_a_refused_call_changes_nothing():
    total = torch.zeros(2)
    graph = Graph(lambda x, y: total.add_(x).add_(y), "step", stand_in.record)
    graph(X, X)
    graph(X, X)
    with pytest.raises(CaptureError):
        graph(torch.full((2,), 100.0), torch.ones(3))
    assert torch.equal(graph(X, X), X * 6)


@dataclass
class Pair:
    first: torch.Tensor


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: Pair(x), "step returns a Pair; use tuples, lists or dicts of tensors"),
        (lambda x: x * torch.ones(2, requires_grad=True), "step returns a tensor with a gradient"),
    ],
)
def test_results_that_a_replay_could_not_renew_are_refused(fn, message):
    with pytest.raises(CaptureError, match=message):
        Graph(fn, "step", stand_in.record)(X)


# functions that wait for the device

WAITING = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: x if x.sum() > 0 else -x,
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "to the host": lambda x: torch.ones(2, device="meta").cpu(),
    "copied to the host": lambda x: torch.empty(2).copy_(torch.ones(2, device="meta")),
    "python list": lambda x: x[[0, 1]],
    "new tensor": lambda x: x + torch.tensor([1.0, 2.0]),
    "from the host": lambda x: x.to("meta"),
    "copied from the host": lambda x: torch.empty(2, device="meta").copy_(x),
}


@pytest.mark.parametrize("fn", WAITING.values(), ids=WAITING)
@pytest.mark.parametrize("wrap", [checked, lambda fn, key: Graph(fn, key, stand_in.record)], ids=["checked", "graph"])
def test_exchange_with_the_host_is_refused_with_its_line(fn, wrap):
    line = fn.__code__.co_firstlineno
    with pytest.raises(CaptureError, match=rf"step .*test_capture\.py:{line}\)"):
        wrap(fn, "step")(X)


def test_second_call_is_checked_only_if_it_is_recorded():
    calls = []

    def read_late(x):
        calls.append(0)
        return x.sum().item() if len(calls) % 2 == 0 else x

    graph, plain = Graph(read_late, "step", stand_in.record), checked(read_late, "step")
    graph(X)
    with pytest.raises(CaptureError, match="step reads values of the device on the host"):
        graph(X)
    plain(X)
    assert plain(X) == X.sum().item()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[torch.zeros(1, dtype=torch.long)],
        lambda x: x.repeat_interleave(torch.ones(2, dtype=torch.long), output_size=2),
        lambda x: x * torch.tensor(2.0),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.masked_fill(x > 1, 0.0),
    ],
    ids=["index", "repeat_interleave", "number", "cast", "mask"],
)
def test_what_does_not_wait_is_allowed(fn):
    assert torch.equal(checked(fn, "step")(X), fn(X))


def test_what_a_recording_fails_with_is_told_with_the_key():
    def failing(fn):
        raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")

    graph = Graph(lambda x: x, "step", failing)
    graph(X)
    with pytest.raises(CaptureError, match="step cannot be recorded: CUDA error: operation not permitted when stream"):
        graph(X)
