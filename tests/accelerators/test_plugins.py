"""What users see with good and bad plugins installed: the real command line, in separate processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.accelerators import fake_plugins, nvml

LIST = ("accelerators", "list", "--json")


@pytest.fixture
def rlhf(run_python):
    """Run a command in a process that has imported nothing."""
    return lambda *arguments, **options: run_python("-m", "rlhf", *arguments, **options)


@pytest.fixture
def fork(install, forks):
    """Run a command with a plugin in a process that has imported torch."""

    def run(*arguments: str, plugin: str):
        environment = {"PYTHONPATH": str(install(plugin)), "RLHF_PLUGINS": ""}
        return forks.run(*arguments, timeout=60, environment=environment)

    return run


@pytest.fixture
def refusal(rlhf, tmp_path: Path):
    """Return the one line with which a run is refused."""

    def run(*arguments: str, start=rlhf, **options) -> str:
        output = tmp_path / "run"
        done = start("--output", str(output), *arguments, **options)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert not output.exists()
        return done.stderr

    return run


def choice(run_python, wish: str, plugins=(), env=None) -> str:
    code = f"import accelerators; print(accelerators.select({wish!r}).name)"
    done = run_python("-c", code, plugins=plugins, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def idle_gpus(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with two GPUs and a torch that cannot use them."""
    folder = tmp_path / "machine"
    folder.mkdir()
    nvml.install_torch(nvml.install(folder, "A100", "A100"), "2.13.0+cpu")
    return {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "0,1"}  # this suite hides real ones


def test_auto_refuses_the_cpu_next_to_idle_gpus(refusal, rlhf, run_python, idle_gpus):
    line = refusal(env=idle_gpus)
    assert "cuda (2 x NVIDIA A100-SXM4-80GB): torch 2.13.0+cpu is built without CUDA" in line
    assert line.endswith("; or select the CPU with --accelerator cpu\n")
    assert choice(run_python, "auto", env={**idle_gpus, "RLHF_ACCELERATOR": "cpu"}) == "cpu"
    assert choice(run_python, "auto", env={**idle_gpus, "CUDA_VISIBLE_DEVICES": ""}) == "cpu"  # the user's wish
    (line,) = [
        line for line in rlhf("accelerators", "list", "--tsv", env=idle_gpus).stdout.splitlines() if "cuda" in line
    ]
    columns = [part.strip() for part in line.split("\t")]
    assert columns[:3] == ["cuda", "not available", "2 x NVIDIA A100-SXM4-80GB"]
    assert columns[-1] == (
        "present, but torch 2.13.0+cpu is built without CUDA; install torch's build for CUDA 12.6 (2.14 or earlier)"
    )


def test_cpu_is_chosen_without_plugins_and_hardware(rlhf, run_python):
    entries = json.loads(rlhf(*LIST).stdout)
    assert {entry["name"]: entry["available"] for entry in entries} == {"cpu": True, "cuda": False, "hpu": False}
    assert {entry["distribution"] for entry in entries} == {"rlhf"}
    assert not any(entry["present"] for entry in entries if entry["name"] != "cpu")
    assert all(entry["reason"] for entry in entries)
    assert choice(run_python, "auto") == "cpu"


@pytest.mark.parametrize(("name", "reason"), [("cuda", "no NVIDIA driver"), ("hpu", "no Gaudi driver")])
def test_built_in_backend_says_what_is_missing(refusal, forks, name, reason):
    line = refusal("--accelerator", name, start=forks.run, timeout=60)
    assert f"accelerator '{name}': not available here: {reason}" in line
    assert line.rstrip().endswith("available: cpu")
    done = forks.run("accelerators", "explain", name, timeout=60)
    assert done.returncode == 2 and reason in done.stderr and len(done.stderr.splitlines()) == 1


