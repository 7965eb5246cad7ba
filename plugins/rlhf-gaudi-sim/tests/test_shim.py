"""What the shim answers in the place of Gaudi's bridge, as rlhf and DeepSpeed ask it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from simulated import core

hpu = core.hpu
HPU = torch.device("hpu")


@pytest.fixture(autouse=True)
def _own_graph() -> Iterator[None]:
    core.mark_step()
    yield
    core.mark_step()


def compilations() -> int:
    from habana_frameworks.torch.hpu.metrics import metric_global

    metric = metric_global("graph_compilation")
    assert metric is not None
    stats = dict(metric.stats())
    assert set(stats) == {"TotalNumber", "TotalTime", "AvgTime"}
    return int(stats["TotalNumber"])


# the device


def test_torch_knows_the_device_by_this_module() -> None:
    assert torch.hpu is hpu
    assert torch.get_device_module("hpu") is hpu
    assert torch.accelerator.current_accelerator() == HPU
    assert hpu.is_available()
    assert hpu.device_count() == 8
    assert hpu.current_device() == 0
    hpu.synchronize()


def test_memory_shows_what_tensors_hold() -> None:
    before = hpu.memory_stats()
    block = torch.ones(1 << 20, device=HPU)
    with_block = hpu.memory_stats()
    assert with_block["InUse"] - before["InUse"] == block.nbytes
    assert with_block["MaxInUse"] >= with_block["InUse"] == hpu.memory_allocated() == hpu.memory_reserved()
    assert with_block["Limit"] == 96 << 30
    del block
    hpu.reset_peak_memory_stats()
    assert hpu.memory_stats()["MaxInUse"] == hpu.max_memory_allocated() == before["InUse"]


def test_random_numbers_of_the_device_have_a_state_of_their_own() -> None:
    hpu.random.manual_seed_all(7)
    assert hpu.random.initial_seed() == 7
    state = hpu.random.get_rng_state()
    first = torch.rand(8, device=HPU)
    torch.manual_seed(3)
    torch.rand(5)  # the host's generator
    second = torch.rand(8, device=HPU)
    hpu.random.set_rng_state(state)
    again = torch.rand(16, device=HPU)
    assert torch.equal(again, torch.cat([first, second]))


def test_streams_and_events() -> None:
    stream = hpu.Stream()
    assert isinstance(stream, torch.Stream)
    assert stream.device.type == "hpu"
    assert stream != hpu.default_stream()
    with hpu.stream(stream):
        assert hpu.current_stream() == stream
        begin, end = hpu.Event(enable_timing=True), hpu.Event(enable_timing=True)
        begin.record()
        torch.ones(300, 300, device=HPU) @ torch.ones(300, 300, device=HPU)
        end.record(stream)
    assert hpu.current_stream() == hpu.default_stream()
    stream.wait_stream(hpu.current_stream())
    stream.wait_event(end)
    stream.synchronize()
    end.synchronize()
    assert end.query()
    assert 0 < begin.elapsed_time(end) < 10_000


# lazy mode


def test_a_new_shape_compiles_and_a_known_one_does_not() -> None:
    def step(size: int) -> int:
        before = compilations()
        torch.ones(size, device=HPU).mul_(2)
        core.mark_step()
        return compilations() - before

    assert [step(size) for size in (31, 31, 37, 31, 37)] == [1, 0, 1, 0, 0]


def test_a_recording_replays_what_ran_and_nothing_of_python() -> None:
    total = torch.zeros(3, device=HPU)
    calls = []
    graph = hpu.HPUGraph()
    with hpu.graph(graph, stream=hpu.default_stream()):
        calls.append("once")
        total.add_(1)
    for _ in range(3):
        graph.replay()
    assert total.tolist() == [4.0, 4.0, 4.0]
    assert calls == ["once"]


def test_the_device_cannot_be_waited_for_in_a_recording() -> None:
    with pytest.raises(RuntimeError, match="cannot be waited for"), hpu.graph(hpu.HPUGraph()):
        hpu.synchronize()
    hpu.synchronize()


def test_a_recording_that_was_never_made_cannot_be_replayed() -> None:
    with pytest.raises(RuntimeError, match="nothing has been recorded"):
        hpu.HPUGraph().replay()


PROGRAM = """
import gaudi_sim.plugin, sys, torch
from habana_frameworks.torch.core import mark_step

def step_boundary(tag): mark_step()

