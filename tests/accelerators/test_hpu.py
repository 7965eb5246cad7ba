"""The Gaudi backend over an imitated bridge: which calls it makes. `test_hpu_kernels` has what they compute."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from accelerators import AcceleratorError, CaptureError, ShapePolicy
from accelerators.backends.hpu import backend
from accelerators.backends.hpu.info import Cards
from tests.accelerators import habana

MODES = {"lazy": True, "eager": False}


# placement


def test_rank_opens_a_card_and_gets_a_device_without_index(machine):
    hpu = machine()
    assert (hpu.shape_policy(), hpu.dist_backend()) == (ShapePolicy("static"), "hccl")
    assert hpu.bind(7) == hpu.device() == torch.device("hpu")
    assert hpu.bridge.calls == ["initialize_distributed_hpu", "init"]  # the card is chosen before it is opened


def test_more_ranks_than_cards_are_an_error(machine):
    hpu = machine(count=2)
    with pytest.raises(AcceleratorError, match="no device for local rank 2, this machine shows 2; start at most 2"):
        hpu.bind(2)
    assert hpu.bridge.calls == []


def test_card_in_use_is_an_error_with_cause_and_remedy(machine):
    with pytest.raises(
        AcceleratorError, match=r"Device already acquired.*hl-smi shows who uses it, and one process has"
    ):
        machine(free=False).bind(0)


@pytest.mark.parametrize(
    ("modules", "wish", "bridge", "opened"),
    [
        (("10", "2", "3"), None, "1", "3"),
        (("1", "0", "2"), None, "1", "1"),
        (("4", "5"), "5,4", "4", "4"),  # the bridge has read the user's list
        (("4", "5"), None, None, None),  # a single process: any free card
        ((), None, "1", "1"),
        (("", ""), None, "1", "1"),  # a driver that does not number them
    ],
)
def test_rank_opens_a_module_of_its_container(machine, monkeypatch, modules, wish, bridge, opened):
    for name, value in (("HABANA_VISIBLE_MODULES", wish), ("HLS_MODULE_ID", bridge)):
        monkeypatch.setenv(name, value or "")  # restored after the test
        if value is None:
            monkeypatch.delenv(name)
    hpu = machine()
    hpu._cards = Cards(max(len(modules), 2), "Gaudi2", habana.DRIVER, "hl-smi", modules)
    hpu.bind(1)
    assert os.environ.get("HLS_MODULE_ID") == opened


def test_operators_that_fail_under_another_driver_are_told_by_bind(machine, monkeypatch):
    monkeypatch.setattr("accelerators.backends.hpu.info.release", lambda: "1.22.1.6")
    with pytest.raises(AcceleratorError, match=r"runs no operator \(.*release 1.22, and the driver of 1.24: use"):
        machine().bind(0)  # torch has no device hpu here


def test_bridge_that_cannot_be_imported_is_an_error(machine, monkeypatch):
    hpu = machine()
    monkeypatch.delitem(sys.modules, "habana_frameworks.torch.distributed.hccl")
    with pytest.raises(AcceleratorError, match=r"cannot be imported \(ModuleNotFoundError.*use Intel's container for"):
        hpu.bind(0)


def test_lazy_mode_of_stock_torch_is_named(machine, monkeypatch):
    hpu = machine()

    def stock(module):
        raise AssertionError("Stock PyTorch version 2.11.0 is not supported in Lazy mode")

    monkeypatch.setattr(backend, "runtime", stock)
    words = r"has no lazy mode: unset PT_HPU_LAZY_MODE, or use Intel's image with its fork of torch$"
    with pytest.raises(AcceleratorError, match=words):
        hpu.bind(0)


def test_cards_driver_and_release_are_named(machine, monkeypatch, tmp_path):
    info = machine("Gaudi3", 4).info()
    assert (info.model, info.count) == ("Gaudi3", 4)
    assert habana.DRIVER in info.software and "release" not in info.software
    metadata = tmp_path / "habana_torch_plugin-1.24.1.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: 1.24.1.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert machine().info().software.endswith(f"driver {habana.DRIVER}, release 1.24.1.3")


# synchronization


@pytest.mark.parametrize(("mode", "marks"), [("lazy", ["mark_step", "mark_step"]), ("eager", [])])
def test_boundaries_flush_in_lazy_mode_only(machine, mode, marks):
    hpu = machine(lazy=MODES[mode])
    hpu.step_boundary("forward")
    hpu.step_boundary("backward")
    assert hpu.bridge.calls == marks
    assert hpu.is_lazy() is MODES[mode]
    hpu.synchronize()
    assert hpu.bridge.calls == [*marks, "synchronize"]


@pytest.mark.parametrize(
    ("stats", "count"),
    [
        ([("TotalNumber", 2), ("recipe", [("graph_1", 5), ("graph_2", 7)])], 2),
        ({"TotalNumber": 4}, 4),
        ([], None),
    ],
)
def test_compilations_are_the_runtimes_own_count(machine, stats, count):
    hpu = machine()
    hpu.bridge.stats = stats
    assert hpu.compilations() == count


def test_compilations_are_unknown_without_the_runtimes_count(machine, monkeypatch):
    hpu = machine()
    monkeypatch.setattr(sys.modules["habana_frameworks.torch.hpu.metrics"], "metric_global", lambda name: None)
    assert hpu.compilations() is None


def test_operators_on_the_host_are_the_runtimes_own_count(machine):
    assert machine().host_operators() == {"aten::digamma": 2, "aten::unique": 1}


# recordings


class Counter:
    """A step that works on tensors which it holds, as a decoder's does."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


