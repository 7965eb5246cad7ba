"""Faults are planted in the device, change it in their block only, and are named by `rlhf accelerators diff`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gaudi_sim.faults import FAULTS, plant
from simulated import device

ROOT = Path(__file__).parents[3]


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return device.from_cpu(tensor)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_can_be_planted_and_removed(name: str) -> None:
    first, second = torch.randn(3, 4), torch.randn(4, 5)
    with plant(name):
        pass
    assert torch.equal((on_device(first) @ on_device(second)).cpu(), first @ second)


def test_planted_operator_is_wrong_in_its_block_only() -> None:
    first, second = on_device(torch.randn(3, 4)), on_device(torch.randn(4, 5))
    right = (first @ second).cpu()
    with plant("mm-scale"):
        assert torch.allclose((first @ second).cpu(), 1.01 * right)
    with plant("mm-backward-zero"):
        assert torch.equal((first @ second).cpu(), right)
    with plant("silu-not-awaited"):
        result = torch.nn.functional.silu(first)
        assert not result.cpu().any()
        torch.hpu.synchronize()
        assert torch.allclose(result.cpu(), torch.nn.functional.silu(first.cpu()))


@pytest.mark.slow
def test_diff_names_a_dozen_of_faults(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "ci/diff_faults.py"), "--site", str(site), "--only", "-not-awaited"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout[done.stdout.index("{") :])
    assert summary["faults"] == summary["named"] == 12
