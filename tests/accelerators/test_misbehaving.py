"""Every way in which one plugin could take down `rlhf accelerators list`, `explain` or a run on another backend."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import accelerators
from accelerators import (
    AcceleratorError,
    AcceleratorSpec,
    DeepSpeedView,
    KernelImpl,
    Probe,
    Problem,
    Support,
    discovery,
    hookimpl,
    select,
)
from rlhf.cli.accelerators import explain, list_backends

ENDLESS = threading.Event()
BAD = SimpleNamespace(name="bad", version="2.0")
NAME = "bad 2.0 (bad_entry)"
GOOD: dict[str, Any] = {
    "name": "npu",
    "api_version": 1,
    "factory": "accelerators.cpu:CPU",
    "probe": lambda: Probe(True, "found"),
    "priority": -10,
}


def plugin(**hooks: Callable[..., Any]) -> ModuleType:
    module = ModuleType("bad")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(specname=name)(function))
    return module


def offers(*makers: Callable[[], Any]) -> ModuleType:
    """A plugin whose hook yields what each of `makers` returns."""

    def rlhf_accelerators():
        for make in makers:
            yield make()

    return plugin(rlhf_accelerators=rlhf_accelerators)


def spec(**fields: Any) -> Callable[[], AcceleratorSpec]:
    return lambda: AcceleratorSpec(**{**GOOD, **fields})


def altered(make: Callable[[], Any], field: str, value: Any) -> Callable[[], Any]:
    """What `make` returns, changed behind the back of its own checks."""

    def made() -> Any:
        result = make()
        object.__setattr__(result, field, value)
        return result

    return made


def raises(error: BaseException) -> Callable[..., Any]:
    def function() -> Any:
        raise error

    return function


def forever() -> Any:
    ENDLESS.wait()


def endless() -> Any:
    while True:
        yield AcceleratorSpec(**GOOD)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error that has no words")


class Incomparable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")


HOOK = "rlhf_accelerators failed "

BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    # as it is imported
    "import raises": (raises(ImportError("no library")), "its import failed (ImportError: no library)"),
    "import exits": (raises(SystemExit(3)), "its import failed (SystemExit: 3)"),
    "import is interrupted": (raises(KeyboardInterrupt()), "its import failed (KeyboardInterrupt)"),
    "import raises what cannot be printed": (raises(Unspeakable()), "its import failed (Unspeakable)"),
    "import raises many lines": (raises(ImportError("one\n\ttwo\udc80")), "(ImportError: one two?)"),
    "import hangs": (forever, "its import did not answer within 0.3 s"),
    "a class": (lambda: Incomparable, "its entry point names a type instead of a module"),
    "an object": (Incomparable, "its entry point names a Incomparable instead of a module"),
    "nothing": (lambda: None, "its entry point names a NoneType instead of a module"),
    "wrong arguments": (lambda: plugin(rlhf_accelerators=lambda run: []), "Argument(s) {'run'} are declared"),
    # as it is asked
    "hook raises": (lambda: plugin(rlhf_accelerators=raises(OSError("x"))), HOOK + "(OSError: x)"),
    "hook exits": (lambda: plugin(rlhf_accelerators=raises(SystemExit(0))), HOOK + "(SystemExit: 0)"),
    "hook hangs": (lambda: plugin(rlhf_accelerators=forever), "rlhf_accelerators did not answer within 0.3 s"),
    "hook gives a str": (lambda: plugin(rlhf_accelerators=lambda: "npu"), "returned a str instead of a list"),
    "hook gives a number": (lambda: plugin(rlhf_accelerators=lambda: 7), "'int' object is not iterable"),
    "hook gives one spec": (lambda: plugin(rlhf_accelerators=spec()), "'AcceleratorSpec' object is not iterable"),
    "hook has no end": (lambda: plugin(rlhf_accelerators=endless), "rlhf_accelerators gave more than 100 answers"),
    "hook raises halfway": (lambda: offers(spec(), raises(OSError("x"))), HOOK + "(OSError: x)"),
    "spec is a dict": (lambda: offers(lambda: GOOD), "rlhf_accelerators returned a dict instead of AcceleratorSpec"),
    "spec is a duck": (lambda: offers(lambda: SimpleNamespace(**GOOD)), "a SimpleNamespace instead of"),
    "spec is None": (lambda: offers(lambda: None), "a NoneType instead of AcceleratorSpec"),
    # what it says
    "name=None": (lambda: offers(spec(name=None)), "AcceleratorSpec: name is None, expected a str"),
    "name=7": (lambda: offers(spec(name=7)), "AcceleratorSpec: name is 7, expected a str"),
    "name empty": (lambda: offers(spec(name="")), "name is '', expected one word"),
    "name=auto": (lambda: offers(spec(name="auto")), "name is 'auto', expected one word other than auto"),
    "priority='50'": (lambda: offers(spec(priority="50")), "priority is '50', expected an int"),
    "priority=nan": (lambda: offers(spec(priority=float("nan"))), "priority is nan, expected an int"),
    "priority=None": (lambda: offers(spec(priority=None)), "priority is None, expected an int"),
    "priority changed": (
        lambda: offers(altered(spec(), "priority", "50")),
        "returned AcceleratorSpec with wrong fields (AcceleratorSpec: priority is '50', expected an int)",
    ),
    "name changed": (lambda: offers(altered(spec(), "name", None)), "with wrong fields (AcceleratorSpec: name is None"),
    "api_version='1'": (lambda: offers(spec(api_version="1")), "api_version is '1', expected an int"),
    "api_version=2": (lambda: offers(spec(api_version=2)), "written for version 2 of the accelerator interface"),
    "probe is no function": (lambda: offers(spec(probe=Probe(True, ""))), "expected a function"),
    "env is no function": (lambda: offers(spec(env={"A": "b"})), "env is {'A': 'b'}, expected a function"),
    "factory is a class": (lambda: offers(spec(factory=Incomparable)), "expected a str"),
    "unknown field": (lambda: offers(spec(devices=3)), "unexpected keyword argument 'devices'"),
    "a broken cpu": (lambda: offers(spec(name="cpu", api_version=2)), "written for version 2"),
    "a cpu that hangs": (lambda: offers(spec(name="cpu", probe=forever)), "its probe did not answer within 0.3 s"),
    # as it is probed
    "probe raises": (lambda: offers(spec(probe=raises(OSError("x")))), "its probe failed (OSError: x)"),
    "probe exits": (lambda: offers(spec(probe=raises(SystemExit(0)))), "its probe failed (SystemExit: 0)"),
    "probe is interrupted": (lambda: offers(spec(probe=raises(KeyboardInterrupt()))), "its probe failed (Keyboard"),
    "probe hangs": (lambda: offers(spec(probe=forever)), "its probe did not answer within 0.3 s"),
    "probe gives True": (lambda: offers(spec(probe=lambda: True)), "a bool instead of Probe"),
    "probe takes arguments": (lambda: offers(spec(probe=lambda rank: True)), "its probe failed (TypeError"),
    "count='3'": (lambda: offers(spec(probe=lambda: Probe(True, "", count="3"))), "count is '3', expected an int"),
    "count=-1": (lambda: offers(spec(probe=lambda: Probe(True, "", count=-1))), "count is -1, expected 0 or more"),
    "model=None": (lambda: offers(spec(probe=lambda: Probe(True, "", model=None))), "model is None, expected a str"),
    "reason=None": (lambda: offers(spec(probe=lambda: Probe(True, None))), "reason is None, expected a str"),
    "ok=1": (lambda: offers(spec(probe=lambda: Probe(1, "yes"))), "ok is 1, expected a bool"),
    "count changed": (
        lambda: offers(spec(probe=altered(lambda: Probe(True, ""), "count", "3"))),
        "Probe with wrong fields (Probe: count is '3', expected an int)",
    ),
}

LATE = {name: "0.3" for name, (_, reason) in BROKEN.items() if "0.3 s" in reason}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Install, beside the built-in backends, a plugin that is loaded by calling `load`."""
    for variable in ("RLHF_ACCELERATOR", "RLHF_PLUGINS", "RLHF_PROBE_TIMEOUT"):
        monkeypatch.delenv(variable, raising=False)
    ENDLESS.clear()

    def install(load: Callable[[], Any], dist: Any = BAD) -> None:
        builtin, rlhf = "accelerators.builtin", SimpleNamespace(name="rlhf", version="2.0")
        points = [
            SimpleNamespace(name="builtin", value=builtin, dist=rlhf, load=lambda: importlib.import_module(builtin)),
            SimpleNamespace(name="bad_entry", value="bad", dist=dist, load=load),
        ]
        monkeypatch.setattr(discovery, "entry_points", lambda group: points)

    yield install
    ENDLESS.set()  # what hangs may end


