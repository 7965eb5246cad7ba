"""A broken plugin is listed with its reason, and stops neither `rlhf accelerators list` nor other backends."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import accelerators
from accelerators import (
    AcceleratorError,
    AcceleratorSpec,
    Probe,
    select,
)
from rlhf.cli.accelerators import list_backends
from tests.accelerators.fake_plugins import GOOD, endless, forever, offers, plugin, raises, spec


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error that has no words")


HOOK = "rlhf_accelerators failed "

BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    # imported
    "import raises": (raises(ImportError("one\n\ttwo\udc80")), "its import failed (ImportError: one two?)"),
    "import exits": (raises(SystemExit(3)), "its import failed (SystemExit: 3)"),
    "import is interrupted": (raises(KeyboardInterrupt()), "its import failed (KeyboardInterrupt)"),
    "import raises what cannot be printed": (raises(Unspeakable()), "its import failed (Unspeakable)"),
    "import hangs": (forever, "its import did not answer within 0.3 s"),
    "a class": (lambda: ModuleType, "its entry point names a type instead of a module"),
    "misspelt hook": (lambda: plugin(rlhf_acelerators=lambda: ()), "unknown hook 'rlhf_acelerators'"),
    "wrong arguments": (lambda: plugin(rlhf_accelerators=lambda run: []), "Argument(s) {'run'} are declared"),
    # asked for backends
    "hook exits": (lambda: plugin(rlhf_accelerators=raises(SystemExit(0))), HOOK + "(SystemExit: 0)"),
    "hook hangs": (lambda: plugin(rlhf_accelerators=forever), "rlhf_accelerators did not answer within 0.3 s"),
    "hook gives a str": (lambda: plugin(rlhf_accelerators=lambda: "npu"), "returned a str instead of a list"),
    "hook has no end": (lambda: plugin(rlhf_accelerators=endless), "rlhf_accelerators gave more than 100 answers"),
    "hook raises halfway": (lambda: offers(spec(), raises(OSError("x"))), HOOK + "(OSError: x)"),
    "spec is a dict": (lambda: offers(lambda: GOOD), "rlhf_accelerators returned a dict instead of AcceleratorSpec"),
    "name is empty": (lambda: offers(spec(name="")), "name is '', expected one word"),
    "name=auto": (lambda: offers(spec(name="auto")), "name is 'auto', expected one word other than auto"),
    "priority=nan": (lambda: offers(spec(priority=float("nan"))), "priority is nan, expected an int"),
    "api_version=0": (
        lambda: offers(spec(api_version=0)),
        "version 0 of the accelerator interface, and rlhf accepts 1 to 3; update bad",
    ),
    "env is no function": (lambda: offers(spec(env={"A": "b"})), "env is {'A': 'b'}, expected a function"),
    "a cpu that hangs": (lambda: offers(spec(name="cpu", probe=forever)), "its probe did not answer within 0.3 s"),
    # probed
    "probe raises": (lambda: offers(spec(probe=raises(OSError("x")))), "its probe failed (OSError: x)"),
    "probe exits": (lambda: offers(spec(probe=raises(SystemExit(0)))), "its probe failed (SystemExit: 0)"),
    "probe gives True": (lambda: offers(spec(probe=lambda: True)), "a bool instead of Probe"),
    "devices": (lambda: offers(spec(probe=lambda: Probe(True, "", devices=(7,)))), "expected a tuple of str"),
    "count=-1": (lambda: offers(spec(probe=lambda: Probe(True, "", count=-1))), "count is -1, expected 0 or more"),
    "no reason": (lambda: offers(spec(probe=lambda: Probe(False, ""))), "a refusal needs a reason"),
}

LATE = {name: "0.3" for name, (_, reason) in BROKEN.items() if "0.3 s" in reason}


def list_as_json(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """`rlhf accelerators list --json`."""
    capfd.readouterr()
    list_backends(as_json=True)
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_is_listed_with_reason(misbehaved, monkeypatch, capfd, case):
    load, reason = BROKEN[case]
    monkeypatch.setenv("RLHF_PROBE_TIMEOUT", LATE.get(case, "30"))
    misbehaved(load)
    reports = accelerators.available()
    assert next(report for report in reports if report.name == "cpu" and report.distribution == "rlhf").available
    (report,) = [report for report in reports if report.distribution == "bad"]
    assert reason in report.error
    assert report.provider == "bad 2.0"
    monkeypatch.setattr(accelerators, "available", lambda: reports)
    entries = list_as_json(capfd)
    assert next(entry["available"] for entry in entries if entry["name"] == "cpu" and entry["distribution"] == "rlhf")
    assert reason in next(entry["reason"] for entry in entries if entry["broken"])
    list_backends(as_tsv=True)
    lines = [line.split("\t") for line in capfd.readouterr().out.splitlines()]
    assert len(lines) == 1 + len(reports)
    assert {len(line) for line in lines} == {6}


SAMPLE = """
import time
from accelerators import AcceleratorSpec, hookimpl
{imported}
def ask(device):
    {asked}
