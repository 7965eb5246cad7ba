"""What is counted as a graph, a compilation, a hit and a break, and the line that each is attributed to."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated import device

BEGUN = time.time()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    device.end_graph("before the test")
    device.reset()
    yield
    device.leave_step()


def line(offset: int) -> str:
    """The line of the caller, so many lines further."""
    frame = inspect.stack()[1]
    return f"{frame.filename}:{frame.lineno + offset}"


def graphs(function: Callable[..., Any], *calls: Any) -> dict[str, int]:
    """The counts after a graph of `function` for each of `calls`."""
    device.reset()
    for call in calls:
        function(call)
        device.end_graph("step")
    return {name: device.counts()[name] for name in ("compilations", "hits")}


def ones(*shape: int, **options: Any) -> torch.Tensor:
    tensor = torch.ones(*shape, device="hpu", **options)
    device.end_graph("input")
    return tensor


def last() -> dict[str, Any]:
    event = device.events()[-1]
    assert BEGUN <= event.pop("time") <= time.time()
    return event


def test_the_same_operators_are_compiled_once() -> None:
    x = ones(2, 3)
    assert graphs(lambda _: x.mul(2).sum(), 1, 2, 3) == {"compilations": 1, "hits": 2}
    assert device.counts()["graphs"] == 3
    assert device.counts()["operators"] == 6


def test_a_boundary_without_operators_is_no_graph() -> None:
    device.end_graph("step")
    device.end_graph("step")
    assert device.counts()["graphs"] == 0


X = torch.ones(4, 4)
SAME: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "another number in a sum": (lambda n: X.to("hpu") + n, 1.0, 2.0),
    "another number in addcdiv": (lambda n: X.to("hpu").addcdiv(X.to("hpu"), X.to("hpu"), value=n), 1.0, 2.0),
    "another bound": (lambda n: X.to("hpu").clamp(max=n), 1.0, 2.0),
    "other values": (lambda n: X.mul(n).to("hpu").exp(), 1.0, 2.0),
    "another state of the generator": (lambda n: torch.rand(3, device="hpu"), 1, 2),
}
OTHER: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "another shape": (lambda n: torch.zeros(n, device="hpu"), 3, 4),
    "another dtype": (lambda dtype: X.to("hpu", dtype).exp(), torch.float32, torch.bfloat16),
    "another layout": (lambda turned: (X.to("hpu").t() if turned else X.to("hpu")).exp(), False, True),
    "another dimension": (lambda dim: X.to("hpu").sum(dim), 0, 1),
    "another size of slices": (lambda n: X.to("hpu")[:n].exp(), 1, 2),
    "another offset": (lambda n: X.to("hpu")[n].exp(), 1, 2),
    "another number to fill with": (lambda n: torch.full((3,), n, device="hpu"), 1.0, 2.0),
    "an integer in place of a float": (lambda n: X.to("hpu") + n, 1, 1.0),
    "another operator": (lambda name: getattr(X.to("hpu"), name)(), "sin", "cos"),
    "one more operator": (lambda n: [X.to("hpu").exp() for _ in range(n)], 2, 3),
    "one less operator": (lambda n: [X.to("hpu").exp() for _ in range(n)], 3, 2),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_graph_in_spite_of(case: str) -> None:
    function, *calls = SAME[case]
    assert graphs(function, *calls) == {"compilations": 1, "hits": 1}


@pytest.mark.parametrize("case", OTHER)
def test_a_new_graph_because_of(case: str) -> None:
    function, *calls = OTHER[case]
    assert graphs(function, *calls) == {"compilations": 2, "hits": 0}


def test_a_graph_depends_on_which_tensors_its_operators_take() -> None:
    a, b = ones(3), ones(3)
    assert graphs(lambda other: a + other, a, b) == {"compilations": 2, "hits": 0}
    assert "takes other tensors" in last()["difference"]


def test_a_result_is_told_from_an_input() -> None:
    a, b = ones(3), ones(3)
    assert graphs(lambda chained: (a.exp() if chained else [a.exp(), b][1]).sin(), True, False)["compilations"] == 2


def test_tensors_in_other_memory_make_the_same_graph() -> None:
    assert graphs(lambda tensor: tensor.exp().sum(), ones(3), ones(3), ones(3)) == {"compilations": 1, "hits": 2}


def test_reading_between_graphs_does_not_change_them() -> None:
    x = ones(3)

    def step(_: int) -> None:
        total = x.sum()
        device.end_graph("sum")
        total.item()
        x.mul(total)

    assert graphs(step, 1, 2, 3) == {"compilations": 2, "hits": 4}


def test_compilation_names_line_and_operator_that_differs() -> None:
    for rows in (28, 31):
        x = ones(rows, 4)
        y = x.exp()
        y.add(x)
        device.end_graph("step")
    assert last() == {
        "kind": "compilation",
        "tag": "step",
        "line": line(-6),
        "operators": 2,
        "difference": f"operator 1 is aten::exp [31, 4] f32 at {line(-8)}, was [28, 4] f32 at the same place",
        "in_step": False,
    }


def test_the_first_graph_of_a_boundary_is_said_to_be_that() -> None:
    x = ones(3)
    x.exp()
    device.end_graph("forward")
    assert last()["line"] == line(-2)
    assert last()["difference"] == "the first graph of this boundary"


def test_a_graph_that_ends_early_names_what_is_missing() -> None:
    x = ones(3)
    for times in (2, 1):
        for _ in range(times):
            x.exp()
        device.end_graph("step")
    assert last()["line"] == line(-2)
    assert last()["difference"].startswith(
        "ends after 1 operators, where the nearest known graph goes on with aten::exp"
    )


def test_graphs_of_the_same_boundary_are_compared_first() -> None:
    x = ones(3)
    x.exp().sin().cos()
    device.end_graph("other")
    x.exp().tan()
    device.end_graph("step")
    x.exp().sin().cos().abs()
    device.end_graph("step")
    assert "is aten::sin [3] f32" in last()["difference"]
    assert "was aten::tan [3] f32" in last()["difference"]


@pytest.mark.parametrize("threads", [False, True])
def test_operators_of_backward_belong_to_the_calling_line(threads: bool) -> None:
    x = ones(3, requires_grad=True)
    x.exp().sum()
    device.end_graph("step")
    loss = x.exp().sum()
    with torch.autograd.set_multithreading_enabled(threads):
        loss.backward()
    device.end_graph("step")
    assert last()["line"] == line(-2)


def test_lines_of_libraries_are_passed_over() -> None:
    torch.nn.Linear(2, 2, device="hpu")
    device.end_graph("step")
    assert last()["line"] == line(-2)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).all()),
    "copy to the host": lambda x: x.exp().cpu(),
    "tolist": lambda x: x.exp().tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask as index": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x.clone()),
    "unique": lambda x: x.unique(),
    "repeats from a tensor": lambda x: torch.repeat_interleave(x, x.long()),
}


@pytest.mark.parametrize("case", READS)
def test_a_host_read_ends_the_graph(case: str) -> None:
    x = ones(3)
    READS[case](x)
    read, *_ = (event for event in device.events() if event["kind"] == "break")
    assert device.counts()["breaks"] >= 1
    assert read["tag"] == "host read"
    assert read["line"].startswith(f"{__file__}:")
    assert "reads values on the host" in read["difference"]


def test_a_host_read_names_its_line() -> None:
    x = ones(3)
    total = x.exp().sum()
    total.item()
    assert [event["line"] for event in device.events()[-2:]] == [line(-1), line(-2)]


def test_read_with_nothing_waiting_is_no_break_outside_a_step() -> None:
    x = ones(1)
    x.item()
    assert device.counts()["breaks"] == 0
    device.enter_step(strict=False)
    x.item()
    assert device.counts()["breaks"] == 1


NOT_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy to the device": lambda x: x.add(torch.ones(3).to("hpu")),
    "number of the host": lambda x: x.add(torch.tensor(2.0)),
    "integer index": lambda x: x[torch.zeros(2, dtype=torch.long, device="hpu")],
    "repeats of a known total": lambda x: torch.repeat_interleave(x, x.long(), output_size=3),
    "masks kept as values": lambda x: torch.where(x > 0, x, 0),
    "shape": lambda x: x.exp().shape,
}


@pytest.mark.parametrize("case", NOT_READS)
def test_is_no_host_read(case: str) -> None:
    NOT_READS[case](ones(3))
    assert device.counts()["breaks"] == 0


def test_the_report_survives_until_reset() -> None:
    ones(3).exp().sum().item()
    assert device.events()
    device.reset()
    assert device.events() == []
    assert set(device.counts().values()) == {0}


STRICT: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "mixed devices": (lambda x: x + torch.ones(3), "mixes tensors of the device and of the host; move them all to hpu"),
    "a float64 tensor": (lambda x: x.double(), "a float64 tensor on the device, which a Gaudi has not; use float32"),
    "a float64 factory": (lambda x: torch.zeros(2, dtype=torch.float64, device="hpu"), "float64"),
    "a host read": (lambda x: x.sum().item(), "reads values of the device on the host inside a step"),
    "a copy to the host": (lambda x: x.cpu(), "reads values of the device on the host inside a step"),
    "a mask as index": (lambda x: x[x > 0], "reads values of the device on the host inside a step"),
}


@pytest.mark.parametrize("case", STRICT)
def test_strict_mode_refuses_and_names_the_line(case: str) -> None:
    x = ones(3)
    function, message = STRICT[case]
    device.enter_step(strict=False)
    function(x)  # without strict mode it works
    device.enter_step(strict=True)
    with pytest.raises(RuntimeError) as error:
        function(x)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{__file__}:{function.__code__.co_firstlineno}: ")


def test_strict_mode_allows_host_numbers_and_reads_between_steps() -> None:
    x = ones(3)
    device.enter_step(strict=True)
    total = (x + torch.tensor(2.0)).sum()
    device.leave_step()
    assert total.item() == 9
    assert "device='hpu:0'" in repr(x)


def test_mixed_devices_are_counted() -> None:
    ones(3) + torch.ones(3)
    assert device.counts()["mixed"] == 1


class Recording:
    """A recording of what runs in the block."""

    def __enter__(self) -> Recording:
        device.capture_begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.handle = device.capture_end()

    def replay(self) -> None:
        device.replay(self.handle)


def test_a_replay_computes_into_the_same_tensors() -> None:
    x, counter, calls = ones(4), ones(1), []
    with Recording() as recording:
        calls.append("python")
        y = (x * 2)[1:]
        z = y.view(3, 1).sum(0)
        counter.add_(1)
        low, high = torch.stack([x, x * 3]).aminmax(dim=0)
    x.fill_(5)
    recording.replay()
    recording.replay()
    assert (z.item(), counter.item()) == (30, 4)
    assert y.tolist() == [10, 10, 10]
    assert (low.tolist(), high.tolist()) == ([5] * 4, [15] * 4)
    assert calls == ["python"]
    device.free(recording.handle)
    with pytest.raises(RuntimeError, match="there is no recording"):
        recording.replay()


def test_recording_keeps_its_memory_after_its_tensors_are_freed() -> None:
    x, total = ones(4), torch.zeros((), device="hpu")
    alias = x.detach()
    with Recording() as recording:
        total.copy_((x * 2).sum())
    x.data = torch.full((7,), 100.0, device="hpu")
    alias.fill_(3)
    recording.replay()
    assert total.item() == 24


def test_a_recording_holds_no_other_recording() -> None:
    with Recording() as recording, pytest.raises(RuntimeError, match="has begun already"):
        device.capture_begin()
    with Recording(), pytest.raises(RuntimeError, match="cannot be replayed inside a recording"):
        recording.replay()


def test_a_recording_is_compiled_once_and_its_replays_are_hits() -> None:
    x = ones(4)
    device.reset()
    for _ in range(2):
        with Recording() as recording:
            x.exp().sum()
        recording.replay()
    assert device.counts() == {
        "compilations": 1,
        "hits": 3,
        "breaks": 0,
        "operators": 8,
        "graphs": 4,
        "mixed": 0,
        "single": 0,
    }


def test_a_replay_draws_new_random_numbers() -> None:
    with Recording() as recording:
        x = torch.rand(8, device="hpu")
    first = x.tolist()
    recording.replay()
    assert x.tolist() != first


def test_a_training_step_can_be_recorded() -> None:
    weight = ones(3, requires_grad=True)
    weight.grad = ones(3)
    with Recording() as recording:
        weight.grad.zero_()
        weight.square().sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.25)
    recording.replay()
    assert weight.tolist() == [0.25] * 3


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x[x > 0]])
def test_a_host_read_in_a_recording_is_refused_with_its_line(read: Callable[[torch.Tensor], Any]) -> None:
    x = ones(3)
    with Recording(), pytest.raises(RuntimeError, match="inside a recording") as error:
        read(x)
    assert str(error.value).startswith(f"{__file__}:{read.__code__.co_firstlineno}: ")
