"""The CPU backend, and with it the interface's defaults."""

from __future__ import annotations

import platform
import random
import sys
from collections import namedtuple

import pytest
import torch

from accelerators import OPERATIONS, AcceleratorError, KernelImpl, Probe, ShapePolicy, Support, host
from accelerators.backends.cpu import info as cpu_info
from accelerators.backends.cpu.backend import CPU


@pytest.fixture
def cpu() -> CPU:
    accelerator = CPU()
    accelerator.bind(0)
    return accelerator


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Pretend to run on a processor with these flags."""

    def pretend(flags: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor\t: 0\nmodel name\t: Example 9000\nflags\t\t: fpu {flags}\n")
        monkeypatch.setattr(cpu_info, "CPUINFO", path)

    return pretend


# precision


@pytest.mark.parametrize(
    ("flags", "wish", "name", "dtype"),
    [
        ("avx512_bf16", "auto", "bf16", torch.bfloat16),
        ("amx_bf16", "auto", "bf16", torch.bfloat16),
        ("avx512_bf16", "bf16", "bf16", torch.bfloat16),
        ("avx512_bf16", "fp32", "fp32", torch.float32),
        ("avx512f", "auto", "fp32", torch.float32),
        ("avx512f", "fp32", "fp32", torch.float32),
    ],
)
def test_bf16_where_the_processor_has_it_and_fp32_elsewhere(cpu, processor, flags, wish, name, dtype):
    processor(flags)
    precision = cpu.precision(wish)
    assert (precision.name, precision.dtype, precision.loss_scaling) == (name, dtype, False)
    assert precision.reason


@pytest.mark.parametrize(
    ("flags", "wish", "reason"),
    [
        ("avx512f", "bf16", r"no native bf16 \(avx512_bf16 or amx_bf16\).*use auto or fp32"),
        ("avx512_bf16", "fp16", "DeepSpeed's CPU accelerator does not train in fp16; use auto or fp32"),
        ("avx512f", "fp8", "not known; use auto, bf16, fp16 or fp32"),
    ],
)
def test_an_unsupported_precision_is_an_error_with_reason_and_remedy(cpu, processor, flags, wish, reason):
    processor(flags)
    with pytest.raises(AcceleratorError, match=reason):
        cpu.precision(wish)


def test_the_reason_says_why_not_the_other_precisions(cpu, processor):
    processor("avx512f")
    reason = cpu.precision("auto").reason
    assert "no native bf16" in reason
    assert "fp16" in reason


def test_precision_enters_deepspeeds_configuration(cpu, processor):
    processor("avx512_bf16")
    assert cpu.precision("bf16").deepspeed_config() == {"bf16": {"enabled": True}}
    assert cpu.precision("fp32").deepspeed_config() == {}


def test_models_are_held_in_the_precision_so_autocast_does_nothing(cpu, processor):
    processor("avx512_bf16")
    with cpu.precision("bf16").autocast():
        assert not torch.is_autocast_enabled("cpu")


# placement


Pair = namedtuple("Pair", "left right")


def test_a_batch_keeps_its_structure_on_the_device(cpu):
    tensor = torch.arange(3)
    batch = {"a": [tensor, 1], "b": (tensor, None), "d": Pair(tensor, 2)}
    moved = cpu.to_device(batch)
    assert torch.equal(moved["a"][0], tensor)
    assert moved["a"][1] == 1
    assert isinstance(moved["b"], tuple)
    assert isinstance(moved["d"], Pair)
    assert all(item.device == cpu.device() for item in (moved["a"][0], moved["b"][0], moved["d"].left))


def test_a_device_must_be_bound_before_it_is_used():
    with pytest.raises(AcceleratorError, match=r"call bind\(local_rank\) first"):
        CPU().device()


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, [2]),
        ({"LOCAL_WORLD_SIZE": "64"}, [1]),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "3"}, []),
        ({"LOCAL_WORLD_SIZE": "1"}, []),
        ({}, []),
    ],
)
def test_ranks_share_the_cores_unless_the_user_decides(monkeypatch, environment, threads):
    for variable in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(cpu_info, "cores", lambda: 8)
    CPU().bind(1)
    assert calls == threads


def test_the_processor_is_named(cpu, processor):
    processor("avx2")
    assert cpu.info().model == "Example 9000"
    assert cpu.info().count == 1


# kernels


def test_every_operation_has_a_capability_and_every_refusal_a_reason(cpu):
    capabilities = cpu.kernels.capabilities()
    assert set(capabilities) == set(OPERATIONS)
    assert all(support.reason for support in capabilities.values())
    assert all(support.implementation for support in capabilities.values() if support.ok)
    assert {name for name, support in capabilities.items() if not support.ok} == {"graph_capture"}


@pytest.mark.parametrize("refusal", [Support, Probe])
def test_a_refusal_without_a_reason_cannot_be_written(refusal):
    with pytest.raises(ValueError, match="needs a reason"):
        refusal(False, "")


@pytest.mark.parametrize("operation", ["adamw", "adamw_cpu_offload"])
def test_the_fused_adamw_takes_the_steps_of_the_plain_one(cpu, operation):
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    results = []
    for adamw in (cpu.kernels.get(operation, required=True), torch.optim.AdamW):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 10))
        optimizer = adamw([{"params": [parameter]}], **options)
        for step in range(3):
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
            optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


def test_gradients_are_clipped_to_the_norm(cpu):
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    assert cpu.kernels.get("clip_grad_norm")([parameter], 1.0).item() == pytest.approx(6.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0)


def test_attention_is_named_for_transformers(cpu):
    assert cpu.kernels.get("attention") == "cpu_composed"


def test_a_missing_kernel_is_none_or_an_error_with_the_reason(cpu):
    assert cpu.kernels.get("graph_capture") is None
    with pytest.raises(AcceleratorError, match=r"cpu: no graph_capture here: .*no launches to record"):
        cpu.kernels.get("graph_capture", required=True)


def test_the_supported_implementation_with_the_highest_priority_wins(cpu):
    def offered(name: str, priority: int, ok: bool = True) -> KernelImpl:
        support = Support(ok, "too old" if not ok else "")
        return KernelImpl(
            operation="adamw",
            name=name,
            factory=lambda a: lambda params: name,
            supported=lambda a: support,
            priority=priority,
        )

    cpu.kernels.add([offered("best", 99, ok=False), offered("second", 50), offered("third", -20)])
    assert cpu.kernels.capabilities()["adamw"].implementation == "second"
    ranked = [impl.name for impl, _ in cpu.kernels.candidates("adamw")]
    assert ranked == ["second", "torch-fused", "torch-foreach", "third", "best"]


def test_a_check_that_raises_is_a_refusal(cpu):
    def check(accelerator):
        raise RuntimeError("no driver")

    cpu.kernels.add([KernelImpl(operation="graph_capture", name="q", factory=lambda a: None, supported=check)])
    assert cpu.kernels.capabilities()["graph_capture"] == Support(
        False, "q: its check failed (RuntimeError: no driver)"
    )


# memory


def test_memory_follows_the_process(cpu):
    cpu.empty_cache()  # memory that was kept would serve
    before = cpu.memory()
    block = bytearray(b"x") * (64 << 20)
    during = cpu.memory()
    assert during.allocated - before.allocated > 48 << 20
    assert before.allocated <= during.peak <= during.total
    del block


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/clear_refs")
def test_the_peak_can_be_measured_anew(cpu):
    block = bytearray(b"x") * (256 << 20)
    del block
    cpu.empty_cache()
    peak = cpu.memory().peak
    cpu.reset_peak()
    if cpu.memory().peak == peak:
        pytest.skip("this system does not let a process reset its peak")
    assert cpu.memory().peak < peak - (128 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed is kept with glibc alone")
def test_memory_of_tensors_stays_for_the_next_ones_until_it_is_asked_for(cpu):
    cpu.bind(0)
    tensors = [torch.ones(16 << 20) for _ in range(3)]  # 192 MiB; each large enough for a mapping of its own
    held = cpu.memory().allocated
    del tensors
    assert cpu.memory().allocated > held - (64 << 20)
    cpu.empty_cache()
    assert cpu.memory().allocated < held - (128 << 20)


def test_without_proc_the_peak_stands_for_both(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "STATUS", tmp_path / "missing")
    memory = cpu.memory()
    assert memory.allocated == memory.peak > 1 << 20


def test_the_limit_of_a_container_is_the_total(cpu, monkeypatch, tmp_path):
    (tmp_path / "limit").write_text("12345\n")
    (tmp_path / "unlimited").write_text("max\n")
    monkeypatch.setattr(host, "CGROUP_LIMITS", (tmp_path / "limit", tmp_path / "unlimited"))
    assert cpu.memory().total == 12345


# random numbers


def test_a_seed_decides_what_follows(cpu):
    cpu.seed(7)
    first = torch.rand(3), random.random()
    cpu.seed(7)
    assert torch.equal(first[0], torch.rand(3))
    assert first[1] == random.random()


def test_the_generators_state_survives_a_checkpoint(cpu, tmp_path):
    cpu.seed(1)
    torch.save(cpu.rng_state(), tmp_path / "rng.pt")
    expected = torch.rand(3), random.random()
    cpu.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(expected[0], torch.rand(3))
    assert expected[1] == random.random()


# the rest of the interface


def test_operators_run_at_once_so_there_is_nothing_to_capture_or_wait_for(cpu):
    def step(x):
        return x + 1

    assert cpu.capture(step, key="step")(torch.tensor(1.0)) == 2
    assert cpu.is_lazy() is False
    assert cpu.compilations() is None
    cpu.step_boundary("forward")
    cpu.synchronize()
    cpu.empty_cache()


def test_shapes_are_dynamic_and_processes_talk_over_gloo(cpu):
    assert cpu.shape_policy() == ShapePolicy("dynamic")
    assert cpu.dist_backend() == "gloo"


def test_deepspeed_agrees_on_the_device(run_python):
    code = (
        "import os; from accelerators.backends.cpu.backend import CPU; CPU().prepare_deepspeed();"
        "from deepspeed.accelerator import get_accelerator;"
        "print(os.environ['DS_ACCELERATOR'], get_accelerator().device_name())"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == "cpu cpu"


def test_deepspeed_set_to_another_device_by_the_user_is_an_error(cpu, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(AcceleratorError, match=r"DS_ACCELERATOR=cuda.*set it to cpu"):
        cpu.prepare_deepspeed()


def test_deepspeed_that_has_settled_on_another_device_is_an_error(run_python):
    code = (
        "from deepspeed.accelerator import set_accelerator\n"
        "from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator\n"
        "Other = type('Other', (CPU_Accelerator,), {'device_name': lambda self, index=None: 'other'})\n"
        "set_accelerator(Other())\n"
        "from accelerators.backends.cpu.backend import CPU; CPU().prepare_deepspeed()"
    )
    assert "DeepSpeed was set to 'other' earlier in this process" in run_python("-c", code).stderr