def run():
    for turn in range(2):
        x = torch.ones(4, device="hpu")
        step_boundary("toy/before-forward")
        loss = (x * 2).sum()
        if len(sys.argv) > 1 and turn:
            loss.item()  # a read inside a step
        step_boundary("toy/backward")
        loss.item()  # a read in the update, which is DeepSpeed's
        step_boundary("toy/step")
        print(loss.item())  # a read between steps
    mark_step()

run()
"""
READ = next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if "inside a step" in line)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def report_of(python: Run, program: Path, *arguments: str) -> dict[str, Any]:
    path = program.with_name("report.json")
    done = python(str(program), *arguments, strict=False, env={"RLHF_GAUDI_SIM_REPORT": str(path)})
    assert (done.returncode, done.stdout) == (0, "8.0\n8.0\n"), done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_the_report_has_compilations_and_hits_by_boundary(python: Run, program: Path) -> None:
    report = report_of(python, program)
    assert report["simulation"] == "rlhf-gaudi-sim 0.1.0"
    assert report["lazy"]
    assert not report["strict"]
    assert report["tags"]["toy/backward"] == {"compilations": 1, "hits": 1, "breaks": 0}
    assert all(event["kind"] == "compilation" or not event["in_step"] for event in report["events"])


def test_the_report_names_the_line_that_reads_inside_a_step(python: Run, program: Path) -> None:
    report = report_of(python, program, "read")
    (event,) = (event for event in report["events"] if event["kind"] == "break" and event["in_step"])
    assert event["line"] == f"{program}:{READ}"
    assert report["tags"]["toy/backward"]["breaks"] == 1


def test_strict_mode_refuses_reads_inside_a_step_only(python: Run, program: Path) -> None:
    strict = {"RLHF_GAUDI_SIM_STRICT": "1"}
    done = python(str(program), env=strict)
    assert (done.returncode, done.stdout) == (0, "8.0\n8.0\n"), done.stderr
    done = python(str(program), "read", env=strict)
    assert done.returncode
    assert f"{program}:{READ}" in done.stderr.splitlines()[-1]


# eager mode

EAGER = """
import gaudi_sim.plugin, torch
import habana_frameworks.torch.core as core
from habana_frameworks.torch.hpu.metrics import metric_global
from habana_frameworks.torch.utils.internal import is_lazy
assert not is_lazy()
assert not hasattr(core.hpu, "HPUGraph")
compiled = lambda: dict(metric_global("graph_compilation").stats())["TotalNumber"]
core.mark_step()
double = torch.compile(lambda x: x * 2, backend="hpu_backend", dynamic=False)
counts = []
for size in (2, 2, 3, 2):
    assert double(torch.ones(size, device="hpu")).tolist() == [2.0] * size
    counts.append(compiled())
assert counts == [1, 1, 2, 2], counts
x = torch.ones(2, device="hpu", requires_grad=True)
double(x).sum().backward()  # a graph of the forward pass, and one of the backward pass
assert compiled() == 4 and x.grad.tolist() == [2.0, 2.0]
event = gaudi_sim.report()["events"][1]
assert event["line"] == "<string>:13", event
assert event["difference"] == "input 0 is [3] float32, was [2] float32", event
"""


@pytest.mark.parametrize("variable", [None, "", "0", "1"])
def test_mode_is_eager_unless_lazy_is_asked_for(python: Run, variable: str | None) -> None:
    change = "del os.environ[name]" if variable is None else f"os.environ[name] = {variable!r}"
    code = f"import os; name = 'PT_HPU_LAZY_MODE'; {change}; from gaudi_sim.accounting import is_lazy; print(is_lazy())"
    assert python("-c", code).stdout.strip() == str(variable == "1")


def test_eager_mode_counts_the_graphs_of_torch_compile(python: Run) -> None:
    done = python("-c", EAGER, fresh=True, eager=True)
    assert done.returncode == 0, done.stderr


FUSED_KERNELS = """
import gaudi_sim.plugin, torch
from habana_frameworks.torch.hpex.normalization import FusedClipNorm
from habana_frameworks.torch.hpex.optimizers import FusedAdamW

