"""Faults are planted in the device, change it in their block only, and are named by `rlhf accelerators diff`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_fault_of_the_environment_stays_until_the_process_ends(python: Any) -> None:
    code = "import gaudi_sim; gaudi_sim.install(); import habana_frameworks.torch.core, torch; "
    code += "first = torch.ones(2, 4).to('hpu'); print((first @ first.mT).cpu())"
    done = python("-c", code, fresh=True, strict=False, env={"RLHF_GAUDI_SIM_FAULT": "mm-scale"})
    assert done.returncode == 0, done.stderr
    assert "planted the fault mm-scale" in done.stderr and "4.0400" in done.stdout


@pytest.mark.slow
def test_diff_names_a_dozen_of_faults(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "ci/diff_faults.py"), "--site", str(site), "--only=-not-awaited"]
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


@pytest.mark.slow
def test_diff_in_fp16_names_a_fault_below_the_bands_of_tensors(site: Path, tmp_path: Path) -> None:
    code = "import json, sys; from pathlib import Path; import diff_faults as made; folder = Path(sys.argv[1]); "
    code += "made.write_rows(folder / 'rows.jsonl'); models = made.write_models(folder, 'llama', 0); "
    code += "print(json.dumps(made.describe_case(folder, models, 'sft', 0, 'fp16')['settings']))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_")}
    environment = clean | {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT), str(ROOT / "ci")))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=tmp_path)

    recipe = run("-c", code, str(tmp_path)).stdout.splitlines()[-1]  # DeepSpeed logs to standard output
    (tmp_path / "recipe.yaml").write_text(recipe)
    environment |= {"RLHF_GAUDI_SIM": "1", "PT_HPU_LAZY_MODE": "1"}
    diff = ("-m", "rlhf", "accelerators", "diff", "hpu", "hpu", "--config", str(tmp_path / "recipe.yaml"))
    options = ("--stages", "sft", "--steps", "1", "--operators", "--json")
    done = run(*diff, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["a"]["unit"] == "float16"
    done = run(*diff, *options, "--variable-b", "RLHF_GAUDI_SIM_FAULT=mm-scale")
    assert done.returncode == 3, done.stderr[-2000:]
    finding = json.loads(done.stdout)["finding"]
    assert finding["differences"] == []  # 1 % is less than what 24 roundings to fp16 make of a step
    assert (finding["faults"][0]["operator"], finding["faults"][0]["phase"]) == ("aten::mm", "scores")
    assert finding["faults"][0]["value"] == pytest.approx(1.01 * finding["faults"][0]["truth"], rel=1e-3)
