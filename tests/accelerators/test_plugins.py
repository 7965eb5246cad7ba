"""What users see with good and bad plugins installed: real distributions, the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf.cli.accelerators import _print_facts
from tests.accelerators import nvml

LIST = ("accelerators", "list", "--json")
BAD = ("import_fails", "probe_raises", "future_api", "misspelt_hook", "twin_a", "twin_b")


@pytest.fixture
def rlhf(run_python, tmp_path: Path):
    def run(*arguments: str, plugins=(), env=None):
        return run_python("-m", "rlhf", *arguments, plugins=plugins, env=env)

    return run


@pytest.fixture
def refusal(rlhf, tmp_path: Path):
    """The one line with which a run is refused."""

    def run(*arguments: str, plugins=(), env=None) -> str:
        output = tmp_path / "run"
        done = rlhf("--output", str(output), *arguments, plugins=plugins, env=env)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert not output.exists()
        return done.stderr

    return run


def choice(run_python, wish: str, plugins, env=None) -> str:
    code = f"import accelerators; print(accelerators.select({wish!r}).name)"
    done = run_python("-c", code, plugins=plugins, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def operations_printed(facts, capsys) -> tuple[set[str], set[str]]:
    """Operations that `explain` prints as used, and those that it says no trainer asks for."""
    _print_facts(facts)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("\t") for line in lines[lines.index("operation\timplementation\tused\treason") + 1 :]]
    used = {operation for operation, _, used, _ in rows if used == "yes"}
    return used, {operation for operation, *_, reason in rows if reason.startswith("no trainer asks for it; ")}


@pytest.fixture
def idle_gpus(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with two GPUs and a torch that cannot use them."""
    folder = tmp_path / "machine"
    folder.mkdir()
    nvml.install_torch(nvml.install(folder, "A100", "A100"), "2.13.0+cpu")
    return {"PYTHONPATH": str(folder)}


def test_auto_refuses_to_train_on_the_cpu_beside_gpus_that_cannot_be_used(refusal, rlhf, run_python, idle_gpus):
    assert refusal(env=idle_gpus) == (
        "rlhf: error: only the cpu is left, while a device is there that cannot be used: cuda (2 x NVIDIA "
        "A100-SXM4-80GB): torch 2.13.0+cpu is built without CUDA; install a build of torch for CUDA 12; "
        "or ask for the CPU with --accelerator cpu\n"
    )
    assert choice(run_python, "cpu", (), idle_gpus) == "cpu"
    assert choice(run_python, "auto", (), {**idle_gpus, "RLHF_ACCELERATOR": "cpu"}) == "cpu"
    assert choice(run_python, "auto", (), {**idle_gpus, "CUDA_VISIBLE_DEVICES": ""}) == "cpu"  # the user's wish
    (line,) = [line for line in rlhf("accelerators", "list", env=idle_gpus).stdout.splitlines() if "cuda" in line]
    columns = [part.strip() for part in line.split("\t")]
    assert columns[:3] == ["cuda", "not available", "2 x NVIDIA A100-SXM4-80GB"]
    assert columns[-1] == "present, but torch 2.13.0+cpu is built without CUDA; install a build of torch for CUDA 12"
    listed = {entry["name"]: entry for entry in json.loads(rlhf(*LIST, env=idle_gpus).stdout)}
    assert {name: entry["present"] for name, entry in listed.items()} == {"cpu": True, "cuda": True, "hpu": False}


def test_without_plugins_and_other_hardware_the_built_in_cpu_is_chosen(rlhf, run_python):
    listed = json.loads(rlhf("accelerators", "list", "--json").stdout)
    assert {entry["name"]: entry["available"] for entry in listed} == {"cpu": True, "cuda": False, "hpu": False}
    assert {entry["distribution"] for entry in listed} == {"rlhf"}
    assert all(entry["reason"] for entry in listed)
    assert choice(run_python, "auto", ()) == "cpu"