def probe():
    return ask(1)
@hookimpl
def rlhf_accelerators():
    {offered}
    return [AcceleratorSpec(name="npu", api_version=2, factory="a:B", probe=probe)]
"""


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"imported": "1 / 0"}, "its import failed (ZeroDivisionError: division by zero) at rlhf_placed.py, line 4"),
        ({"imported": "time.sleep(9)"}, "its import did not answer within 0.3 s at rlhf_placed.py, line 4; the driver"),
        ({"asked": "int('x' * device)"}, "its probe failed (ValueError: {}) at rlhf_placed.py, line 6"),
        ({"asked": "json.loads('x')", "imported": "import json"}, "at rlhf_placed.py, line 6"),  # not in json
        ({"offered": "raise OSError('x')"}, "rlhf_accelerators failed (OSError: x) at rlhf_placed.py, line 11"),
    ],
    ids=["import fails", "import hangs", "probe fails", "probe fails in another package", "hook fails"],
)
def test_broken_plugin_is_listed_with_the_place_of_its_error(misbehaved, monkeypatch, tmp_path, parts, words):
    (tmp_path / "rlhf_placed.py").write_text(
        SAMPLE.format(**{"imported": "", "asked": "pass", "offered": "pass"} | parts)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rlhf_placed", raising=False)
    monkeypatch.setenv("RLHF_PROBE_TIMEOUT", "0.3" if "0.3 s" in words else "30")
    misbehaved(partial(importlib.import_module, "rlhf_placed"))
    (report,) = [report for report in accelerators.available() if report.distribution == "bad"]
    assert words.format("invalid literal for int() with base 10: 'x'") in report.error


def test_auto_refuses_the_cpu_next_to_a_broken_plugin(misbehaved, monkeypatch):
    misbehaved(raises(ImportError("no library")))
    with pytest.raises(AcceleratorError, match=r"plugin could not be used: bad 2\.0 is broken.*--accelerator cpu"):
        select("auto")
    assert select("cpu").provider == "rlhf 2.0"
    monkeypatch.setenv("RLHF_PLUGINS", "none")
    assert select("auto").name == "cpu"


def test_named_backend_of_a_broken_plugin_is_refused(misbehaved):
    misbehaved(lambda: offers(spec(probe=raises(OSError("no answer"))), spec(name="twice"), spec(name="twice")))
    with pytest.raises(AcceleratorError, match=r"'npu'.* its probe failed \(OSError: no answer\).*; .*, or use: .*cpu"):
        select("npu")
    errors = [report.error for report in accelerators.available() if report.name == "twice"]
    assert errors == [None, "rlhf_accelerators offers this name twice"]


def test_plugin_with_one_broken_probe_offers_the_others(misbehaved, capfd):
    idle = spec(name="idle", probe=lambda: Probe(False, "no software", present=True))
    misbehaved(lambda: offers(lambda: GOOD, spec(probe=lambda: True), spec(name="good"), idle))
    states = {report.name: report.available for report in accelerators.available()}
    assert states == {
        "cpu": True,
        "cuda": False,
        "hpu": False,
        "bad_entry": False,
        "npu": False,
        "good": True,
        "idle": False,
    }
    assert {entry["name"] for entry in list_as_json(capfd) if entry["present"]} == {"cpu", "good", "idle"}


class Damaged:
    """A distribution whose metadata cannot be read."""

    @property
    def name(self) -> str:
        raise KeyError("Name")


@pytest.mark.parametrize("dist", [None, SimpleNamespace(name=None, version=None), Damaged()])
def test_distribution_without_metadata_is_listed(misbehaved, capfd, monkeypatch, dist):
    monkeypatch.setenv("RLHF_PLUGINS", "bad_entry")
    misbehaved(raises(ImportError("no library")), dist)
    (entry,) = [entry for entry in list_as_json(capfd) if entry["broken"]]
    assert (entry["distribution"], entry["version"]) == ("unknown", "")
    assert entry["reason"].startswith("its import failed (ImportError: no library)")


def test_unreadable_entry_points_break_one_plugin(monkeypatch, tmp_path):
    # rlhf itself, as where a checkout and an installed copy are on the path
    again = "builtin = accelerators.backends.plugin"
    for name, line in (("damaged", "no value"), ("missing", "missing = no_such_module"), ("rlhf", again)):
        version = importlib.metadata.version(name) if name == "rlhf" else "1.0"
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text(f"[rlhf.accelerators]\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    reasons = {report.name: report.reason for report in accelerators.available({})}
    assert reasons["damaged"].startswith("broken: its entry points cannot be read (TypeError")
    assert reasons["missing"].startswith("broken: its import failed (ModuleNotFoundError")
    assert "builtin" not in reasons
    assert "cores" in reasons["cpu"]
    assert select("cpu", environ={}).name == "cpu"
    assert "damaged" not in {report.name for report in accelerators.available({"RLHF_PLUGINS": "none"})}


DAMAGES = {
    "entry_points.txt": b"[rlhf.accelerators]\nbad = bad\xff\n",
    "METADATA": b"Name: \xff\n",
    "top_level.txt": b"\xff",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_metadata_that_is_no_text_breaks_one_plugin(monkeypatch, tmp_path, name):
    """Also if the cause of another error is looked for."""
    folder = tmp_path / "bad-1.0.dist-info"
    folder.mkdir()
    for file, content in {"entry_points.txt": b"[rlhf.accelerators]\nbad = a:\n", name: DAMAGES[name]}.items():
        (folder / file).write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    reasons = {report.name: report.reason for report in accelerators.available({})}
    assert any(reason.startswith("broken: ") for reason in reasons.values()) and "cores" in reasons["cpu"]
    assert accelerators.blame_plugin(ValueError()) is None


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


@pytest.mark.parametrize("how", ["print", "descriptor", "library", "child"])
def test_plugin_that_prints_leaves_json_intact(misbehaved, capfd, how):
    def probe() -> Probe:
        shout(how)
        return Probe(True, "found")

    def rlhf_accelerators() -> list[AcceleratorSpec]:
        shout(how)
        return [spec(probe=probe)()]

    misbehaved(lambda: shout(how) or plugin(rlhf_accelerators=rlhf_accelerators))
    list_backends(as_json=True)
    ctypes.CDLL(None).fflush(None)
    printed = capfd.readouterr()
    assert {entry["name"]: entry["available"] for entry in json.loads(printed.out)}["npu"]
    assert printed.err == "shouting\n" * 3


def test_second_cpu_is_an_error_with_remedy(misbehaved, monkeypatch):
    misbehaved(lambda: offers(spec(name="cpu")))
    for wish in ("cpu", "auto"):
        with pytest.raises(AcceleratorError, match=r"bad 2.0.*both offer.*named 'cpu'.*leave it out with RLHF_PLUGINS"):
            select(wish)
    monkeypatch.setenv("RLHF_PLUGINS", "none")
    assert select("cpu").provider == "rlhf 2.0"
