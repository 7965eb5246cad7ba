"""Plugins of former interfaces run as they are; those of other versions are refused with a remedy."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import re
from pathlib import Path

import pytest
import torch

import accelerators
from accelerators import (
    API_VERSION,
    OPERATIONS,
    Accelerator,
    AcceleratorError,
    AcceleratorSpec,
    PluginError,
    compatibility,
    portable,
)
from accelerators.testing.capabilities import check_interface
from accelerators.types import OLDEST_API_VERSION
from tests.accelerators import fake_plugins
from tests.accelerators.fake_plugins import GOOD, fast

PAGE = Path(__file__).parents[2] / compatibility.PAGE
TRANSLATED = {1: ["kernels() is now kernel_implementations()"], 2: []}
"""Former interfaces, and the calls of their template that rlhf translates."""


def changelog() -> dict[int, str]:
    """The sections of the interface's changelog."""
    sections = re.split(r"^## Interface (\d+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {int(number): text for number, text in zip(sections[::2], sections[1::2])}


@pytest.fixture(autouse=True)
def forget_named():
    compatibility._name_once.cache_clear()


# plugins that are kept as they were


@pytest.mark.parametrize("version", range(OLDEST_API_VERSION, API_VERSION))
def test_template_of_former_interface_trains(forks, rlhf, install, tmp_path, version):
    arguments = ["sft", "--config", str(rlhf.recipe), "--set", "sft.max_steps=2"]
    arguments += ["--accelerator", f"interface-{version}", "--output", str(tmp_path / "run")]
    environment = {"PYTHONPATH": str(install(f"interface{version}")), "RLHF_PLUGINS": ""}
    done = forks.run(*arguments, timeout=300, environment=environment)
    assert done.returncode == 0, done.stderr
    accelerator = json.loads((tmp_path / "run" / "run.json").read_text())["accelerator"]
    assert (accelerator["name"], accelerator["device"]["model"]) == (f"interface-{version}", "Example One")
    translated = [line for line in done.stderr.splitlines() if "rlhf translates it" in line]
    assert len(translated) == len(TRANSLATED[version])
    for line, call in zip(translated, TRANSLATED[version]):
        assert f"accelerator interface-{version} of rlhf-interface{version} 1.2.3: {call};" in line


@pytest.mark.slow
@pytest.mark.parametrize("version", range(OLDEST_API_VERSION, API_VERSION))
def test_template_of_former_interface_conforms(run_python, version):
    name = f"interface-{version}"
    done = run_python("-m", "rlhf", "accelerators", "check", name, "--json", plugins=(f"interface{version}",))
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["check"]: result for result in json.loads(done.stdout)}
    assert compatibility.describe_changes(version) in results["interface"]["reason"]


@pytest.mark.parametrize("version", range(OLDEST_API_VERSION, API_VERSION))
def test_check_says_what_authors_change(forks, install, version):
    arguments = ("accelerators", "check", f"interface-{version}", "--only", "interface", "--tsv")
    environment = {"PYTHONPATH": str(install(f"interface{version}")), "RLHF_PLUGINS": ""}
    done = forks.run(*arguments, timeout=60, environment=environment)
    assert done.returncode == 0, done.stderr
    (row,) = (line.split("\t") for line in done.stdout.splitlines()[1:])
    assert row[-1] == compatibility.describe_changes(version)
    assert f"state api_version={API_VERSION}" in row[-1]
    assert all(
        call in row[-1] for number in range(version + 1, API_VERSION + 1) for call in compatibility.CHANGES[number]
    )


def test_authors_change_what_later_versions_ask_for():
    former, present = (compatibility.describe_changes(version) for version in (1, 2))
    assert all(change in former and change not in present for change in compatibility.CHANGES[2])
    assert compatibility.describe_changes(API_VERSION) == ""


# translated calls


def test_kernel_of_former_interface_may_ask_for_others(created, monkeypatch, caplog):
    monkeypatch.setitem(fake_plugins.NPU, "api_version", 1)
    clip = fast("adamw", None, factory=lambda npu: npu.kernel("clip_grad_norm"))
    former = created(kernels=lambda self: [clip, *portable.KERNELS])
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([2.0])
    for _ in range(2):
        assert former.kernels.get("adamw")([weight], 1.0) == 2.0
        weight.grad = torch.tensor([2.0])
    calls = ["kernels() is now kernel_implementations()", "kernel() is now kernels.get()"]
    named = [record.message for record in caplog.records if "rlhf translates it" in record.message]
    assert named == [line for line in named if line.startswith("accelerator npu of bad 2.0: ")]
    assert [line.split(": ")[1].partition(";")[0] for line in named] == calls


def test_former_method_in_present_interface_is_refused(created):
    with pytest.raises(PluginError, match=r"kernels\(\), which interface 2 renamed to kernel_implementations\(\)"):
        created(kernels=lambda self: ())