@pytest.mark.parametrize("runs_what_it_records", [True, False])
def test_a_captured_step_is_replayed_exactly_once_a_call(machine, runs_what_it_records):
    hpu = machine(lazy=True, runs_what_it_records=runs_what_it_records)
    step = Counter()
    captured = hpu.capture(step, key="count")
    for calls in range(1, 6):
        assert torch.equal(captured(torch.ones(2)), torch.full((2,), 2.0 * calls))
        assert torch.equal(step.total, torch.full((2,), float(calls)))


def test_pending_work_is_flushed_before_a_recording_begins(machine, monkeypatch):
    hpu = machine(lazy=True)
    begin = habana.HPUGraph.capture_begin
    monkeypatch.setattr(
        habana.HPUGraph, "capture_begin", lambda self: (hpu.bridge.calls.append("capture_begin"), begin(self))
    )
    captured = hpu.capture(Counter(), key="count")
    captured(torch.ones(2))
    captured(torch.ones(2))
    assert hpu.bridge.calls[:2] == ["mark_step", "capture_begin"]


@pytest.mark.parametrize("mode", MODES)
def test_step_that_reads_values_is_refused(machine, mode):
    captured = machine(lazy=MODES[mode]).capture(lambda x: x * x.sum().item(), key="step")
    with pytest.raises(CaptureError, match="step reads values of the device on the host"):
        captured(torch.ones(2))


def test_bridge_without_a_compiler_records_nothing(machine, monkeypatch):
    hpu = machine()
    monkeypatch.setattr(torch.compiler, "list_backends", lambda exclude_tags: ["inductor"])
    assert "has not registered hpu_backend" in hpu.kernels.capabilities()["graph_capture"].reason
    assert hpu.capture(torch.neg, key="step")(torch.ones(1)) == -1


@pytest.mark.parametrize(
    ("mode", "used", "other", "reason"),
    [
        ("lazy", "hpu-graphs", "torch-compile", "exists in eager mode only"),
        ("eager", "torch-compile", "hpu-graphs", "exist in lazy mode only"),
    ],
)
def test_each_mode_has_its_recordings(machine, mode, used, other, reason):
    (best, support), (second, refusal) = machine(lazy=MODES[mode]).kernels.candidates("graph_capture")
    assert (best.name, support.ok) == (used, True)
    assert (second.name, refusal.ok) == (other, False)
    assert reason in refusal.reason


# precision