def listed(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """`rlhf accelerators list --json`."""
    capfd.readouterr()
    list_backends(as_json=True)
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_listed_with_its_reason_and_stops_nobody(installed, monkeypatch, capfd, case):
    load, reason = BROKEN[case]
    monkeypatch.setenv("RLHF_PROBE_TIMEOUT", LATE.get(case, "30"))
    installed(load)
    reports = accelerators.available()
    assert next(report for report in reports if report.name == "cpu" and report.distribution == "rlhf").available
    (found,) = [report for report in reports if report.distribution == "bad"]
    assert reason in found.error
    assert found.provider == "bad 2.0"
    monkeypatch.setattr(accelerators, "available", lambda: reports)
    entries = listed(capfd)
    assert next(entry["available"] for entry in entries if entry["name"] == "cpu" and entry["distribution"] == "rlhf")
    assert reason in next(entry["reason"] for entry in entries if entry["broken"])
    list_backends()
    lines = [line.split("\t") for line in capfd.readouterr().out.splitlines()]
    assert len(lines) == 1 + len(reports)
    assert {len(line) for line in lines} == {6}
    assert select("cpu").provider == "rlhf 2.0"


def test_what_else_a_plugin_offers_counts(installed):
    installed(lambda: offers(lambda: GOOD, spec(probe=lambda: True), spec(name="good")))
    found = {report.name: report.available for report in accelerators.available()}
    assert found == {"cpu": True, "cuda": False, "hpu": False, "bad_entry": False, "npu": False, "good": True}


def test_a_name_that_a_plugin_offers_twice_is_broken_the_second_time(installed):
    installed(lambda: offers(spec(), spec(priority=-20)))
    found = [(report.priority, report.error) for report in accelerators.available() if report.name == "npu"]
    assert found == [(-10, None), (-20, "rlhf_accelerators offers this name twice")]
    assert select("npu").spec.priority == -10


def test_an_odd_module_does_not_keep_others_from_being_asked(installed):
    module = ModuleType("bad")
    module.__getattr__ = raises(RuntimeError("ask me nothing"))  # type: ignore[method-assign]
    installed(lambda: module)
    assert {report.name for report in accelerators.available()} == {"cpu", "cuda", "hpu"}


class Damaged:
    """A distribution whose metadata cannot be read."""

    @property
    def name(self) -> str:
        raise KeyError("Name")


@pytest.mark.parametrize("dist", [None, SimpleNamespace(name=None, version=None), Damaged()])
@pytest.mark.parametrize("allowlist", ["", "bad_entry"])
def test_a_distribution_without_metadata_is_listed(installed, capfd, monkeypatch, dist, allowlist):
    monkeypatch.setenv("RLHF_PLUGINS", allowlist)
    installed(raises(ImportError("no library")), dist)
    (entry,) = [entry for entry in listed(capfd) if entry["broken"]]
    assert (entry["distribution"], entry["version"]) == ("unknown", "")
    assert entry["reason"] == "its import failed (ImportError: no library)"


def test_entry_points_that_cannot_be_read_are_those_of_one_plugin(monkeypatch, tmp_path):
    for name, written in (("damaged", "no value"), ("whole", "whole = nowhere")):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[rlhf.accelerators]\n{written}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {report.name: report.reason for report in accelerators.available({})}
    assert found["damaged"].startswith("broken: its entry points cannot be read (TypeError")
    assert found["whole"].startswith("broken: its import failed (ModuleNotFoundError")
    assert "cores" in found["cpu"]
    assert select("cpu", environ={}).name == "cpu"
    assert "damaged" not in {report.name for report in accelerators.available({"RLHF_PLUGINS": "none"})}


def shout(how: str) -> None:
    """Write on standard output in a way that is not Python's own."""
    if how == "print":
        print("shouting")
    elif how == "descriptor":
        os.write(1, b"shouting\n")
    elif how == "library":
        ctypes.CDLL(None).puts(b"shouting")
    else:
        subprocess.run([sys.executable, "-S", "-c", "print('shouting')"], check=True)


def loud(when: str, how: str) -> ModuleType:
    """A plugin that is right in all but that it shouts."""

    def at(moment: str) -> None:
        if moment == when:
            shout(how)

    def probe() -> Probe:
        at("probe")
        return Probe(True, "found")

    def rlhf_accelerators() -> list[AcceleratorSpec]:
        at("hook")
        return [AcceleratorSpec(**{**GOOD, "probe": probe})]

    at("import")
    return plugin(rlhf_accelerators=rlhf_accelerators)


@pytest.mark.parametrize("how", ["print", "descriptor", "library", "child"])
@pytest.mark.parametrize("when", ["import", "hook", "probe"])
def test_json_is_json_whatever_a_plugin_prints(installed, capfd, when, how):
    installed(lambda: loud(when, how))
    list_backends(as_json=True)
    ctypes.CDLL(None).fflush(None)
    printed = capfd.readouterr()
    assert {entry["name"]: entry["available"] for entry in json.loads(printed.out)}["npu"]
    assert printed.err == "shouting\n"


def test_a_second_cpu_is_an_error_that_names_the_way_out(installed, monkeypatch):
    installed(lambda: offers(spec(name="cpu")))
    for wish in ("cpu", "auto"):
        with pytest.raises(AcceleratorError, match=r"bad 2.0.*both offer.*named 'cpu'.*leave it out with RLHF_PLUGINS"):
            select(wish)
    monkeypatch.setenv("RLHF_PLUGINS", "none")
    assert select("cpu").provider == "rlhf 2.0"


# in a run


def kernel(**fields: Any) -> KernelImpl:
    usual = {
        "operation": "attention",
        "name": "fast",
        "factory": lambda accelerator: "fast",
        "supported": lambda accelerator: Support(True, "fast here"),
        "priority": 99,
    }
    return KernelImpl(**{**usual, **fields})


def npu(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """Let the factory npu_backend:NPU make a CPU with other methods."""
    backend = ModuleType("npu_backend")
    backend.NPU = type("NPU", (importlib.import_module("accelerators.cpu").CPU,), {"name": "npu", **methods})
    monkeypatch.setitem(sys.modules, "npu_backend", backend)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda accelerator: [{"operation": "adamw"}], "TypeError: a dict instead of KernelImpl"),
        (lambda accelerator: "adamw", "TypeError: rlhf_kernels returned a str instead of a list"),
        (lambda accelerator: 7, "TypeError: 'int' object is not iterable"),
        (lambda accelerator: [kernel(), None], "TypeError: a NoneType instead of KernelImpl"),
        (lambda accelerator: [kernel(priority="9")], "KernelImpl: priority is '9', expected an int"),
        (lambda accelerator: [kernel(name=None)], "KernelImpl: name is None, expected a str"),
        (lambda accelerator: [kernel(factory="a:b")], "KernelImpl: factory is 'a:b', expected a function"),
        (lambda accelerator: [kernel(supported=True)], "KernelImpl: supported is True, expected a function"),
        (
            lambda accelerator: [altered(kernel, "priority", "9")()],
            "KernelImpl with wrong fields (KernelImpl: priority",
        ),
        (raising(OSError("no library")), "OSError: no library"),
        (raising(SystemExit(3)), "SystemExit: 3"),
    ],
)
def test_a_plugin_with_wrong_kernels_offers_none_and_is_named(installed, caplog, answer, reason):
    installed(lambda: plugin(rlhf_kernels=lambda accelerator: answer(accelerator)))
    cpu = select("cpu").create()
    assert cpu.kernel("attention", required=True) == "sdpa"
    assert all(support.reason for support in cpu.capabilities().values())
    (record,) = caplog.records
    assert f"plugin {NAME} offers no kernels: " in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize(
    ("supported", "reason"),
    [
        (lambda accelerator: True, "TypeError: a bool instead of Support"),
        (lambda accelerator: None, "TypeError: a NoneType instead of Support"),
        (lambda accelerator: Support("yes", "fast"), "Support: ok is 'yes', expected a bool"),
        (altered(lambda: Support(True, ""), "ok", 3), "its check failed (TypeError"),
        (altered(lambda: Support(False, "no"), "reason", ""), "a refusal needs a reason"),
        (raising(SystemExit(3)), "its check failed (SystemExit: 3)"),
    ],
)
def test_a_check_that_gives_no_support_is_a_refusal(installed, supported, reason):
    installed(
        lambda: plugin(rlhf_kernels=lambda accelerator: [kernel(supported=lambda accelerator: answer(accelerator))])
    )

    def answer(accelerator):
        return supported() if supported.__name__ == "made" else supported(accelerator)

    cpu = select("cpu").create()
    assert cpu.kernel("attention", required=True) == "sdpa"
    ((_, used), (refused, support)) = cpu.candidates("attention")
    assert used.ok
    assert (refused.plugin, support.ok) == (NAME, False)
    assert reason in support.reason


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (raising(ImportError("libfast.so")), "ImportError: libfast.so"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (lambda accelerator: None, "it made None"),
        (lambda accelerator: 7, "it made 7"),
        (lambda: "fast", "takes 0 positional arguments"),
    ],
)
def test_a_kernel_that_cannot_be_made_gives_way_with_one_warning(installed, caplog, factory, reason):
    installed(lambda: plugin(rlhf_kernels=lambda accelerator: [kernel(factory=factory)]))
    cpu = select("cpu").create()
    assert cpu.capabilities()["attention"].implementation == "fast"
    assert cpu.kernel("attention", required=True) == "sdpa"
    assert cpu.kernel("attention") == "sdpa"
    (record,) = caplog.records
    assert record.getMessage().startswith("attention: fast is not used: its factory failed (")
    assert reason in record.getMessage()
    assert NAME in record.getMessage()
    assert cpu.capabilities()["attention"].implementation == "sdpa"


