"""The conformance kit: a good backend passes, and each broken one fails the check of its fault."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import accelerators
from accelerators import AcceleratorError, Precision, host
from accelerators.backends.cpu import info as cpu_info
from accelerators.testing import CHECKS, Result, processes, run
from accelerators.testing.checks import Subject
from tests.accelerators.broken import BROKEN, OUTCOMES

UNAVAILABLE = set() if "avx512_bf16" in cpu_info.cpu_flags() else {"fused-layers"}
"""Checks of kernels that this processor cannot run."""
NATIVE = pytest.mark.skipif(bool(UNAVAILABLE), reason="this processor has no avx512_bf16")
MAY_BE_SKIPPED = {"memory"} | UNAVAILABLE
"""Some systems let no process reset its peak of memory."""

IN_PROCESSES = [
    ("early_torch", "early-torch", "discovery", "importing rlhf_early_torch imports torch"),
    ("late_torch", "late-torch", "probe", "the probe imports torch"),
    ("broken", "ProbeOpensDevice", "probe", "after the probe, a forked child cannot use the device: PluginError: "),
    pytest.param("broken", "SlowProbe", "probe", "the probe took 0.5 s, expected at most", marks=pytest.mark.slow),
    pytest.param(
        "broken", "ProbeNumbersDevices", "probe", "the probe names the device 'chip 0'", marks=pytest.mark.slow
    ),
    pytest.param(
        "broken",
        "DeepSpeedName",
        "deepspeed",
        "after prepare_deepspeed(), DeepSpeed's device is 'cpu', expected 'chip'",
        marks=pytest.mark.slow,
    ),
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
    [
        pytest.param(name, *case, id=f"{name}: {case[0]}", marks=NATIVE if name in UNAVAILABLE else ())
        for name, cases in BROKEN.items()
        for case in cases
    ],
)
def test_broken_backend_fails_its_check(offered, monkeypatch, request, name, line, methods):
    if "reset_peak" in methods:  # on a system that lets no process reset its peak, the check would be skipped
        monkeypatch.setattr(host, "reset_peak_memory", lambda: True)
    request.addfinalizer(mock.patch.stopall)
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


@pytest.mark.parametrize(("name", "line", "outcomes"), OUTCOMES)
def test_failed_process_fails_its_check(monkeypatch, name, line, outcomes):
    run_processes = outcomes if callable(outcomes) else lambda *arguments: outcomes
    monkeypatch.setattr(processes, "_run", run_processes)
    (result, *_) = run("cpu", [name])
    assert result.result == "failed"
    assert line in result.reason


HELPERS = ("assert_close", "_same")
"""Functions of the kit that check their first argument's promise: each of their calls is an assertion."""


def message_parts(message: ast.expr, variables: dict[str, ast.expr]) -> list[str]:
    """Return the constant parts of a message, in order; "" for a value."""
    match message:
        case ast.Constant():
            return [str(message.value)]
        case ast.JoinedStr():
            return [part for value in message.values for part in message_parts(value, variables)]
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name) if name in variables:
            return message_parts(variables[name], {key: value for key, value in variables.items() if key != name})
    return [""]


def assertions(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each assertion of a module of the kit, and the constant parts of its message."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        variables: dict[str, ast.expr] = {}
        for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.JoinedStr() as value):
                    variables[name] = value
                case ast.Assert(msg=message) if function.name != "_same":
                    pass
                case ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError"), args=[message])):
                    pass
                case ast.Call(func=ast.Name(id=called), args=[message, *_]) if called in HELPERS:
                    pass
                case _:
                    continue
            if not isinstance(node, ast.Assign):
                assert message is not None, f"{path.name}:{node.lineno}: an assertion without a message"
                parts = "\0".join(message_parts(message, variables)).replace("\0\0", "\0").split("\0")
                yield f"{path.name}:{node.lineno}", [part.strip(" ,:") for part in parts if part.strip(" ,:")]


def rate_match(line: str, parts: list[str]) -> tuple[int, bool]:
    """Return how many characters of a message's constant parts a line has, in order, and whether it has them all.

    The line may end within a part.
    """
    matched = start = 0
    for part in parts:
        place = line.find(part, start)
        if place < 0:
            ends = (size for size in range(len(part), 0, -1) if line[start:].endswith(part[:size]))
            return matched + next(ends, 0), False
        matched, start = matched + len(part), place + len(part)
    return matched, True


def test_every_assertion_of_the_kit_has_a_broken_backend():
    cases = [(name, line) for name, lines in BROKEN.items() for line, _ in lines]
    cases += [getattr(case, "values", case)[2:] for case in IN_PROCESSES] + [case[:2] for case in OUTCOMES]
    modules = {check.name: check.module for check in CHECKS}
    assert {name for name, _ in cases} == set(modules)
    folder = Path(accelerators.testing.__file__).parent
    known = {path.stem: dict(assertions(path)) for path in folder.glob("*.py")}
    matched = set()
    for name, line in cases:
        for module in (modules[name], "reference"):
            scores = {place: rate_match(line, parts) for place, parts in known[module].items()}
            best = max(scores.values())
            places = [place for place, score in scores.items() if score == best and score[0]]
            assert len(places) == 1 or module == "reference", f"{name}: {line!r} is of {places or 'no assertion'}"
            matched.update(places)
    missing = {place for places in known.values() for place in places} - matched
    assert not missing, f"no broken backend shows that these assertions can fail: {sorted(missing)}"


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
    assert result.result == "passed" or (name in MAY_BE_SKIPPED and result.result == "skipped"), result.reason


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
    assert set(reasons) <= MAY_BE_SKIPPED, reasons
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


def test_failed_check_gives_exit_code_3(offered):
    from typer.testing import CliRunner

    from rlhf.cli.app import app

    offered(**BROKEN["adamw"][0][1])
    done = CliRunner().invoke(app, ["accelerators", "check", "npu", "--only", "adamw", "--only", "shapes", "--json"])
    assert done.exit_code == 3
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


@pytest.mark.parametrize(
    ("verdicts", "only", "expected"),
    [
        (("passed", "skipped"), (), "mychip: 1 passed, 1 skipped, 0 failed; it conforms to the accelerator interface"),
        (("passed", "failed"), (), "mychip: 1 passed, 0 skipped, 1 failed; it does not conform to the accelerator"),
        (("passed",), ("--only", "shapes"), "mychip: 1 passed, 0 skipped, 0 failed\n"),
    ],
)
def test_table_ends_with_a_verdict(monkeypatch, verdicts, only, expected):
    from typer.testing import CliRunner

    from accelerators.testing.runner import Result
    from rlhf.cli.app import app

    results = [Result(f"check {place}", "what", verdict, "", 0.1) for place, verdict in enumerate(verdicts)]
    monkeypatch.setattr(accelerators.testing, "run", lambda *arguments, **hooks: results)
    done = CliRunner().invoke(app, ["accelerators", "check", "mychip", *only])
    assert expected in done.stdout and done.exit_code == (3 if "failed" in verdicts else 0)
