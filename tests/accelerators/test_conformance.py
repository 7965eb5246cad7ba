"""The conformance kit: a good backend passes, and each broken one fails the check of its fault."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import accelerators
from accelerators import AcceleratorError, Precision
from accelerators.testing import CHECKS, Result, processes, run
from accelerators.testing.checks import Subject
from tests.accelerators.broken import BROKEN

IN_PROCESSES = [
    ("early_torch", "early-torch", "discovery", "importing rlhf_early_torch imports torch"),
    ("late_torch", "late-torch", "probe", "the probe imports torch"),
    ("broken", "ProbeOpensDevice", "probe", "the device: PluginError: accelerator ProbeOpensDevice of"),
    pytest.param("broken", "SlowProbe", "probe", "the probe took 0.5 s, expected at most", marks=pytest.mark.slow),
    pytest.param("broken", "ProbeNumbersDevices", "probe", "names the device 'chip 0'", marks=pytest.mark.slow),
    pytest.param("broken", "DeepSpeedName", "deepspeed", "device is 'cpu', expected 'chip'", marks=pytest.mark.slow),
    pytest.param("broken", "OtherDistBackend", "collectives", "two ranks: rank ", marks=pytest.mark.slow),
    pytest.param("broken", "DeepSpeedClips", "deepspeed-step", "ZeRO 0 in fp32: loss", marks=pytest.mark.slow),
    pytest.param("broken", "CompilesLate", "run", "sft: compilations rose from 3 to 4", marks=pytest.mark.slow),
]
"""Plugin, backend, check and part of its line, for checks that start processes."""


@pytest.fixture
def installed(install, monkeypatch):
    """Install a plugin for this process and those that it starts."""

    def use(name: str) -> None:
        monkeypatch.delenv("RLHF_PLUGINS", raising=False)
        monkeypatch.syspath_prepend(install(name))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(install(name)), os.environ.get("PYTHONPATH", "")]))

    return use


@pytest.fixture
def check(run_python):
    """Run `rlhf accelerators check`."""
    return lambda *arguments, **options: run_python("-m", "rlhf", "accelerators", "check", *arguments, **options)


def run_check(backend: str, name: str) -> Result:
    """Run a check in a thread: after an allocation has failed, glibc gives its thread another heap."""
    with ThreadPoolExecutor(1) as threads:
        (result,) = threads.submit(run, backend, [name]).result()
    return result


@pytest.mark.parametrize(
    ("name", "line", "methods"),
    [pytest.param(name, *case, id=f"{name}: {case[0]}") for name, cases in BROKEN.items() for case in cases],
)
def test_broken_backend_fails_its_check(offered, name, line, methods):
    offered(**methods)
    result = run_check("npu", name)
    assert result.result == "failed"
    assert line in result.reason


@pytest.mark.parametrize(("plugin", "name", "check", "line"), IN_PROCESSES)
def test_broken_backend_fails_check_in_processes(installed, monkeypatch, plugin, name, check, line):
    monkeypatch.setattr(processes, "PROBE_SECONDS", 0.2)
    installed(plugin)
    results = run(name, [check])
    assert {result.result for result in results} == {"failed"}
    assert line in results[0].reason


def test_every_check_has_a_broken_backend():
    cases = [getattr(case, "values", case) for case in IN_PROCESSES]
    assert {*BROKEN, *(check for _, _, check, _ in cases)} == {check.name for check in CHECKS}


def test_page_for_authors_names_every_check():
    page = (Path(__file__).parents[2] / "docs" / "write-a-backend.md").read_text()
    names = re.findall(r"`([a-z-]+)`", page.split("Names for `--only`", 1)[1].split("\n\n", 1)[0])
    assert names == list(dict.fromkeys(check.name for check in CHECKS))


@pytest.mark.slow
def test_ranks_are_not_checked_on_one_device(installed):
    installed("broken")
    (result,) = run("OneDevice", ["collectives"])
    assert result.result == "skipped"
    assert "a second rank cannot share it: AcceleratorError: local rank 1: there is one device" in result.reason


def test_lazy_backend_may_work_at_step_boundaries(offered):
    offered(step_boundary=lambda self, tag: self.synchronize(), is_lazy=lambda self: True)
    (result,) = run("npu", ["step-boundary"])
    assert (result.result, result.reason) == ("passed", "")


@pytest.mark.parametrize("name", [*BROKEN, "discovery", "probe"])
def test_cpu_passes_check(name):
    result = run_check("cpu", name)
    assert result.result == "passed" or (name == "memory" and result.result == "skipped"), result.reason


@pytest.mark.parametrize("name", ["quantized-weights", "attention", "adamw", "precision", "inference-weights"])
def test_chip_with_bf16_alone_passes_check(offered, name):
    def precision(self, wish="auto"):
        if wish in ("auto", "bf16"):
            return Precision(torch.bfloat16, "bf16", "the only one")
        raise AcceleratorError(f"precision {wish}: it multiplies bf16 alone; use auto or bf16")

    offered(precision=precision)
    result = run_check("npu", name)
    assert result.result == "passed", result.reason


@pytest.mark.slow
def test_chip_with_bf16_alone_passes_every_check(check):
    done = check("HalfAlone", "--json", plugins=["broken"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert {result["result"] for result in json.loads(done.stdout)} <= {"passed", "skipped"}


@pytest.mark.slow
def test_cpu_passes_every_check_and_leaves_no_rows(check, tmp_path: Path):
    done = check("cpu", "--json", env={"RANK": "7", "MASTER_PORT": "1", "HF_DATASETS_CACHE": str(tmp_path / "rows")})
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["check"]: result for result in json.loads(done.stdout)}
    reasons = {name: result["reason"] for name, result in results.items() if result["result"] != "passed"}
    assert set(reasons) <= {"memory"}, reasons  # some systems let no process reset its peak
    assert list(results) == list(map(str, CHECKS))
    assert results["run"]["reason"] == "nothing is compiled here"
    assert [*tmp_path.iterdir()] == []
    assert all(result["title"] and result["seconds"] >= 0 for result in results.values())


def test_table_shows_no_output_of_the_backend(forks, install):
    only = ("--tsv", "--only", "memory", "--only", "shapes", "--only", "offload")
    environment = {"PYTHONPATH": str(install("broken")), "RLHF_PLUGINS": ""}
    done = forks.run("accelerators", "check", "Loud", *only, timeout=60, environment=environment)
    assert done.returncode == 0, done.stderr
    header, *rows = (line.split("\t") for line in done.stdout.splitlines())
    assert header == ["check", "result", "seconds", "what", "reason"]
    assert [row[0] for row in rows] == ["shapes", "memory", "offload"]
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["shapes", "memory", "offload"]


def test_kit_keeps_variables_that_a_plugin_sets_while_loading(misbehaved, monkeypatch):
    """The simulated Gaudi puts its `hl-smi` on the PATH."""

    def load() -> SimpleNamespace:
        os.environ["PLUGIN_TOOLS"] = "after"
        return SimpleNamespace()

    monkeypatch.setenv("PLUGIN_TOOLS", "before")
    misbehaved(load)
    with Subject("cpu"):
        assert os.environ["PLUGIN_TOOLS"] == "after"


def test_kit_needs_no_pytest(monkeypatch):
    monkeypatch.setattr(accelerators, "testing", accelerators.testing)
    for name in [name for name in sys.modules if name.startswith("accelerators.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pytest", None)
    (result,) = importlib.import_module("accelerators.testing").run("cpu", ["shapes"])
    assert result.result == "passed"


def test_failed_check_gives_exit_code_1(offered):
    from typer.testing import CliRunner

    from rlhf.cli.app import app

    offered(**BROKEN["adamw"][0][1])
    done = CliRunner().invoke(app, ["accelerators", "check", "npu", "--only", "adamw", "--only", "shapes", "--json"])
    assert done.exit_code == 1
    assert [result["result"] for result in json.loads(done.stdout)] == ["passed", "failed"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing"], "no such accelerator; available: cpu"),
        (["cpu", "--only", "precisoin"], "no check is named 'precisoin'; did you mean 'precision'?"),
    ],
)
def test_what_cannot_be_checked_is_an_error_in_one_line(forks, arguments, line):
    done = forks.run("accelerators", "check", *arguments, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_plugins_tests_inherit_the_checks(forks, install, tmp_path: Path):
    (tmp_path / "test_chip.py").write_text(
        "from accelerators.testing import Conformance\nclass TestChip(Conformance):\n    name = 'CompilesLate'\n"
    )
    arguments = ("-q", "-p", "no:cacheprovider", "-k", "step-boundary or shapes", str(tmp_path))
    environment = {"PYTHONPATH": str(install("broken")), "RLHF_PLUGINS": ""}
    done = forks.python("-m", "pytest", *arguments, timeout=60, environment=environment)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "AssertionError: step_boundary compiles a graph; expected nothing" in done.stdout
