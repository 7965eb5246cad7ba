"""The CUDA backend on every kind of chip: facts come from a fake NVML, the device from stand-ins for torch.cuda."""

from __future__ import annotations

import contextlib
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from accelerators import OPERATIONS, AcceleratorError, CaptureError, ShapePolicy
from accelerators.backends.cuda import info as cuda_info
from accelerators.backends.cuda.backend import CUDA, attend_cudnn
from accelerators.testing.stand_in import Streams
from tests.accelerators import nvml

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.13 to 2.15 for CUDA 13
OLD_WHEEL = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]  # for CUDA 12.6
OLDER_TORCH = r"install torch's build for CUDA 12\.6 \(2\.14 or earlier\)"


@pytest.fixture
def on(monkeypatch):
    """The backend on a machine with these chips, before a device is bound: on("V100", "V100")."""
    monkeypatch.delenv(cuda_info.VISIBLE_ENV, raising=False)

    def backend(*chips: str) -> CUDA:
        monkeypatch.setitem(sys.modules, "pynvml", nvml.fake(*chips))
        return CUDA()

    return backend


@pytest.fixture
def runtime(monkeypatch):
    """Let torch.cuda answer as on these chips, in its own order; what was called is listed in the result."""

    def pretend(*chips: str, architectures: list[str] | None = None) -> list[tuple]:
        calls: list[tuple] = []
        monkeypatch.setattr(torch.version, "cuda", "12.6")

        def properties(index):
            return SimpleNamespace(name=nvml.CHIPS[chips[index]].name, uuid="another", total_memory=1 << 34)

        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

        def replace(name, answer):
            monkeypatch.setattr(torch.cuda, name, lambda *args: calls.append((name, *args)) or answer(*args))

        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: OLD_WHEEL if architectures is None else architectures)
        replace("set_device", lambda index: None)
        replace("get_device_capability", lambda index: nvml.CHIPS[chips[index]].capability)
        replace("get_device_name", lambda index: nvml.CHIPS[chips[index]].name)
        return calls

    return pretend


@pytest.mark.parametrize(
    ("chip", "peaks"),
    [
        ("H100", {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}),
        ("H200", {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}),
        ("A100", {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}),
        ("V100", {"fp16": 125e12, "fp32": 15.7e12}),  # emulates bf16
        ("GB10", {}),  # of which no data sheet was read
    ],
)
def test_what_a_chip_can_do_at_most_is_stated_by_its_name(on, chip, peaks):
    assert on(chip).machine.weakest.peak_flops == peaks


# precision

NO_BF16 = "emulated below sm_80, and this is"
NO_FP16 = "DeepSpeed trains in it from sm_70 on, and this is"

PRECISIONS = [
    # chip, wish, precision, reason
    ("P100", "auto", "fp32", rf"^runs on sm_60 \(Tesla P100.*\); bf16: {NO_BF16} sm_60 .*; fp16: {NO_FP16} sm_60"),
    ("P100", "fp16", None, rf"precision fp16 on cuda: {NO_FP16} sm_60 .*; use auto or fp32$"),
    ("V100", "auto", "fp16", rf"^fast on sm_70 \(Tesla V100.*\), with dynamic loss scaling; bf16: {NO_BF16} sm_70"),
    ("V100", "bf16", None, rf"{NO_BF16} sm_70 \(Tesla V100-SXM2-32GB\); use auto, fp16 or fp32$"),
    ("V100", "fp32", "fp32", "asked for"),
    ("T4", "auto", "fp16", rf"^fast on sm_75 \(Tesla T4\), with dynamic loss scaling; bf16: {NO_BF16} sm_75"),
    ("A100", "auto", "bf16", r"^native on sm_80 \(NVIDIA .*\), and needs no loss scaling$"),
    ("H100", "bf16", "bf16", "asked for; native on sm_90"),
    ("H100", "fp16", "fp16", "asked for; fast on sm_90 .*, with dynamic loss scaling"),
    ("H100", "fp8", None, "precision 'fp8': not known; use auto, bf16, fp16 or fp32"),
]