def test_where_no_kernel_is_left_the_error_names_the_plugin(installed):
    failing = kernel(operation="graph_capture", factory=raising(ImportError("libfast.so")))
    installed(lambda: plugin(rlhf_kernels=lambda accelerator: [failing]))
    cpu = select("cpu").create()
    assert cpu.kernel("graph_capture") is None
    with pytest.raises(AcceleratorError) as raised:
        cpu.kernel("graph_capture", required=True)
    assert "fast: its factory failed (ImportError: libfast.so), which is for the authors of " + NAME in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: "not today", "TypeError: rlhf_check_run returned a str instead of a list"),
        (lambda: ["not today"], "TypeError: a str instead of Problem"),
        (lambda: [Problem("not today", None)], "TypeError: Problem: remedy is None, expected a str"),
        (lambda: [SimpleNamespace(reason="a", remedy="b")], "TypeError: a SimpleNamespace instead of Problem"),
        (lambda: 7, "TypeError: 'int' object is not iterable"),
        (raises(KeyError("zero")), "KeyError: 'zero'"),
        (raises(SystemExit(3)), "SystemExit: 3"),
    ],
)
def test_a_check_that_fails_stops_runs_on_its_own_backend_alone(installed, monkeypatch, caplog, answer, reason):
    npu(monkeypatch)
    installed(
        lambda: plugin(
            rlhf_accelerators=lambda: [AcceleratorSpec(**{**GOOD, "factory": "npu_backend:NPU"})],
            rlhf_check_run=lambda run: answer(),
        )
    )
    said = f"the check of plugin {NAME} failed ({reason}"
    selection = select("cpu")
    selection.check_run(selection.create(), {})
    assert said in caplog.text
    selection = select("npu")
    with pytest.raises(AcceleratorError) as raised:
        selection.check_run(selection.create(), {})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (lambda run: {"NPU_CARDS": 3}, "'NPU_CARDS' or its value is no str"),
        (lambda run: {3: "NPU_CARDS"}, "3 or its value is no str"),
        (lambda run: {"NPU_MODE": "eager", "NPU_CARDS": None}, "'NPU_CARDS' or its value is no str"),
        (lambda run: None, "TypeError: 'NoneType' object is not iterable"),
        (raising(KeyError("seed")), "KeyError: 'seed'"),
        (raising(SystemExit(3)), "SystemExit: 3"),
    ],
)
def test_an_environment_that_is_none_is_the_plugins_error_and_sets_nothing(installed, env, reason):
    installed(lambda: offers(spec(env=env)))
    environ: dict[str, str] = {}
    with pytest.raises(AcceleratorError) as raised:
        select("npu").export(environ)
    assert "accelerator npu of bad 2.0: its env failed (" in str(raised.value)
    assert reason in str(raised.value)
    assert environ == {}
    select("cpu").export(environ)
    assert environ == {"RLHF_ACCELERATOR": "cpu"}


