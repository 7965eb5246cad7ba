"""The interface: the operations that trainers use, and the defaults that a backend inherits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from accelerators import OPERATIONS, Accelerator, AcceleratorError, Support, choose_precision, portable_kernels
from accelerators.backends.cpu.backend import CPU
from tests.accelerators.fake_plugins import fast

# what trainers ask for


def test_trainers_ask_for_every_operation():
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "rlhf").rglob("*.py")]
    asked = {operation for source in sources for operation in re.findall(r'\.kernels\.get\(\s*"(\w+)"', source)}
    if any(re.search(r"\baccelerator\.capture\b", source) for source in sources):
        asked.add("graph_capture")
    assert asked == set(OPERATIONS)


def test_page_for_authors_names_every_member():
    page = (Path(__file__).parents[2] / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", page))
    assert not {name for name in vars(Accelerator) if not name.startswith("_")} - named


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


def test_part_that_a_device_cannot_capture_runs_plainly_with_a_warning(caplog):
    class Choosy(Recorder):
        def refuse_capture(self, key: str) -> str:
            return "its compiler cannot" if key == "sampling" else ""

    choosy = Choosy()
    assert choosy.capture(lambda: "plain", key="sampling")() == "plain"
    assert choosy.capture(lambda: "plain", key="decoding")() == "replayed"
    assert choosy.fallbacks == ["sampling"]
    assert [record.message for record in caplog.records] == ["sampling runs operator by operator: its compiler cannot"]


def test_collectives_of_gloo_take_tensors_of_the_host():
    backends = {"gloo": True, "nccl": False, "cpu:gloo,cuda:nccl": True, "cuda:gloo": False, "mpi": True}
    for name, on_host in backends.items():
        cpu = CPU()
        cpu.dist_backend = lambda name=name: name
        assert cpu.collectives_on_host() == on_host


def test_attention_cannot_be_turned_off():
    implementations = "composed, sdpa, eager"
    with pytest.raises(AcceleratorError, match=f"attention: cpu has no implementation none; .* {implementations}"):
        CPU().kernels.choose("attention", "none")


# what several backends need


SUPPORTS = {"bf16": Support(False, "the chip has none"), "fp16": Support(True, "fast"), "fp32": Support(True, "exact")}


def test_precision_of_auto_is_the_first_supported_one_and_tells_why_not_the_others():
    precision = choose_precision("chip", "auto", SUPPORTS)
    assert (precision.name, precision.dtype, precision.loss_scaling) == ("fp16", torch.float16, True)
    assert precision.reason == "fast; bf16: the chip has none"
    assert not choose_precision("chip", "fp32", SUPPORTS).loss_scaling


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("bf16", "precision bf16 on chip: the chip has none; use auto, fp16 or fp32"),
        ("fp8", "precision 'fp8': not known; use auto, bf16, fp16 or fp32"),
    ],
)
def test_precision_that_is_not_supported_is_refused_with_those_that_are(wish, message):
    with pytest.raises(AcceleratorError) as error:
        choose_precision("chip", wish, SUPPORTS)
    assert str(error.value) == message


def test_rank_without_a_device_is_refused_with_the_variable_that_hides_devices(monkeypatch):
    backend = Terse()
    backend.require_device(1, 2, "CHIP_VISIBLE")
    monkeypatch.setenv("CHIP_VISIBLE", "3,4")
    with pytest.raises(AcceleratorError, match=r"rank 2, this machine shows 2 \(CHIP_VISIBLE=3,4\); start at most 2"):
        backend.require_device(2, 2, "CHIP_VISIBLE")


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("CHIP_NO_MEM in op 7"), True),
        (RuntimeError("CHIP_BUSY"), False),
        (ValueError("CHIP_NO_MEM"), False),
        (torch.OutOfMemoryError("any words"), True),
    ],
)
def test_pattern_finds_a_lack_of_memory_in_runtime_errors_only(error, found):
    class Patterned(Terse):
        out_of_memory_pattern = "CHIP_NO_MEM"

    assert Patterned().is_out_of_memory(error) == found


def test_reason_for_torchs_attention_is_the_one_of_the_device():
    reasons = {kernel.name: kernel.supported(None).reason for kernel in portable_kernels("the chip's own kernel")}
    assert reasons["sdpa"] == "the chip's own kernel"
    assert reasons["eager"] == "every architecture's own operators"
