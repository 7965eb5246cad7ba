"""The interface: the operations that trainers use, and the defaults that a backend inherits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from accelerators import (
    OPERATIONS,
    AcceleratorError,
    Support,
)
from accelerators.backends.cpu.backend import CPU
from tests.accelerators.fake_plugins import fast

# what trainers ask for


def test_trainers_ask_for_every_operation():
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "rlhf").rglob("*.py")]
    asked = {operation for source in sources for operation in re.findall(r'\.kernels\.get\(\s*"(\w+)"', source)}
    if any(re.search(r"\baccelerator\.capture\b", source) for source in sources):
        asked.add("graph_capture")
    assert asked == set(OPERATIONS)


# a backend with the defaults


class Terse(CPU):
    """Its `bind` does what its docstring says."""

    def bind(self, local_rank: int) -> torch.device:
        return torch.device("meta", local_rank)


class Careful(Terse):
    def bind(self, local_rank: int) -> torch.device:
        super().bind(local_rank)
        return torch.device("cpu")


@pytest.mark.parametrize(
    ("backend", "device"),
    [(Terse, torch.device("meta", 1)), (Careful, torch.device("cpu"))],
)
def test_the_device_is_the_one_that_bind_returned(backend, device):
    accelerator = backend()
    with pytest.raises(AcceleratorError, match="no device is bound"):
        accelerator.device()
    assert accelerator.bind(1) == device
    assert accelerator.device() == device
    assert accelerator.to_device(torch.ones(2)).device.type == device.type
    assert accelerator.bind(local_rank=0) == accelerator.device()
    with pytest.raises(AcceleratorError, match="no device is bound"):
        backend().device()


# an implementation that the user names


def test_a_named_implementation_is_taken_and_no_other():
    cpu = CPU()
    cpu.bind(0)
    assert [impl.name for impl, _ in cpu.kernels.usable("adamw")] == ["torch-fused", "torch-foreach"]
    cpu.kernels.choose("adamw", "torch-foreach")
    assert [impl.name for impl, _ in cpu.kernels.usable("adamw")] == ["torch-foreach"]
    step = cpu.kernels.get("adamw", required=True)([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert step.defaults["foreach"] is not False and not step.defaults["fused"]
    assert cpu.kernels.capabilities()["adamw"].implementation == "torch-foreach"
    assert [impl.name for impl, _ in cpu.kernels.usable("attention")] == ["composed", "sdpa", "eager"]
    cpu.kernels.choose("adamw", "auto")
    assert cpu.kernels.capabilities()["adamw"].implementation == "torch-fused"


def test_implementation_for_those_who_choose_it_is_not_taken_otherwise():
    cpu = CPU()
    cpu.kernels.add(
        [fast("attention", "swift", supported=lambda accelerator: Support(True, "quick"), only_chosen=True)]
    )
    supports = {implementation.name: support for implementation, support in cpu.kernels.candidates("attention")}
    assert supports["fast"] == Support(False, "used only if it is chosen by name: quick")
    assert "fast" not in [implementation.name for implementation, _ in cpu.kernels.usable("attention")]
    cpu.kernels.choose("attention", "fast")
    assert [support for _, support in cpu.kernels.candidates("attention")] == [Support(True, "quick")]
    cpu.kernels.choose("attention", "auto")
    assert cpu.kernels.capabilities()["attention"].implementation == "composed"


def test_chosen_implementation_is_refused_with_its_reason():
    cpu = CPU()
    cpu.kernels.add([fast("attention", "swift", supported=lambda accelerator: Support(False, "too slow"))])
    with pytest.raises(AcceleratorError, match="attention: fast cannot be used on cpu: too slow"):
        cpu.kernels.choose("attention", "fast")


# capture, which may be turned off


class Recorder(CPU):
    """It answers for the functions that it is given to record."""

    def kernel_implementations(self):
        return [*super().kernel_implementations(), fast("graph_capture", lambda fn, key: lambda: "replayed")]


@pytest.mark.parametrize("backend", [CPU, Recorder])
def test_function_runs_unchanged_if_no_recording_is_chosen(backend):
    accelerator = backend()
    accelerator.kernels.choose("graph_capture", "none")

    def reads_on_the_host():
        return torch.ones(1).item()

    assert accelerator.capture(reads_on_the_host, key="it")() == 1
    assert accelerator.kernels.capabilities()["graph_capture"] == Support(False, "none was chosen")
    assert accelerator.kernels.get("graph_capture") is None


def test_recording_is_on_unless_it_is_turned_off():
    recorder = Recorder()
    for chosen, expected in (("auto", "replayed"), ("none", "plain"), ("fast", "replayed"), ("auto", "replayed")):
        recorder.kernels.choose("graph_capture", chosen)
        assert recorder.capture(lambda: "plain", key="it")() == expected


def test_attention_cannot_be_turned_off():
    implementations = "composed, sdpa, eager"
    with pytest.raises(AcceleratorError, match=f"attention: cpu has no implementation none; .* {implementations}"):
        CPU().kernels.choose("attention", "none")