@pytest.mark.parametrize(("chip", "wish", "name", "reason"), PRECISIONS)
def test_the_chip_decides_the_precision_and_the_reason_names_it(on, chip, wish, name, reason):
    cuda = on(chip)
    if name is None:
        with pytest.raises(AcceleratorError, match=reason):
            cuda.precision(wish)
        return
    precision = cuda.precision(wish)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    assert (precision.name, precision.dtype, precision.loss_scaling) == (name, dtype, name == "fp16")
    assert re.search(reason, precision.reason), precision.reason
    scaling = {"loss_scale": 0} if name == "fp16" else {}
    assert precision.deepspeed_config() == ({} if name == "fp32" else {name: {"enabled": True, **scaling}})


def test_the_weakest_visible_gpu_decides_for_all_ranks(on, monkeypatch):
    assert on("A100", "V100").precision().name == "fp16"
    monkeypatch.setenv(cuda_info.VISIBLE_ENV, "0")
    assert on("A100", "V100").precision().name == "bf16"


def test_driver_is_asked_once(on):
    cuda = on("A100")
    cuda.precision()
    sys.modules["pynvml"].nvmlInit = None
    assert cuda.precision().name == "bf16"


# kernels


@pytest.mark.parametrize("chip", ["P100", "V100", "T4", "A100", "RTX 3090", "L4", "H100", "H200"])
def test_the_same_kernels_win_on_every_chip(on, chip):
    cuda = on(chip)
    used = {
        operation: support.implementation for operation, support in cuda.kernels.capabilities().items() if support.ok
    }
    assert used == {
        "adamw": "torch-fused",
        "adamw_cpu_offload": "torch-fused",
        "clip_grad_norm": "torch",
        "attention": "sdpa",
        "graph_capture": "cuda-graphs",
        "quantized_weights": "torch",
    }
    assert set(used) == set(OPERATIONS) - {"inference_weights", "fused_layers", "sampling", "batch_invariant"}
    assert all(support.reason for operation in OPERATIONS for _, support in cuda.kernels.candidates(operation))
    assert "in the order that they are trained in" in cuda.kernels.capabilities()["inference_weights"].reason


@pytest.mark.parametrize(
    ("chip", "operation", "reason"),
    [
        ("V100", "attention", "flash attention needs sm_80; found sm_70 (Tesla V100-SXM2-32GB)"),
        ("A100", "attention", "batches are padded to fixed shapes: it takes no mask"),
        ("A100", "quantized_weights", "no tensor cores"),
    ],
)
def test_kernel_that_is_never_used_says_why(on, chip, operation, reason):
    refusals = [support.reason for _, support in on(chip).kernels.candidates(operation) if not support.ok]
    assert any(reason in refusal for refusal in refusals)


# placement


def test_each_rank_gets_its_gpu(on, runtime):
    calls = runtime("A100", "A100")
    cuda = on("A100", "A100")
    assert cuda.bind(1) == cuda.device() == torch.device("cuda", 1)
    assert ("set_device", 1) in calls
    assert (cuda.dist_backend(), cuda.deepspeed_name) == ("nccl", "cuda")
    assert cuda.shape_policy() == ShapePolicy("bucketed", pad_to_multiple=8, first=64)
    assert cuda.info().count == 2 and "driver 570.86.15" in cuda.info().software