def test_no_bad_plugin_stops_the_list(rlhf):
    bad = sorted(fake_plugins.SOURCES.keys() - fake_plugins.IMPORT_TORCH - {"halves"})
    done = rlhf(*LIST, plugins=["good", *bad], env={"RLHF_PROBE_TIMEOUT": "2"})
    assert done.returncode == 0, done.stderr
    entries = {entry["distribution"]: entry for entry in json.loads(done.stdout)}
    states = {name: entry["available"] for name, entry in entries.items() if not entry["broken"] and name != "rlhf"}
    assert states == {"rlhf-good": True, "rlhf-absent": False, "rlhf-twin-a": True, "rlhf-twin-b": True}
    reasons = {name: entry["reason"] for name, entry in entries.items()}
    assert reasons["rlhf-absent"] == "no file /dev/absent0"
    assert reasons["rlhf-hangs"].startswith("its import did not answer within 2 s")
    assert "a_library_that_nobody_has" in reasons["rlhf-import-fails"]
    assert "ZeroDivisionError" in reasons["rlhf-probe-raises"]
    assert "version 99" in reasons["rlhf-future-api"]
    assert "rlhf_acelerators" in reasons["rlhf-misspelt-hook"]


def test_auto_refuses_the_cpu_next_to_a_broken_plugin(refusal, run_python):
    line = refusal(plugins=["import_fails"])
    assert "rlhf-import-fails 1.2.3 is broken" in line and "--accelerator cpu" in line
    assert choice(run_python, "auto", ["import_fails"], env={"RLHF_PLUGINS": "none"}) == "cpu"
    assert choice(run_python, "auto", ["good", "import_fails"]) == "good"
    assert "RLHF_PROBE_TIMEOUT=soon" in refusal(env={"RLHF_PROBE_TIMEOUT": "soon"})


def test_plugin_that_imports_torch_works_with_a_warning(rlhf):
    lines = rlhf("accelerators", "list", "--tsv", plugins=["early_torch", "good"]).stdout.splitlines()
    (early,) = [line for line in lines if "early" in line]
    (good,) = [line for line in lines if "good" in line]
    assert "(warning: it imports torch when it is loaded" in early
    assert "warning" not in good


def test_explain_shows_the_plugins_device_and_kernel(fork):
    facts = json.loads(fork("accelerators", "explain", "good", "--json", plugin="good").stdout)
    peaks = {"peak_flops": {}, "peak_bandwidth": 0.0}
    assert facts["device"] == {"model": "Good One", "count": 2, "software": "none", **peaks, "uuids": []}
    assert (facts["health"], facts["allocator"]) == ({"readings": {}, "problems": [], "errors": {}}, "")
    assert [kernel["name"] for kernel in facts["operations"]["attention"]["candidates"]] == [
        *("good-attention", "sdpa", "eager")
    ]
    done = fork("accelerators", "explain", "good", "--tsv", plugin="good")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert ["attention", "good-attention", "yes"] in [row[:3] for row in rows]
    assert not any("no trainer asks for it" in row[-1] for row in rows)


def test_explain_says_why_other_kernels_are_not_used(fork):
    facts = json.loads(fork("accelerators", "explain", "cpu", "--json", plugin="good").stdout)
    used, *portable, other = facts["operations"]["attention"]["candidates"]
    reason = "composed has the higher priority; this one is for models that it does not serve"
    assert {kernel["name"]: kernel["reason"] for kernel in portable} == {"sdpa": reason, "eager": reason}
    assert (used["name"], used["used"]) == ("composed", True)
    assert (other["name"], other["used"], other["reason"]) == ("good-attention", False, "only on a Good One")


def test_plugin_may_object_to_a_run(fork, tmp_path):
    done = fork("--output", str(tmp_path / "run"), "--accelerator", "good", "--seed", "13", plugin="good")
    assert done.returncode == 2
    assert "a Good One does not run with seed 13: choose another seed" in done.stderr
    assert not (tmp_path / "run").exists()


def test_discovery_selection_and_listing_import_no_torch(run_python):
    code = (
        "import sys, accelerators\n"
        "accelerators.available(); accelerators.select(); accelerators.Precision; accelerators.ShapePolicy('static')\n"
        "import rlhf.cli.accelerators\n"
        "rlhf.cli.accelerators.list_backends()\n"
        "print(sorted({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = run_python("-c", code, plugins=["good", "absent"])
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
