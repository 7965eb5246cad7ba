"""The conformance kit: a good backend passes, and each broken one fails the check that is there to find it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

BROKEN = [
    ("flag-is-text", "types", "pins_memory() returns 'no', expected bool"),
    ("unknown-collectives", "types", "dist_backend() returns 'hcll', expected one of torch's: "),
    ("unknown-operation-absent", "types", "absent names graph_captur, expected some of adamw, "),
    (
        "factory-raises",
        "operations",
        "adamw (fast) is reported as supported, but its factory failed (ImportError: libfast",
    ),
    ("bucket-not-idempotent", "shapes", "bucket(1) is 2, but bucket(2) is 3"),
    ("bucket-not-monotone", "shapes", "bucket(17) is 32, but bucket of a smaller number is 64"),
    ("bucket-too-short", "shapes", "bucket(513) is 512, expected at least 513"),
    ("bf16-in-fp32", "precision", "Precision: dtype of bf16 is torch.float32, expected torch.bfloat16"),
    ("bf16-not-told", "precision", "precision('bf16').deepspeed_config() enables nothing, expected ['bf16']"),
    ("fp32-that-rounds", "precision", "fp32: the logits of a forward and backward pass: differs by"),
    ("precision-raises-valueerror", "precision", "precision() failed (ValueError"),
    ("precision-takes-anything", "precision", "precision('fp12') is granted, expected an AcceleratorError"),
    ("auto-differs", "precision", "precision('auto') gives (torch.float32, True"),
    ("device-before-bind", "placement", "device() before bind() is cpu, expected an AcceleratorError"),
    ("nested-tensor-forgotten", "placement", "to_device leaves a tensor in a dict on cpu, not meta"),
    ("named-tuple-lost", "placement", "to_device makes a tuple of a named tuple"),
    ("seed-forgets-python", "random-numbers", "seed(7) twice: other samples of Python; expected the same"),
    ("state-not-restored", "random-numbers", "set_rng_state(rng_state()): other samples of torch on the CPU"),
    ("state-not-loadable", "random-numbers", "torch.load(weights_only=True) does not read a saved rng_state()"),
    ("memory-stands-still", "memory", "memory().allocated grew by 0 MiB with a block of 128 MiB"),
    ("memory-never-falls", "memory", "memory().allocated fell by 0 MiB when a block of 128 MiB was freed"),
    ("any-error-is-lack", "out-of-memory", "is_out_of_memory() recognizes a ValueError as out of memory"),
    ("lack-not-told", "out-of-memory", "a block of 1 PiB is refused (PluginError: accelerator lack-not-told"),
    ("boundary-waits", "step-boundary", "step_boundary calls synchronize(); expected nothing"),
    ("boundary-computes", "step-boundary", "step_boundary runs aten.zeros.default; expected nothing"),
    ("boundary-draws", "step-boundary", "step_boundary changes the state of a random number generator"),
    ("boundary-compiles", "step-boundary", "step_boundary compiles a graph; expected nothing"),
    ("capture-stale", "capture", "call 2 of 5 of a captured function, a function of its input: differs by"),
    (
        "capture-overwrites",
        "capture",
        "call 1 of 5 of a captured function, a function of its input, read after the last",
    ),
    ("capture-lets-item-through", "capture-refusal", "capture lets .item() through, expected CaptureError"),
    ("capture-other-error", "capture-refusal", "capture answers .item() with PluginError, expected CaptureError"),
    ("adamw-other-eps", "adamw", "adamw over a list of parameters: parameter 0 after 4 steps: differs by"),
    ("adamw-no-decay", "adamw", "adamw over a list of parameters: parameter 0 after 4 steps: differs by"),
    (
        "adamw-empty-group",
        "adamw",
        "adamw over groups, one of them empty failed (PluginError: adamw kernel 'broken' of rlhf-broken",
    ),
    ("offload-rounds", "offload", "a torch.float32 that comes from cpu to cpu and back has changed"),
    ("offload-not-pinned", "offload", "pins_memory() is true, but a torch.float32 on cpu cannot be page-locked"),
    (
        "host-adamw-in-bf16",
        "offload",
        "adamw_cpu_offload over a list of parameters: parameter 0 after 4 steps: differs",
    ),
    ("clip-other-norm", "clip-grad-norm", "clip_grad_norm to 1: the norm: differs by"),
    ("clip-gives-float", "clip-grad-norm", "clip_grad_norm gives 8.8"),
    ("attention-sees-padding", "attention", "whole rows: outputs: differs by"),
    ("attention-sees-empty-columns", "attention", "token 1 after them, static cache of 20: outputs: differs by"),
    ("attention-of-nothing", "attention", "as many heads of keys, whole rows: outputs of padding are not finite"),
    ("attention-mixes-groups", "attention", "grouped heads, whole rows: outputs: differs by"),
    ("attention-freezes-keys", "attention", "whole rows: gradient of keys: differs by"),
    ("weights-truncated", "quantized-weights", "192 x 128: a number comes back more than half a step off"),
    ("weights-dense", "quantized-weights", "int8 weights of 'broken', 192 x 128 take 98304 bytes, expected at most"),
    ("weights-detached", "quantized-weights", "the product has no gradient to its inputs"),
    (
        "weights-without-offset",
        "quantized-weights",
        "int4 weights of 'broken', 192 x 128, 1 rows: the product: differs",
    ),
    ("reading-leaves-a-forward", "inference-weights", "keep=True): its restore leaves 1.gate_proj.forward changed"),
    (
        "reading-rounds",
        "inference-weights",
        "keep=True): restored, 0.weight is not what it was, expected",
    ),
    ("reading-is-stale", "inference-weights", "keep=True): logits of 1 rows: differs by"),
    ("reading-sees-padding", "inference-weights", "logits of token 1 after the prompts: differs by"),
    (
        "fusing-freezes-norms",
        "fused-layers",
        "a fused model: gradient of model.layers.0.input_layernorm.weight: differs",
    ),
    ("fusing-ties-copies", "fused-layers", "a copy of it: logits: differs by"),
    ("attention-cannot-be-asked", "attention", "asked for a Llama: its check of the model failed (AttributeError: "),
]
"""Backend, the check that finds it, and a part of the line that says what is wrong; checked in one process."""

BROKEN_ELSEWHERE = [
    ("broken_discovery", "early-torch", "discovery", "importing rlhf_broken_discovery imports torch"),
    ("broken_slow", "slow-probe", "probe", "the probe took 0.5 s, expected at most 0.2 s"),
    ("broken", "probe-imports-torch", "probe", "the probe imports torch"),
    ("broken", "probe-opens-device", "probe", "the device: PluginError: accelerator probe-opens-device of"),
    ("broken", "probe-numbers-devices", "probe", "names the device 'chip 0', expected a PCI address such as pci:"),
    ("broken", "deepspeed-not-told", "deepspeed", "DeepSpeed's device is 'cpu', expected 'chip'"),
    pytest.param(*("broken", "other-dist-backend", "collectives", "two ranks: rank "), marks=pytest.mark.slow),
    pytest.param(*("broken", "deepspeed-clips", "deepspeed-step", "ZeRO 0 in fp32: loss"), marks=pytest.mark.slow),
    pytest.param(*("broken", "compiles-late", "run", "sft: compilations rose from 3 to 4"), marks=pytest.mark.slow),
]
"""The same for checks that start processes, with the plugin that offers the backend."""

DRIVER = """
import json, sys
from accelerators.testing import run, subprocess_checks
subprocess_checks.PROBE_SECONDS = 0.2
found = [[vars(result) for result in run(name, [check])] for name, check in json.loads(sys.argv[1])]
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def run_checks(run_python) -> Callable[..., list[list[dict]]]:
    """Results of (backend, check) pairs, found in one process."""

    def run(pairs: Iterable[tuple[str, str]], plugin: str = "broken") -> list[list[dict]]:
        done = run_python("-c", DRIVER, json.dumps(list(pairs)), plugins=[plugin])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def check(run_python):
    """`rlhf accelerators check`."""

    def run(*arguments: str, plugins=(), env=None):
        return run_python("-m", "rlhf", "accelerators", "check", *arguments, plugins=plugins, env=env)

    return run


