"""What backends report about their software before a device is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerators import host
from accelerators.backends.cpu.backend import CPU
from accelerators.backends.cuda.backend import CUDA
from accelerators.backends.hpu import info as hpu_info


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a vendor's tool that prints its arguments on the PATH."""

    def install(name: str) -> None:
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin")

    return install


def test_cpu_reports_nothing_of_a_vendor() -> None:
    assert (CPU().environment_report(), CPU().other_modes(), CPU.environment_prefixes) == ({}, {}, ())


def test_cuda_reports_driver_and_libraries(tool) -> None:
    tool("nvidia-smi")
    report = CUDA().environment_report()
    assert "compute_cap,driver_version" in report["nvidia-smi"]
    assert report["CUDA of torch"] == str(torch.version.cuda)
    assert {"architectures of torch", "cuDNN", "NCCL", "device files"} <= set(report)


def test_hpu_reports_tool_release_files_and_logs(tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool("hl-smi")
    (tmp_path / "infiniband").mkdir()
    (tmp_path / "infiniband" / "uverbs0").touch(0o600)
    (tmp_path / "version").write_text("1.24.0-abc\n")
    monkeypatch.setattr(hpu_info, "DEV", tmp_path)
    monkeypatch.setattr(hpu_info, "DRIVER", tmp_path)
    monkeypatch.setattr(hpu_info, "release", lambda: "1.23.0")
    monkeypatch.setenv("HABANA_LOGS", str(tmp_path))
    monkeypatch.setenv("GC_KERNEL_PATH", f"{tmp_path}/version:{tmp_path}/absent.so")
    report = hpu_info.environment_report()
    assert report["hl-smi"].startswith("-Q module_id,name,driver_version")
    assert report["driver"] == "1.24.0-abc"
    assert "this container is of release 1.23, and the driver of 1.24" in report["bridge"]
    assert report["device files"] == f"{tmp_path}/infiniband/uverbs0 600 rw"
    assert report["logs"] == f"{tmp_path}, writable"
    assert report["kernels"].endswith(f"/absent.so; missing: {tmp_path}/absent.so")


@pytest.mark.parametrize(("lazy", "expected"), [(True, {"eager": "0"}), (False, {"lazy": "1"})])
def test_hpu_names_its_other_mode(machine, lazy: bool, expected: dict[str, str]) -> None:
    modes = machine(lazy=lazy).other_modes()
    assert modes == {mode: {"PT_HPU_LAZY_MODE": value} for mode, value in expected.items()}


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (("sh", "-c", "echo fine"), "fine"),
        (("sh", "-c", "echo broken >&2; exit 3"), "broken (exit code 3)"),
        (("a-tool-that-nobody-has",), "([Errno 2] No such file or directory: 'a-tool-that-nobody-has')"),
    ],
)
def test_output_of_a_tool_or_why_there_is_none(command: tuple[str, ...], output: str) -> None:
    assert host.read_command(*command) == output