@pytest.mark.parametrize(("name", "reason"), [("cuda", "no NVIDIA driver"), ("hpu", "no Gaudi driver")])
def test_a_built_in_backend_without_its_hardware_says_what_is_missing(refusal, rlhf, name, reason):
    line = refusal("--accelerator", name)
    assert f"accelerator '{name}': not available here: {reason}" in line
    assert line.rstrip().endswith("available: cpu")
    for command in ("explain", "check"):
        done = rlhf("accelerators", command, name)
        assert done.returncode == 2
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_probe_that_hangs_is_reported_and_stops_nobody(rlhf, refusal):
    limit = {"RLHF_PROBE_TIMEOUT": "0.1"}
    listed = {entry["name"]: entry for entry in json.loads(rlhf(*LIST, plugins=["broken_slow"], env=limit).stdout)}
    assert listed["cpu"]["available"]
    assert listed["slow-probe"]["broken"]
    assert "did not answer within 0.1 s" in listed["slow-probe"]["reason"]
    assert "did not answer within 0.1 s" in refusal("--accelerator", "slow-probe", plugins=["broken_slow"], env=limit)
    assert "RLHF_PROBE_TIMEOUT=soon" in refusal(env={"RLHF_PROBE_TIMEOUT": "soon"})


def test_a_plugin_that_hangs_as_it_is_imported_and_one_that_answers_rubbish_stop_nobody(rlhf, capsys):
    plugins, limit = ["hangs", "rubbish"], {"RLHF_PROBE_TIMEOUT": "2"}
    done = rlhf(*LIST, plugins=plugins, env=limit)
    assert done.returncode == 0, done.stderr
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert listed["cpu"]["available"]
    assert listed["hangs"]["reason"].startswith("its import did not answer within 2 s")
    assert listed["rubbish"]["reason"] == "its probe failed (TypeError: a NoneType instead of Probe)"
    assert set(done.stderr.split()) == {"shouting"}
    done = rlhf("accelerators", "explain", "cpu", "--json", plugins=plugins, env=limit)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["operations"]["attention"]["implementation"] == "composed"
    reasons = {found["name"]: found["reason"] for found in facts["operations"]["adamw"]["candidates"]}
    assert reasons["yes"] == "its check failed (TypeError: a bool instead of Support)"
    assert reasons["fast"].startswith("its factory failed (ImportError: libfast.so: no such file)")
    assert "adamw: fast is not used: its factory failed" in done.stderr
    used, unasked = operations_printed(facts, capsys)
    assert used == {
        "adamw",
        "adamw_cpu_offload",
        "clip_grad_norm",
        "attention",
        "quantized_weights",
        "inference_weights",
        "fused_layers",
    }
    assert unasked == set()


def test_a_plugin_that_imports_torch_at_discovery_works_with_a_warning(rlhf):
    plugins, patient = ["broken_discovery", "good"], {"RLHF_PROBE_TIMEOUT": "60"}
    listed = {entry["name"]: entry for entry in json.loads(rlhf(*LIST, plugins=plugins, env=patient).stdout)}
    assert listed["early-torch"]["available"]
    assert "imports torch when it is loaded" in listed["early-torch"]["warning"]
    assert listed["good"]["warning"] is None
    lines = rlhf("accelerators", "list", plugins=plugins, env=patient).stdout.splitlines()
    (line,) = [line for line in lines if "early" in line]
    assert "(warning: it imports torch when it is loaded" in line


def test_a_good_plugin_wins_by_priority_and_its_backend_can_be_created(rlhf, run_python):
    assert choice(run_python, "auto", ["good"]) == "good"
    facts = json.loads(rlhf("accelerators", "explain", "good", "--json", plugins=["good"]).stdout)
    assert facts["device"] == {"model": "Good One", "count": 2, "software": "none", "peak_flops": {}}
    assert facts["operations"]["attention"]["implementation"] == "good-attention"
    assert [found["name"] for found in facts["operations"]["attention"]["candidates"]] == [
        "good-attention",
        "sdpa",
        "eager",
    ]


def test_a_kernel_for_another_backend_says_why_it_is_not_used(rlhf):
    facts = json.loads(rlhf("accelerators", "explain", "cpu", "--json", plugins=["good"]).stdout)
    used, *portable, other = facts["operations"]["attention"]["candidates"]
    reason = "composed has the higher priority; this one is for models that it does not serve"
    assert {offer["name"]: offer["reason"] for offer in portable} == {"sdpa": reason, "eager": reason}
    assert (used["name"], used["used"]) == ("composed", True)
    assert (other["name"], other["used"], other["reason"]) == ("good-attention", False, "only on a Good One")