def test_attention_of_cudnn_is_off_and_explained(on, runtime):
    runtime("H200")
    torch.backends.cuda.enable_cudnn_sdp(True)
    cuda = on("H200")
    cuda.bind(0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    reasons = {kernel.name: support.reason for kernel, support in cuda.kernels.candidates("attention")}
    assert "never cuDNN's" in reasons["sdpa"]
    assert reasons["sdpa-cudnn"].startswith("used only if it is chosen by name: ")


def test_attention_of_cudnn_is_on_only_inside_the_implementation_that_was_chosen(on, runtime, monkeypatch):
    from torch.nn import functional

    runtime("H200")
    cuda = on("H200")
    cuda.bind(0)
    assert "sdpa_cudnn" not in [name for _, name in cuda.kernels.usable("attention")]
    cuda.kernels.choose("attention", "sdpa-cudnn")
    assert cuda.kernels.get("attention") == "sdpa_cudnn"
    states, plain = torch.randn(3, 2, 4, 6, 8), functional.scaled_dot_product_attention
    first = []

    def spy(*args, **options):
        first.append((torch.backends.cuda.cudnn_sdp_enabled(), torch._C._get_sdp_priority_order()[0]))
        return plain(*args, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    output, _ = attend_cudnn(None, *states, None, is_causal=True)
    torch.testing.assert_close(output, plain(*states, is_causal=True).transpose(1, 2))
    assert first == [(True, int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION))]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_attention_of_cudnn_cannot_be_chosen_for_a_chip_without_it(on):
    with pytest.raises(AcceleratorError, match=r"sdpa-cudnn cannot be used on cuda: .* needs sm_80; found sm_70"):
        on("V100").kernels.choose("attention", "sdpa-cudnn")


def test_more_ranks_than_gpus_are_refused_before_opening_one(on, runtime, monkeypatch):
    calls = runtime("A100", "A100", "A100")
    with pytest.raises(AcceleratorError, match="local rank 3, this machine shows 3; start at most 3 ranks per machine"):
        on("A100", "A100", "A100").bind(3)
    monkeypatch.setenv(cuda_info.VISIBLE_ENV, "2,0")
    with pytest.raises(AcceleratorError, match=r"shows 2 \(CUDA_VISIBLE_DEVICES=2,0\); start at most 2 ranks"):
        on("A100", "A100", "A100").bind(2)
    assert calls == []


@pytest.mark.parametrize(
    ("chip", "architectures", "remedy"),
    [
        ("P100", WHEEL, OLDER_TORCH),
        ("T4", WHEEL, None),
        ("RTX 3090", WHEEL, None),
        ("H100", WHEEL, None),
        ("GB10", WHEEL, None),
        ("P100", OLD_WHEEL, None),
        ("GB10", OLD_WHEEL, "update the driver to 580 or later"),
        ("GB10", [*OLD_WHEEL, "compute_90"], None),
        ("A100", [], OLDER_TORCH),
    ],
)
def test_a_build_of_torch_without_code_for_the_gpu_is_refused(on, runtime, chip, architectures, remedy):
    calls = runtime(chip, architectures=architectures)
    if remedy is None:
        assert on(chip).bind(0).type == "cuda"
        return
    with pytest.raises(AcceleratorError, match=rf"no code for GPU 0, .*; {remedy}$"):
        on(chip).bind(0)
    assert calls == []


def test_a_gpu_that_nvml_counts_elsewhere_is_refused(on, runtime, monkeypatch):
    monkeypatch.setenv(cuda_info.VISIBLE_ENV, "0")
    runtime("V100")  # what an order of its own makes of index 0
    with pytest.raises(AcceleratorError, match=r"device 0 is Tesla V100.*set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        on("A100", "V100").bind(0)


@pytest.mark.parametrize(
    ("versions", "complaint"),
    [
        ({"hip": "7.1.25424", "cuda": "12.6"}, "is built for ROCm 7.1.25424, although torch.cuda exists"),
        ({"hip": None, "cuda": None}, "is built without CUDA, although torch.cuda exists"),
    ],
)
def test_another_vendors_torch_is_refused_before_opening_it(on, runtime, monkeypatch, versions, complaint):
    calls = runtime("A100")
    for name, version in versions.items():
        monkeypatch.setattr(torch.version, name, version)
    with pytest.raises(AcceleratorError, match=f"{complaint}; {OLDER_TORCH}"):
        on("A100").bind(0)
    assert calls == []


def test_a_device_that_nvidias_driver_does_not_know_is_refused(on, runtime, monkeypatch):
    runtime("A100")
    other = SimpleNamespace(name="BI-V150", uuid="77777777-7777")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: other)
    with pytest.raises(AcceleratorError, match=r"opened BI-V150 \(GPU-77777777-7777\), which NVIDIA's driver does not"):
        on("A100").bind(0)
    other.uuid = "00000000-0000"  # as NVML has it, whatever its name
    on("A100").bind(0)
    other.uuid, other.name = "of-a-part", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    on("A100").bind(0)


# memory and random numbers


@pytest.fixture
def bound(on, runtime):
    runtime("A100", "A100")
    cuda = on("A100", "A100")
    cuda.bind(1)
    return cuda


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("NCCL error: unhandled cuda error, NCCL version 2.27.3: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (KeyError("CUBLAS_STATUS_ALLOC_FAILED"), False),
    ],
)
def test_out_of_memory_in_nvidias_words_is_recognized(on, error, lacking):
    assert on("A100").is_out_of_memory(error) is lacking