@pytest.mark.parametrize(
    ("wish", "dtype"),
    [("auto", torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)],
)
def test_precision_is_granted_on_gaudi2(machine, wish, dtype):
    precision = machine().precision(wish)
    assert (precision.dtype, precision.loss_scaling) == (dtype, wish == "fp16")
    assert precision.reason


@pytest.mark.parametrize(
    ("wish", "refusal"),
    [
        ("fp16", "the runtime says that Gaudi does not support it; use auto, bf16"),
        ("fp8", "'fp8': not known; use auto, bf16, fp16 or fp32"),
    ],
)
def test_precision_is_refused_on_the_first_gaudi(machine, wish, refusal):
    with pytest.raises(AcceleratorError, match=refusal):
        machine("Gaudi", fp16=False).precision(wish)


def test_fp16_is_refused_where_the_runtime_does_not_tell(machine, monkeypatch):
    hpu = machine()
    monkeypatch.delattr(sys.modules["habana_frameworks.torch.utils.experimental"], "_is_fp16_supported")
    with pytest.raises(AcceleratorError, match=r"does not say whether it supports fp16 \(AttributeError"):
        hpu.precision("fp16")


# memory and random numbers


def test_memory_is_the_runtimes(machine):
    hpu = machine()
    memory = hpu.memory()
    assert (memory.allocated, memory.peak, memory.total) == (5, 7, 96 << 30)
    hpu.reset_peak()
    assert hpu.bridge.calls == ["reset_peak_memory_stats"]


def test_the_cards_generator_is_seeded_and_survives_a_checkpoint(machine, tmp_path: Path):
    hpu = machine()
    hpu.seed(7)
    first = torch.rand(3, generator=hpu.bridge.generator)
    torch.save(hpu.rng_state(), tmp_path / "rng.pt")
    expected = torch.rand(3, generator=hpu.bridge.generator), torch.rand(3)
    hpu.seed(7)
    assert torch.equal(first, torch.rand(3, generator=hpu.bridge.generator))
    torch.rand(2, generator=hpu.bridge.generator), torch.rand(2)  # elsewhere than in the saved state
    hpu.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(expected[0], torch.rand(3, generator=hpu.bridge.generator))
    assert torch.equal(expected[1], torch.rand(3))


@pytest.mark.slow
def test_deepspeed_uses_its_own_hpu_accelerator(run_python):
    code = (
        "from tests.accelerators.habana import Bridge; Bridge().install()\n"
        "from accelerators.backends.hpu.backend import HPU; view = HPU().prepare_deepspeed()\n"
        "print(view.device, view.communication, *view.dtypes)"
    )
    done = run_python("-c", code, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.stdout.splitlines()[-1] == "hpu hccl float32 bfloat16 float16", done.stderr


# lack of memory


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::234881024 (224)MB"), True),
        (RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM\nPOOL:: Cannot obtain device memory size."), True),
        (RuntimeError("synStatus=4 [Out of Device memory (OOM)] Device acquire failed."), True),
        (RuntimeError("synLaunch failed: synOutOfDeviceMemory"), True),
        (RuntimeError("synLaunch failed: synOutOfHostMemory"), True),
        (MemoryError(), True),
        (RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM wrong pool strategy"), False),
        (RuntimeError("synStatus=8 [Device not found] Device acquire failed."), False),
        (KeyError("synOutOfDeviceMemory"), False),
    ],
)
def test_a_lack_of_memory_is_told_in_the_bridges_words(machine, error, lacking):
    assert machine().is_out_of_memory(error) is lacking


def test_zero_3_is_refused_in_lazy_mode_alone(machine):
    hpu = machine(lazy=True)
    assert [bool(hpu.refuse_zero_stage(stage)) for stage in range(4)] == [False, False, False, True]
    assert "unset PT_HPU_LAZY_MODE" in hpu.refuse_zero_stage(3)
    assert machine(lazy=False).refuse_zero_stage(3) == ""


def test_options_of_zero_are_those_of_intels_recipes(machine):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    options = machine().deepspeed_defaults()
    assert set(options.values()) == {False} and options.keys() <= DeepSpeedZeroConfig.model_fields.keys()
    assert "contiguous_gradients" in options