def test_former_names_are_the_present_ones_and_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert accelerators.PluginDefect is PluginError
        assert accelerators.PluginDefect is PluginError
        assert accelerators.lack_of_memory is accelerators.find_out_of_memory
    lines = [record.message for record in caplog.records]
    assert [line.partition(";")[0] for line in lines] == [
        "a plugin imports accelerators.PluginDefect, which is now PluginError",
        "a plugin imports accelerators.lack_of_memory, which is now find_out_of_memory",
    ]
    with pytest.raises(AttributeError, match="module 'accelerators' has no attribute 'PluginDefects'"):
        accelerators.PluginDefects  # noqa: B018


# versions


@pytest.mark.parametrize(
    ("versions", "used"), [(1, 1), (API_VERSION, API_VERSION), ((1, 2), 2), ((2, 99), API_VERSION)]
)
def test_plugin_runs_as_one_of_the_newest_version_that_both_have(versions, used):
    spec = AcceleratorSpec(**GOOD | {"api_version": versions})
    assert compatibility.refuse_versions(spec, "bad") == ""
    assert compatibility.used_version(spec) == used


ACCEPTED = f"of the accelerator interface, and rlhf accepts {OLDEST_API_VERSION} to {API_VERSION}"


@pytest.mark.parametrize(
    ("versions", "refusal"),
    [
        (0, f"it is written for version 0 {ACCEPTED}; update rlhf-chip"),
        ((-2, 0), f"it is written for versions -2 to 0 {ACCEPTED}; update rlhf-chip"),
        (99, f"it needs version 99 {ACCEPTED}; update rlhf, or install an older rlhf-chip"),
        ((98, 99), f"it needs versions 98 to 99 {ACCEPTED}; update rlhf, or install an older rlhf-chip"),
    ],
)
def test_version_out_of_range_is_refused_with_remedy(versions, refusal):
    assert compatibility.refuse_versions(AcceleratorSpec(**GOOD | {"api_version": versions}), "rlhf-chip") == refusal


def test_chosen_plugin_that_is_too_new_is_refused_with_one_remedy(misbehaved):
    misbehaved(lambda: fake_plugins.offers(fake_plugins.spec(api_version=API_VERSION + 1)))
    with pytest.raises(AcceleratorError) as caught:
        accelerators.select("npu")
    refusal = f"it needs version {API_VERSION + 1} {ACCEPTED}; update rlhf, or install an older bad; or use: cpu"
    assert str(caught.value) == f"accelerator 'npu': its plugin bad 2.0 is broken: {refusal}"


def test_plugin_of_a_range_that_reaches_further_has_nothing_to_change(offered, monkeypatch):
    monkeypatch.setitem(fake_plugins.NPU, "api_version", (OLDEST_API_VERSION, API_VERSION + 1))
    offered()
    selection = accelerators.select("npu")
    assert check_interface(selection, selection.create()) == ""


@pytest.mark.parametrize("versions", [(2, 1), (1, 2, 3), (), True, "2", 2.0, ("1", "2")])
def test_version_that_is_none_is_refused(versions):
    with pytest.raises(TypeError, match=r"api_version is .*, expected an int, or two: \(oldest, newest\)"):
        AcceleratorSpec(**GOOD | {"api_version": versions})


# the changelog


def interface() -> str:
    """Return the interface, a line for each name that plugins use or define."""
    lines = [f"accelerators.{name}" for name in accelerators.__all__]
    lines += [f"OPERATIONS[{name}]" for name in OPERATIONS]
    for name, member in vars(Accelerator).items():
        if not name.startswith("_"):
            lines.append(f"Accelerator.{name}{inspect.signature(member) if inspect.isfunction(member) else ''}")
    for name in accelerators.__all__:
        kind = getattr(accelerators, name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == "accelerators.types":
            lines += [f"{name}.{field.name}: {field.type}" for field in dataclasses.fields(kind)]
            fields = kind.__dataclass_fields__
            lines += [
                f"{name}.{member}" for member in vars(kind) if not member.startswith("_") and member not in fields
            ]
    return "\n".join(sorted(lines)).replace("'", "") + "\n"


def recorded(version: int) -> str:
    return (Path(__file__).with_name("interfaces") / f"{version}.txt").read_text(encoding="utf-8")


def test_change_of_the_interface_has_a_version():
    """After a release, a change needs the next version, with its file and its section of the changelog."""
    assert interface() == recorded(API_VERSION)


def test_changelog_ends_with_the_version_of_the_code():
    sections = changelog()
    assert list(sections) == sorted(range(OLDEST_API_VERSION + 1, API_VERSION + 1), reverse=True)
    assert set(compatibility.CHANGES) == set(sections)
    for number, changes in compatibility.CHANGES.items():
        words = {word for change in changes for word in re.findall(r"\w+(?=\(\))|\b[A-Z]\w+[a-z]\w+|\w+_\w+", change)}
        assert not [word for word in words if word not in sections[number]]


def test_changelog_names_each_addition():
    added = set(recorded(API_VERSION).splitlines()) - set(recorded(API_VERSION - 1).splitlines())
    names = {re.match(r"(?:\w+[.\[])?(\w+)", line)[1] for line in added}
    assert [name for name in sorted(names) if f"`{name}" not in changelog()[API_VERSION]] == []