@pytest.mark.parametrize("error", [ImportError("libnpu.so"), SystemExit(3)])
def test_a_backend_that_cannot_be_made_is_the_plugins_error(installed, monkeypatch, error):
    npu(monkeypatch, __init__=raising(error))
    installed(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(AcceleratorError, match=r"accelerator npu of bad 2.0: .* failed \((ImportError|SystemExit)"):
        select("npu").create()


def test_a_backend_whose_own_kernels_are_none_is_the_plugins_error(installed, monkeypatch):
    npu(monkeypatch, kernels=lambda self: [{"operation": "adamw"}])
    installed(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(
        AcceleratorError, match=r"bad 2.0: kernels\(\) failed \(TypeError: a dict instead of KernelImpl"
    ):
        select("npu").create().kernel("adamw")


@pytest.mark.parametrize(
    ("method", "answer"),
    [("memory", (1, 2, 3)), ("info", {"model": "NPU"}), ("shape_policy", "static"), ("precision", None), ("bind", 0)],
)
def test_a_backend_that_cannot_be_explained_is_the_plugins_error(installed, monkeypatch, method, answer):
    view = DeepSpeedView("none", "cpu", "gloo", (), "0")
    npu(monkeypatch, **{"prepare_deepspeed": lambda self: view, method: lambda self, *arguments: answer})
    installed(lambda: offers(spec(factory="npu_backend:NPU")))
    monkeypatch.setenv("RLHF_ACCELERATOR", "auto")
    with pytest.raises(AcceleratorError, match=r"bad 2.0.*report it to"):
        explain("npu")