def test_no_bad_plugin_stops_the_list(rlhf):
    done = rlhf("accelerators", "list", "--json", plugins=["good", "absent", *BAD])
    assert done.returncode == 0, done.stderr
    listed = {(entry["name"], entry["distribution"]): entry for entry in json.loads(done.stdout)}
    assert listed["good", "rlhf-good"]["available"]
    assert not listed["absent", "rlhf-absent"]["available"]
    assert listed["absent", "rlhf-absent"]["reason"] == "no file /dev/absent0"
    reasons = {distribution: entry["reason"] for (_, distribution), entry in listed.items() if entry["broken"]}
    assert "a_library_that_nobody_has" in reasons["rlhf-import-fails"]
    assert "OSError: the driver does not answer" in reasons["rlhf-probe-raises"]
    assert "version 99" in reasons["rlhf-future-api"]
    assert "rlhf supports 2" in reasons["rlhf-future-api"]
    assert "rlhf_acelerators" in reasons["rlhf-misspelt-hook"]


def test_the_plain_list_has_a_line_for_each_plugin(rlhf):
    lines = rlhf("accelerators", "list", plugins=["import_fails"]).stdout.splitlines()
    states = [line.split("\t")[:2] for line in lines[1:]]
    assert states[0] == ["cpu", "available"]
    assert states[-1] == ["import-fails", "broken"]


@pytest.mark.parametrize(
    ("plugin", "name", "reason"),
    [
        ("import_fails", "import-fails", "ModuleNotFoundError: No module named 'a_library_that_nobody_has'"),
        ("probe_raises", "shaky", "its probe failed (OSError: the driver does not answer)"),
        ("future_api", "future", "version 99 of the accelerator interface; rlhf supports 2"),
        ("absent", "absent", "not available here: no file /dev/absent0"),
    ],
)
def test_a_named_backend_that_cannot_be_used_is_an_error_with_reason_and_alternatives(refusal, plugin, name, reason):
    line = refusal("--accelerator", name, plugins=[plugin])
    assert reason in line
    assert line.rstrip().endswith("cpu")


def test_an_unknown_name_is_an_error_that_names_the_nearest(refusal):
    line = refusal("--accelerator", "goood", plugins=["good"])
    assert "'goood'" in line
    assert "did you mean 'good'?" in line
    assert "available: good, cpu" in line


def test_two_plugins_with_one_name_are_an_error_that_names_both(refusal, run_python):
    for wish in ("twin", "auto"):
        line = refusal("--accelerator", wish, plugins=["twin_a", "twin_b"])
        assert "rlhf-twin-a 1.2.3 and rlhf-twin-b 1.2.3" in line
    assert choice(run_python, "cpu", ["twin_a", "twin_b"]) == "cpu"


@pytest.mark.parametrize("plugin", ["import_fails", "probe_raises", "future_api", "misspelt_hook"])
def test_auto_does_not_fall_back_to_the_cpu_while_a_plugin_is_broken(refusal, run_python, plugin):
    line = refusal(plugins=[plugin])
    assert f"rlhf-{plugin.replace('_', '-')} 1.2.3 is broken" in line
    assert "--accelerator cpu" in line
    assert choice(run_python, "cpu", [plugin]) == "cpu"
    assert choice(run_python, "auto", [plugin], env={"RLHF_PLUGINS": "none"}) == "cpu"


def test_a_broken_plugin_does_not_stand_in_the_way_of_a_better_backend(run_python):
    assert choice(run_python, "auto", ["good", "import_fails"]) == "good"


def test_an_incomplete_backend_is_refused_with_the_missing_methods(rlhf):
    done = rlhf("accelerators", "explain", "unfinished", plugins=["unfinished"])
    assert done.returncode == 2
    assert "rlhf-unfinished 1.2.3" in done.stderr
    assert "bind, info, precision" in done.stderr


def test_a_plugin_can_object_to_a_run(refusal, tmp_path):
    compiled = tmp_path / "compiled"
    line = refusal(
        "--accelerator", "good", "--seed", "13", plugins=["good"], env={"TORCH_EXTENSIONS_DIR": str(compiled)}
    )
    assert "a Good One does not run with seed 13: choose another seed" in line
    assert not compiled.exists(), "DeepSpeed's collective for CPUs would take a minute"


def test_discovery_selection_and_listing_import_no_torch(run_python):
    code = (
        "import sys, accelerators\n"
        "accelerators.available(); accelerators.select(); accelerators.Precision; accelerators.ShapePolicy('static')\n"
        "import rlhf.cli.accelerators\n"
        "rlhf.cli.accelerators.list_backends()\n"
        "print(sorted({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = run_python("-c", code, plugins=["good", "absent", "unfinished"])
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