def launches(count):
    weights = [torch.ones(3, device="hpu", requires_grad=True) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones(3, device="hpu")
    optimizer, clipper = FusedAdamW(weights), FusedClipNorm(weights, 1.0)
    before = gaudi_sim.report()["counts"]["single"]
    clipper.clip_norm(weights)
    optimizer.step()
    return gaudi_sim.report()["counts"]["single"] - before

assert launches(1) == launches(20), (launches(1), launches(20))
"""


def test_eager_mode_launches_a_fused_kernel_once_for_all_parameters(python: Run) -> None:
    done = python("-c", FUSED_KERNELS, fresh=True, eager=True)
    assert done.returncode == 0, done.stderr


# fused kernels


def test_fused_adamw_is_adamw_and_compiles_once() -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    torch.manual_seed(0)
    expected = torch.randn(5, 3)
    actual = expected.to(HPU)
    pairs = [(actual, FusedAdamW([actual], **settings)), (expected, torch.optim.AdamW([expected], **settings))]
    compiled = []
    for step in range(6):
        gradient = torch.randn(5, 3)
        for parameter, optimizer in pairs:
            parameter.grad = gradient.to(parameter.device)
            core.mark_step()
            optimizer.step()
        core.mark_step()
        compiled.append(compilations())
        torch.testing.assert_close(actual.cpu(), expected, msg=f"after step {step + 1}")
    assert len(set(compiled[2:])) == 1


def test_fused_adamw_omits_a_group_without_gradients() -> None:
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    weight = torch.ones(2, device=HPU)
    FusedAdamW([weight]).step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_fused_clip_norm_is_clip_grad_norm(max_norm: float) -> None:
    from habana_frameworks.torch.hpex.normalization import FusedClipNorm

    expected = [torch.ones(3), torch.ones(2, 2)]
    for place, parameter in enumerate(expected):
        parameter.grad = torch.full_like(parameter, place + 1.0)
    actual = [copy.deepcopy(parameter).to(HPU) for parameter in expected]
    for own, other in zip(actual, expected):
        own.grad = other.grad.to(HPU)
    norm = FusedClipNorm(actual, max_norm).clip_norm(actual)
    assert norm.shape == (1,)
    torch.testing.assert_close(norm.cpu().squeeze(), torch.nn.utils.clip_grad_norm_(expected, max_norm))
    for own, other in zip(actual, expected):
        torch.testing.assert_close(own.grad.cpu(), other.grad)


@pytest.mark.parametrize("causal", [True, False])
def test_fused_sdpa_is_attention_with_grouped_heads(causal: bool) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = None if causal else torch.randn(2, 1, 5, 5)
    inputs = [None if tensor is None else tensor.to(HPU) for tensor in (query, key, value, mask)]
    actual = FusedSDPA.apply(*inputs, 0.0, causal, 0.3)
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, scale=0.3)
    torch.testing.assert_close(actual.cpu(), expected)


# DeepSpeed

TOUCH = """
import gaudi_sim.plugin, torch
from deepspeed.accelerator import get_accelerator
a = get_accelerator()
assert type(a).__name__ == "HPU_Accelerator" and a.is_available()
assert (a.device_name(), a.communication_backend_name(), a.device_count()) == ("hpu", "hccl", 8)
a.set_device(0); a.synchronize(); a.empty_cache()
assert a.current_device() == 0 and a.current_device_name() == "hpu:0"
a.manual_seed(3); a.manual_seed_all(3); state = a.get_rng_state(); x = torch.rand(3, device=a.device())
a.set_rng_state(state); assert torch.equal(x, torch.rand(3, device="hpu")); assert a.initial_seed() == 3
a.default_generator(0).manual_seed(3); assert torch.equal(x, torch.rand(3, device="hpu"))
with a.stream(a.Stream()): pass
assert a.current_stream() == a.default_stream()
begin, end = a.Event(enable_timing=True), a.Event(enable_timing=True)
begin.record(); end.record(); begin.elapsed_time(end)
for name in ("memory_allocated", "max_memory_allocated", "memory_cached", "max_memory_cached", "memory_reserved",
             "max_memory_reserved", "total_memory", "available_memory"):
    assert getattr(a, name)() >= 0, name
a.memory_stats(); a.reset_peak_memory_stats(); a.reset_max_memory_allocated(); a.reset_max_memory_cached()
assert a.supported_dtypes() == [torch.float, torch.bfloat16, torch.half]
graph = a.create_graph(); total = torch.zeros(2, device="hpu")
with a.capture_to_graph(graph): total.add_(1)
a.replay_graph(graph); assert total.tolist() == [2.0, 2.0]
for kind in ("BFloat16Tensor", "ByteTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor"):
    tensor = getattr(a, kind)([1, 2]); assert tensor.tolist() == [1, 2] and a.on_accelerator(tensor), kind
pinned = a.pin_memory(torch.ones(3)); assert a.is_pinned(pinned) and pinned.to("hpu").tolist() == [1.0] * 3
assert torch.are_deterministic_algorithms_enabled()
print("all of it")
"""


def test_everything_that_deepspeeds_own_accelerator_offers_works(python: Run) -> None:
    done = python("-c", TOUCH, loaded=True)
    assert done.stdout.endswith("all of it\n"), done.stderr