def test_each_broken_backend_fails_the_check_that_finds_it(run_checks) -> None:
    found = run_checks([(name, check) for name, check, _ in BROKEN])
    wrong = [
        (name, check, result["result"], result["reason"])
        for (name, check, text), (result,) in zip(BROKEN, found, strict=True)
        if result["result"] != "failed" or text not in result["reason"]
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(("plugin", "name", "check", "text"), BROKEN_ELSEWHERE)
def test_each_broken_backend_fails_the_check_that_starts_processes(run_checks, plugin, name, check, text) -> None:
    (results,) = run_checks([(name, check)], plugin)
    assert [result["result"] for result in results] == ["failed"] * len(results)
    assert text in results[0]["reason"]


def test_ranks_are_not_checked_where_one_device_cannot_be_shared(run_checks) -> None:
    ((result,),) = run_checks([("one-device", "collectives")])
    assert result["result"] == "skipped"
    assert "a second rank cannot share it: AcceleratorError: local rank 1: there is one device" in result["reason"]


def test_a_lazy_backend_may_work_at_its_step_boundaries(run_checks) -> None:
    ((result,),) = run_checks([("lazy-boundary", "step-boundary")])
    assert (result["result"], result["reason"]) == ("passed", "")


def test_every_check_has_a_broken_backend_that_it_finds() -> None:
    from accelerators.testing import CHECKS

    elsewhere = [getattr(case, "values", case) for case in BROKEN_ELSEWHERE]
    assert {check for _, check, _ in BROKEN} | {check for _, _, check, _ in elsewhere} == {
        check.name for check in CHECKS
    }


def test_the_cpu_backend_passes_every_check_and_no_rows_are_left(check, tmp_path: Path) -> None:
    done = check("cpu", "--json", env={"RANK": "7", "MASTER_PORT": "1", "HF_DATASETS_CACHE": str(tmp_path / "rows")})
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    reasons = {result["check"]: result["reason"] for result in results if result["result"] != "passed"}
    assert set(reasons) <= {"memory"}, reasons  # some systems let no process reset its peak
    notes = {result["check"]: result["reason"] for result in results}
    assert [check for check in notes if "deepspeed-step" in check] == [f"deepspeed-step[zero-{n}]" for n in range(4)]
    assert notes["run"] == "nothing is compiled here"
    assert [*tmp_path.iterdir()] == []
    assert all(result["title"] and result["seconds"] >= 0 for result in results)


def test_a_failed_check_gives_exit_code_1_and_its_line_in_the_table(check) -> None:
    done = check("adamw-no-decay", "--only", "adamw", "--only", "shapes", plugins=["broken"])
    assert done.returncode == 1
    header, shapes, adamw = (line.split("\t") for line in done.stdout.splitlines())
    assert header == ["check", "result", "seconds", "what", "reason"]
    assert (shapes[0], shapes[1], shapes[4]) == ("shapes", "passed", "")
    assert (adamw[0], adamw[1]) == ("adamw", "failed")
    assert "differs by" in adamw[4]
    assert [line.split()[:2] for line in done.stderr.splitlines()] == [["shapes", "passed"], ["adamw", "failed"]]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing"], "no such accelerator; available: cpu"),
        (["cpu", "--only", "precisoin"], "no check is named 'precisoin'; did you mean 'precision'?"),
    ],
)
def test_what_cannot_be_checked_is_an_error_in_one_line(check, arguments, line) -> None:
    done = check(*arguments, env={"RLHF_PLUGINS": "none"})
    assert done.returncode == 2
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_the_command_needs_no_pytest_and_reads_none_of_its_settings(check, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pytest'] = None")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('a conftest of the user')")
    done = check("cpu", "--only", "shapes", "--only", "memory", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["check", "shapes", "memory"]


def test_what_a_backend_prints_stays_out_of_the_results(check) -> None:
    done = check("loud", "--only", "memory", "--json", plugins=["broken"])
    assert [result["result"] for result in json.loads(done.stdout)] == ["passed"]
    assert [line.split()[:2] for line in done.stderr.splitlines()] == [["memory", "passed"]]


def test_a_plugins_own_tests_inherit_the_checks(run_python, tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(
        "from accelerators.testing import Conformance\n\nclass TestStale(Conformance):\n    name = 'capture-stale'\n"
    )
    arguments = ("-q", "-p", "no:cacheprovider", "-k", "capture or shapes or precision", str(tmp_path))
    done = run_python("-m", "pytest", *arguments, plugins=["broken"])
    assert done.returncode == 1
    assert "1 failed, 3 passed" in done.stdout
    assert "E       AssertionError: call 2 of 5 of a captured function, a function of its input" in done.stdout
