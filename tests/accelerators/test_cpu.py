"""The CPU backend, and with it the interface's defaults."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from types import SimpleNamespace

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
    ("flags", "wish", "name", "reason"),
    [
        ("avx512_bf16", "auto", "bf16", r"native on this processor \(avx512_bf16\); .* fp16$"),
        ("amx_bf16", "auto", "bf16", r"native on this processor \(amx_bf16\); .* fp16$"),
        ("avx512_bf16", "bf16", "bf16", r"native on this processor \(avx512_bf16\); .* fp16$"),
        ("avx512_bf16", "fp32", "fp32", "asked for"),
        ("avx512f", "auto", "fp32", "this processor has no native bf16 .* fp16$"),
        ("avx512f", "fp32", "fp32", "asked for"),
    ],
)
def test_bf16_where_the_processor_has_it_and_fp32_elsewhere(cpu, processor, flags, wish, name, reason):
    processor(flags)
    precision = cpu.precision(wish)
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    assert (precision.name, precision.dtype, precision.loss_scaling) == (name, dtype, False)
    assert re.match(reason, precision.reason)
    assert precision.deepspeed_config() == ({} if name == "fp32" else {"bf16": {"enabled": True}})
    with precision.autocast():  # weights have the precision already
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("flags", "wish", "reason"),
    [
        ("avx512f", "bf16", r"no native bf16 \(avx512_bf16 or amx_bf16\).*use auto or fp32"),
        ("avx512_bf16", "fp16", "DeepSpeed's CPU accelerator does not train in fp16; use auto or fp32"),
        ("avx512f", "fp8", "not known; use auto, bf16, fp16 or fp32"),
    ],
)
def test_unsupported_precision_is_an_error_with_remedy(cpu, processor, flags, wish, reason):
    processor(flags)
    with pytest.raises(AcceleratorError, match=reason):
        cpu.precision(wish)


# placement


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, [2]),
        ({"LOCAL_WORLD_SIZE": "64"}, [1]),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "3"}, []),
        ({"LOCAL_WORLD_SIZE": "1"}, []),
        ({}, []),
        ({"LOCAL_WORLD_SIZE": "1", "threads": "64"}, [8]),  # torch does not know of a container's quota
    ],
)
def test_ranks_share_the_cores_unless_the_user_decides(monkeypatch, environment, threads):
    for variable in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(environment.get("threads", 8)))
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(cpu_info, "cores", lambda: 8)
    CPU().bind(1)
    assert calls == threads


# kernels


@pytest.mark.parametrize("refusal", [Support, Probe])
def test_a_refusal_without_a_reason_cannot_be_written(refusal):
    with pytest.raises(ValueError, match="needs a reason"):
        refusal(False, "")


def test_a_missing_kernel_is_none_or_an_error_with_the_reason(cpu):
    assert cpu.kernels.get("graph_capture") is None
    with pytest.raises(AcceleratorError, match=r"cpu: no graph_capture here: .*no launches to record"):
        cpu.kernels.get("graph_capture", required=True)


def test_supported_implementation_of_highest_priority_wins(cpu):
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


# memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed is kept with glibc alone")
def test_freed_memory_stays_until_the_cache_is_emptied(cpu):
    tensors = [torch.ones(6 << 20) for _ in range(8)]  # 192 MiB in blocks of 24 MiB
    in_use = cpu.memory().allocated
    del tensors
    assert cpu.memory().allocated > in_use - (64 << 20)
    cpu.empty_cache()
    assert cpu.memory().allocated < in_use - (128 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide by themselves")
def test_freed_blocks_above_32_mib_are_returned_at_once(cpu):
    large = torch.ones(64 << 20)  # 256 MiB: more than earlier tests can have left free in the heap
    behind = torch.ones(1 << 20)
    in_use = cpu.memory().allocated
    del large
    assert cpu.memory().allocated < in_use - (240 << 20)
    del behind


def test_without_proc_the_peak_stands_for_both(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "STATUS", tmp_path / "missing")
    memory = cpu.memory()
    assert memory.allocated == memory.peak > 1 << 20


def write_group(folder: Path, version: int, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (limit, used)):
        (folder / name).write_text(f"{text}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cached}\n{prefix}active_file 100\n")


@pytest.mark.parametrize(
    ("version", "membership", "inner"),
    [
        (2, "0::/user/run\n", "user/run"),
        (1, "9:pids:/\n7:memory:/user/run\n", "memory/user/run"),
        (2, "0::/\n", ""),  # in a container
        (1, "7:cpu,memory:/docker/1\n", "memory"),  # in a container that sees the host's names
    ],
)
def test_limits_of_control_groups_bound_the_memory(cpu, monkeypatch, tmp_path, version, membership, inner):
    (tmp_path / "membership").write_text(membership)
    (tmp_path / "memory_info").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 100 kB\n")
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host, "MEMORY_INFO", tmp_path / "memory_info")
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")
    assert cpu.memory().available == 4100 * 1024
    write_group(tmp_path / "groups" / inner, version, "max" if version == 2 else str(2**63 - 4096), 4000, 0)
    assert cpu.memory().available == 4100 * 1024
    write_group(tmp_path / "groups" / inner, version, "12345", 4000, 1000)
    assert cpu.memory().total == 12345
    assert cpu.memory().available == 12345 - (4000 - 1100)  # cached files are dropped first
    (tmp_path / "memory_info").write_text("MemTotal: 9000 kB\n")
    assert cpu.memory().available is None


@pytest.mark.parametrize(
    ("texts", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"user/run/cpu.max": "max 100000\n", "user/cpu.max": "400000 100000\n"}, 4),
        ({"cpu/user/run/cpu.cfs_quota_us": "200000\n", "cpu/user/run/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/user/run/cpu.cfs_quota_us": "-1\n", "cpu/user/run/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_quotas_of_control_groups_bound_the_cores(monkeypatch, tmp_path, texts, cores):
    monkeypatch.setattr(cpu_info.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    (tmp_path / "membership").write_text("0::/user/run\n4:cpu,cpuacct:/user/run\n")
    for name, text in texts.items():
        (file := tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")
    assert cpu_info.cores() == cores


# the rest of the interface


def test_shapes_are_dynamic_and_processes_talk_over_gloo(cpu, processor):
    processor("avx2")
    assert cpu.shape_policy() == ShapePolicy("dynamic")
    assert cpu.dist_backend() == "gloo"
    assert (cpu.is_lazy(), cpu.compilations()) == (False, None)
    assert cpu.info().model == "Example 9000"
    capabilities = cpu.kernels.capabilities()
    assert set(capabilities) == set(OPERATIONS)
    assert capabilities["graph_capture"].reason


def test_deepspeed_set_to_another_device_by_the_user_is_an_error(cpu, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(AcceleratorError, match=r"DS_ACCELERATOR=cuda.*set it to cpu"):
        cpu.prepare_deepspeed()


def test_deepspeed_on_another_device_is_an_error(accelerator, monkeypatch):
    other = SimpleNamespace(device_name=lambda: "other")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: other)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(AcceleratorError, match="DeepSpeed was set to 'other' earlier in this process"):
        accelerator.prepare_deepspeed()


def test_deepspeed_compiles_no_collective_for_the_cpu(accelerator, monkeypatch):
    from deepspeed.ops import __compatible_ops__

    monkeypatch.setitem(__compatible_ops__, "deepspeed_shm_comm", True)
    accelerator.prepare_deepspeed()
    assert not __compatible_ops__["deepspeed_shm_comm"]
