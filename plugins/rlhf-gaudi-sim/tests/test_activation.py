"""When the simulation is on and when not, what then is found, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from accelerators.backends.cpu import info as cpu_info


def listed(python: Run, **how: Any) -> dict[str, dict[str, Any]]:
    """The backends that `rlhf accelerators list` shows, by name."""
    done = python("-m", "rlhf", "accelerators", "list", "--json", **how)
    assert done.returncode == 0, done.stderr
    return {report["name"]: report for report in json.loads(done.stdout)}


def test_without_the_variable_nothing_happens(python: Run) -> None:
    reports = listed(python, simulated=False)
    assert not reports["hpu"]["available"]
    assert "gaudi-sim" not in reports


def test_hpu_backend_finds_eight_simulated_cards(python: Run) -> None:
    report = listed(python, fresh=True)["hpu"]
    assert report["available"]
    assert (report["devices"], report["model"]) == (8, "Gaudi2")
    assert report["distribution"] == "rlhf"
    assert "simulation" in report["reason"]


@pytest.mark.parametrize(
    ("variables", "devices"),
    [({"RLHF_GAUDI_SIM_CARDS": "2"}, 2), ({"RLHF_GAUDI_SIM_CARDS": "4", "HABANA_VISIBLE_MODULES": "1,3"}, 2)],
)
def test_cards_are_as_many_as_asked_for(python: Run, variables: dict[str, str], devices: int) -> None:
    assert listed(python, env=variables)["hpu"]["devices"] == devices


def test_cards_that_are_no_number_are_one_clear_line(python: Run) -> None:
    report = listed(python, env={"RLHF_GAUDI_SIM_CARDS": "few"})["hpu"]
    assert not report["available"]
    assert report["reason"].endswith("RLHF_GAUDI_SIM_CARDS=few: not a number of cards")


def test_a_value_that_says_neither_yes_nor_no_is_an_error(python: Run) -> None:
    report = listed(python, env={"RLHF_GAUDI_SIM": "on"})["gaudi-sim"]
    assert report["broken"]
    assert "RLHF_GAUDI_SIM=on: neither 0 nor 1" in report["reason"]
    done = python("-m", "rlhf", "accelerators", "explain", "hpu", env={"RLHF_GAUDI_SIM": "on"})
    assert done.returncode == 2
    assert "RLHF_GAUDI_SIM=on: neither 0 nor 1" in done.stderr


def test_a_real_bridge_is_not_replaced(python: Run, site: Path, tmp_path: Path) -> None:
    package = tmp_path / "habana_frameworks"
    package.mkdir()
    (package / "__init__.py").touch()
    paths = {"PYTHONPATH": f"{site}:{tmp_path}"}
    refusal = listed(python, env=paths)["gaudi-sim"]
    assert refusal["broken"]
    assert f"rlhf-gaudi-sim 0.1.0 will not stand in for the real habana_frameworks in {package}" in refusal["reason"]

    code = "import gaudi_sim.plugin as plugin; print(*plugin.rlhf_check_run(None, {}))"
    objection = python("-c", code, env=paths).stdout
    assert "the real habana_frameworks" in objection
    assert "unset RLHF_GAUDI_SIM to use the Gaudi" in objection

    done = python("-c", "import gaudi_sim; gaudi_sim.install()", simulated=False, env=paths)
    assert done.returncode
    assert "AcceleratorError: rlhf-gaudi-sim 0.1.0 will not stand in" in done.stderr


def test_nothing_is_imported_or_compiled_before_it_is_needed(python: Run) -> None:
    code = """
import sys
import gaudi_sim, gaudi_sim.plugin
assert gaudi_sim.is_installed()
gaudi_sim.install()  # twice is as good as once
assert not {"torch", "habana_frameworks"} & set(sys.modules)
assert gaudi_sim.report() == {}
"""
    done = python("-c", code, fresh=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_install_works_in_a_process_that_has_imported_torch(python: Run) -> None:
    code = """
import gaudi_sim, sys
assert "torch" in sys.modules
import torch
assert not gaudi_sim.is_installed()
gaudi_sim.install()
import habana_frameworks.torch
print(float(torch.ones(3, device="hpu").sum()))
"""
    done = python("-c", code, simulated=False)
    assert (done.stdout, done.returncode) == ("3.0\n", 0), done.stderr


def test_process_that_looked_for_devices_gets_one_clear_line(python: Run) -> None:
    code = """
import torch
torch.ones(1, requires_grad=True).sum().backward()
import gaudi_sim
gaudi_sim.install()
import habana_frameworks.torch
"""
    done = python("-c", code, simulated=False)
    assert done.returncode
    assert "PyTorch has looked for devices in this process already" in done.stderr


def test_torch_loads_the_device_where_the_simulation_is_on(python: Run) -> None:
    code = "import gaudi_sim.plugin, torch; print(torch.accelerator.current_accelerator())"
    assert python("-c", code, fresh=True).stdout == "hpu\n"
    # The function that torch calls, in processes that have imported torch.
    code = f"from gaudi_sim import activation, plugin; activation.load_with_torch(); {code}"
    assert python("-c", code).stdout == "hpu\n"
    assert python("-c", code, env={"RLHF_ACCELERATOR": "cpu"}).stdout == "None\n"
    assert python("-c", code, simulated=False).stdout == "None\n"


@pytest.mark.parametrize(("wish", "threads"), [("", 1), ("7", 7)])
def test_cards_of_one_machine_share_its_cores(python: Run, wish: str, threads: int) -> None:
    code = (
        "import torch; torch.set_num_threads(7); import gaudi_sim.plugin, habana_frameworks.torch; "
        "print(torch.get_num_threads())"
    )
    done = python("-c", code, env={"OMP_NUM_THREADS": wish, "LOCAL_WORLD_SIZE": str(cpu_info.cores())})
    assert int(done.stdout) == threads, done.stderr


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_the_first_rank_says_once_that_it_is_a_simulation(python: Run, rank: str, times: int) -> None:
    code = "import gaudi_sim.plugin; import habana_frameworks.torch.core; import habana_frameworks.torch.hpu"
    done = python("-c", code, env={"RANK": rank})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this is a simulation of a Gaudi on the CPU") == times


def test_a_device_that_cannot_be_compiled_is_one_clear_line(python: Run) -> None:
    done = python("-m", "rlhf", "accelerators", "explain", "hpu", env={"RLHF_GAUDI_SIM_CACHE": "/proc/cache"})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlhf: error: gaudi-sim: the compiled device cannot be kept in /proc/cache")
    assert line.endswith("set RLHF_GAUDI_SIM_CACHE to a folder that can be written")


def test_hl_smi_shows_version_and_refuses_unknown_options(site: Path) -> None:
    hl_smi = site / "gaudi_sim" / "bin" / "hl-smi"
    (installed,) = (
        distribution for distribution in distributions(path=[str(site)]) if distribution.name == "rlhf-gaudi-sim"
    )
    done = subprocess.run([hl_smi, "-L"], capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 8
    assert all(f"rlhf-gaudi-sim {installed.version} (a simulation" in line for line in done.stdout.splitlines())
    done = subprocess.run([hl_smi, "--reset"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "not: --reset" in done.stderr
