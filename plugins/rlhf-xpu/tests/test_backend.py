"""The backend with stand-ins for `torch.xpu`: no Intel GPU is used. Tensors of the kit's checks are on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rlhf_xpu.backend import XPU

from accelerators import Accelerator, AcceleratorError, CaptureError
from accelerators.testing import CHECKS
from accelerators.testing.stand_in import Streams, subject

CHIPS = {
    # name, bf16 conversions, fp16; A770 has no float64, which is not asked for
    "B580": ("Intel(R) Arc(TM) B580 Graphics", True, True),
    "A770": ("Intel(R) Arc(TM) A770 Graphics", True, True),
    "without bf16": ("a chip without bf16", False, True),
    "fp32 alone": ("a chip with fp32 alone", False, False),
}
GIB = 1 << 30


@pytest.fixture
def runtime(monkeypatch):
    """Let torch.xpu answer as on these chips, and return a list of the devices that were chosen."""

    def pretend(*chips: str) -> list[int]:
        calls: list[int] = []
        monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
        monkeypatch.setattr(torch.version, "xpu", "20260000")

        def properties(device) -> SimpleNamespace:
            name, bf16, fp16 = CHIPS[chips[getattr(device, "index", device) or 0]]
            uuid = f"868080e2-0000-0000-0300-00000000000{getattr(device, 'index', device) or 0}"
            facts = {"driver_version": "1.14.37020", "total_memory": 12 * GIB, "uuid": uuid}
            return SimpleNamespace(name=name, has_bfloat16_conversions=bf16, has_fp16=fp16, **facts)

        replaced = {
            "device_count": lambda: len(chips),
            "get_device_properties": properties,
            "set_device": lambda index: calls.append(index),
            "memory_allocated": lambda device: 3 * GIB,
            "max_memory_allocated": lambda device: 4 * GIB,
        }
        streams = Streams()
        for name, function in (replaced | streams.functions("XPUGraph")).items():
            monkeypatch.setattr(torch.xpu, name, function, raising=False)  # torch 2.9 has no graphs
        return calls

    return pretend


class OnCPU(XPU):
    """The backend whose tensors are on the CPU, which locks no pages."""

    def bind(self, local_rank: int) -> torch.device:
        super().bind(local_rank)
        return torch.device("cpu")

    def pins_memory(self) -> bool:
        return False

    mark = Accelerator.mark  # the CPU has no events


# placement


def test_rank_gets_the_device_of_its_number(runtime):
    calls = runtime("B580", "B580")
    backend = XPU()
    assert backend.bind(1) == backend.device() == torch.device("xpu", 1)
    assert calls == [1]
    assert (backend.dist_backend(), backend.deepspeed_name, backend.rng_module()) == ("xccl", "xpu", torch.xpu)


def test_more_ranks_than_devices_are_an_error_that_names_the_mask(runtime, monkeypatch):
    runtime("B580")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
    with pytest.raises(AcceleratorError, match=r"rank 1, this machine shows 1 \(ZE_AFFINITY_MASK=1\)"):
        XPU().bind(1)


def test_torch_without_xpu_is_refused():
    with pytest.raises(AcceleratorError, match="is built without XPU; install PyTorch's build for it"):
        XPU().bind(0)


def test_device_info_and_memory_are_the_runtimes(runtime):
    runtime("B580", "B580")
    backend = XPU()
    backend.bind(0)
    info, memory = backend.info(), backend.memory()
    assert (info.model, info.count) == ("Intel(R) Arc(TM) B580 Graphics", 2)
    assert info.software == f"torch {torch.__version__}, compute runtime 1.14.37020"
    assert [uuid[-1] for uuid in info.uuids] == ["0", "1"]
    assert (memory.allocated, memory.peak, memory.total) == (3 * GIB, 4 * GIB, 12 * GIB)


# precision


@pytest.mark.parametrize(
    ("chips", "name", "reason"),
    [
        (("B580",), "bf16", "native on every device"),
        (("A770",), "bf16", "native on every device"),
        (("B580", "without bf16"), "fp16", "native on every device; bf16: a chip without bf16 lacks it"),
        (("fp32 alone",), "fp32", "every Intel GPU has it"),
    ],
)
def test_the_weakest_device_decides_the_precision(runtime, chips, name, reason):
    runtime(*chips)
    precision = XPU().precision()
    assert precision.name == name and reason in precision.reason
    assert precision.loss_scaling == (name == "fp16")


def test_precision_that_a_device_lacks_is_refused_with_its_name(runtime):
    runtime("B580", "without bf16")
    with pytest.raises(AcceleratorError, match="bf16 on xpu: a chip without bf16 lacks it; use auto, fp16 or fp32"):
        XPU().precision("bf16")


def test_time_is_measured_by_events_of_the_device(runtime, monkeypatch):
    runtime("B580")
    backend, made = XPU(), []
    backend.bind(0)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1500.0)
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing: made.append((device, enable_timing)) or event)
    start = backend.mark()
    assert backend.mark().seconds_since(start) == 1.5
    assert made == [(torch.device("xpu", 0), True)] * 2


# lack of memory


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), True),
        (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 192.00 MiB."), True),
        (RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"), False),
    ],
)
def test_lack_of_memory_is_told_from_other_errors(error, found):
    assert XPU().is_out_of_memory(error) == found


# kernels


def test_kernels_and_their_reasons(runtime):
    runtime("B580")
    backend = OnCPU()
    backend.bind(0)
    made = {operation: support.implementation for operation, support in backend.kernels.capabilities().items()}
    assert (made["adamw"], made["attention"], made["graph_capture"]) == ("torch-fused", "sdpa", "xpu-graphs")
    assert "its kernel for training takes no mask" in backend.kernels.capabilities()["attention"].reason
    assert backend.kernels.capabilities()["inference_weights"].reason.startswith("its matrix products")


def test_recordings_are_counted(runtime):
    runtime("B580")
    backend = OnCPU()
    backend.bind(0)
    total = torch.zeros(1)
    step = backend.capture(lambda x: total.add_(x), key="step")
    assert [step(torch.ones(1)).item() for _ in range(4)] == [1, 2, 3, 4]
    assert backend.compilations() == 1 and backend.recordings_keep_memory()


def test_operator_that_cannot_be_recorded_is_a_capture_error(runtime, monkeypatch):
    runtime("B580")
    backend = OnCPU()
    backend.bind(0)
    monkeypatch.setattr(torch.xpu, "graph", None)
    step = backend.capture(lambda x: x + 1, key="step")
    step(torch.ones(1))
    with pytest.raises(CaptureError, match="step cannot be recorded"):
        step(torch.ones(1))
    assert backend.compilations() == 0


def test_devices_that_do_not_tell_their_uuids_have_none(runtime, monkeypatch):
    runtime("B580", "B580")
    backend = XPU()
    for properties in backend._properties:
        properties.uuid = "00000000-0000-0000-0000-000000000000"
    assert backend.info().uuids == ()


def test_torch_without_graphs_records_nothing_and_says_so(runtime, monkeypatch):
    runtime("B580")
    monkeypatch.delattr(torch.xpu, "XPUGraph")
    support = XPU().kernels.capabilities()["graph_capture"]
    assert not support and "has no torch.xpu.XPUGraph" in support.reason


# the conformance kit, as far as a stand-in can pass it

NEEDS_THE_DEVICE = {"memory"}
"""Checks of figures that only the device has; those in other processes need the plugin installed next to a device."""


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.module != "processes" and check.name not in NEEDS_THE_DEVICE], ids=str
)
def test_conformance_on_a_stand_in(runtime, check):
    runtime("B580")
    check.run(subject(OnCPU))


@pytest.mark.slow  # a process that imports torch and DeepSpeed
def test_deepspeed_uses_its_own_xpu_accelerator():
    code = (
        "import torch; torch.xpu.is_available = lambda: True\n"
        "from rlhf_xpu.backend import XPU; view = XPU().prepare_deepspeed()\n"
        "print(view.implementation, view.device, view.communication, *view.dtypes)"
    )
    user = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # of another test, perhaps
    environment = user | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    expected = "deepspeed.accelerator.xpu_accelerator.XPU_Accelerator xpu xccl float32 float16 bfloat16"
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr[-2000:]