def test_memory_and_seed_are_those_of_the_bound_device(bound, monkeypatch):
    answers = {
        (torch.accelerator, "memory_allocated"): 100,
        (torch.accelerator, "max_memory_allocated"): 200,
        (torch.cuda, "mem_get_info"): (150, 300),
    }
    for (module, name), answer in answers.items():
        monkeypatch.setattr(module, name, lambda device, answer=answer: answer if device.index == 1 else None)
    memory = bound.memory()
    assert (memory.allocated, memory.peak, memory.total) == (100, 200, 300)
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    bound.seed(7)
    assert seeds == [7]


def test_state_of_the_generator_survives_a_checkpoint(bound, monkeypatch, tmp_path):
    states = {1: torch.tensor([1, 2, 3], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: states.update({1: state}))
    torch.save(bound.rng_state(), tmp_path / "rng.pt")
    expected = torch.rand(3)
    states[1] = torch.zeros(3, dtype=torch.uint8)
    bound.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert states[1].tolist() == [1, 2, 3]
    assert torch.equal(torch.rand(3), expected)


# recordings


@pytest.fixture
def graphs(monkeypatch):
    """Stand-ins for torch.cuda's graphs that record and replay operators on the CPU; the result counts replays."""
    streams = Streams()
    for name, function in streams.functions("CUDAGraph").items():
        monkeypatch.setattr(torch.cuda, name, function)
    return streams.replays


def test_captured_function_is_replayed_after_two_calls(bound, graphs):
    calls = []
    step = bound.capture(lambda x: calls.append(0) or x * 2, key="step")
    assert [step(torch.full((2,), float(n))).tolist() for n in range(5)] == [[2 * n, 2 * n] for n in range(5)]
    assert len(calls) == 2
    assert graphs == ["default"] * 4
    assert bound.compilations() == 1


def test_failed_recording_is_not_counted_and_restores_stream_and_generator(bound, graphs, monkeypatch):
    """On an H200 a recording that the driver ends leaves the generator in recording mode until another one succeeds."""
    monkeypatch.setattr(bound, "device", lambda: torch.device("cpu"))
    ended, graph = [], torch.cuda.graph

    @contextlib.contextmanager
    def watched(recorded):
        with graph(recorded):
            yield
        ended.append(recorded)

    monkeypatch.setattr(torch.cuda, "graph", watched)
    calls = []

    def step(x):
        calls.append(0)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return x

    captured = bound.capture(step, key="step")
    captured(torch.ones(2))
    with pytest.raises(CaptureError, match="step cannot be recorded: out of memory"):
        captured(torch.ones(2))
    assert bound.compilations() == 0
    assert torch.cuda.current_stream() == "default"
    assert len(ended) == 1
