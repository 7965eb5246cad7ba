"""The rules that select a backend, with plugins that exist only in this file."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accelerators import AcceleratorError, AcceleratorSpec, Probe, available, discovery, hookimpl, select
from accelerators import verify_agreement as verify

NOTHING: dict[str, str] = {}


def backend(
    name: str, *, priority: int = 0, ok: bool = True, env: dict[str, str] | None = None, **facts: Any
) -> AcceleratorSpec:
    probe = Probe(ok, "found" if ok else f"no {name} device", **facts)
    return AcceleratorSpec(
        name=name,
        api_version=2,
        factory="accelerators.backends.cpu.backend:CPU",
        probe=lambda: probe,
        priority=priority,
        env=lambda run: env or {},
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Install plugins: keyword = distribution, value = its spec, or the exception that loading it raises."""

    def install(**distributions: AcceleratorSpec | BaseException) -> None:
        points = [_entry_point(name, offer) for name, offer in distributions.items()]
        monkeypatch.setattr(discovery, "entry_points", lambda group: points)

    return install


def _entry_point(distribution: str, offer: AcceleratorSpec | BaseException) -> SimpleNamespace:
    def load() -> ModuleType:
        if isinstance(offer, BaseException):
            raise offer
        plugin = ModuleType(distribution)
        plugin.rlhf_accelerators = hookimpl(specname="rlhf_accelerators")(lambda: [offer])
        return plugin

    module = "accelerators.backends.plugin" if distribution == "rlhf" else distribution
    dist = SimpleNamespace(name=distribution, version="2.0")
    return SimpleNamespace(name=f"{distribution}_entry", value=module, module=module, dist=dist, load=load)


@pytest.mark.parametrize(
    ("cli", "env", "config", "chosen"),
    [
        ("a", None, "b", "a"),
        ("a", "a", "b", "a"),
        (None, "a", "b", "a"),
        (None, None, "b", "b"),
        (None, None, "auto", "best"),
        ("auto", None, "b", "best"),  # the command line overrides the file
        ("auto", "a", "b", "a"),  # the launcher resolved auto, this is a rank
        ("a", "auto", "b", "a"),
    ],
)
def test_command_line_precedes_environment_precedes_config(installed, cli, env, config, chosen):
    installed(one=backend("a"), two=backend("b"), three=backend("best", priority=9))
    assert select(cli, config, {"RLHF_ACCELERATOR": env} if env else {}).name == chosen


def test_command_line_and_environment_that_disagree_are_an_error(installed):
    installed(one=backend("a"), two=backend("b"))
    with pytest.raises(AcceleratorError, match="--accelerator a contradicts RLHF_ACCELERATOR=b"):
        select("a", environ={"RLHF_ACCELERATOR": "b"})


def test_auto_says_why_it_chose_and_why_not_the_others(installed):
    installed(one=backend("a", priority=1), two=backend("b", priority=7), three=backend("c", priority=9, ok=False))
    selection = select(environ=NOTHING)
    assert selection.name == "b"
    assert selection.provider == "two 2.0"
    assert "b has the highest priority (7)" in selection.reason
    assert "a has priority 1" in selection.reason
    assert "c: no c device" in selection.reason


@pytest.mark.parametrize(
    ("others", "summary"),
    [
        ({}, "auto: the best available"),
        ({"one": backend("a", priority=5), "two": backend("b", ok=False)}, "auto: the best available"),
        (
            {"one": backend("a", ok=False), "two": backend("b", ok=False)},
            "auto: a, b are not available, `rlhf accelerators explain` tells why",
        ),
        (
            {"one": backend("a", ok=False), "two": backend("b", priority=-5)},
            "auto: a is not available, `rlhf accelerators explain` tells why",
        ),
        ({"one": backend("a", ok=False, count=1), "two": backend("b", ok=False)}, "auto: a is not used: no a device"),
    ],
)
def test_choice_by_auto_has_a_short_summary(installed, others, summary):
    installed(rlhf=backend("cpu"), **others)
    assert select(environ=NOTHING).summary == summary


def test_the_cpu_is_not_taken_in_place_of_a_device_that_is_there(installed):
    facts = {"present": True, "count": 2, "model": "Chip"}
    installed(rlhf=backend("cpu"), one=backend("a", priority=5, ok=False, **facts), two=backend("b", ok=False))
    with pytest.raises(AcceleratorError, match=r"cannot be used: a \(2 x Chip\): no a device; .*--accelerator cpu$"):
        select(environ=NOTHING)
    assert select("cpu", environ=NOTHING).name == select(config="cpu", environ=NOTHING).name == "cpu"
    assert select(environ={"RLHF_ACCELERATOR": "cpu"}).name == "cpu"


def test_unusable_device_does_not_hide_a_usable_one(installed):
    installed(rlhf=backend("cpu"), one=backend("a", ok=False, present=True), two=backend("b", priority=5))
    assert select(environ=NOTHING).name == "b"


PAIR = {"devices": ("pci:0000:10:00.0", "pci:0000:11:00.0")}
SECOND = {"devices": ("pci:0000:11:00.0",)}


def test_two_backends_that_claim_one_device_are_both_named(installed):
    installed(rlhf=backend("cpu"), one=backend("a", priority=5, **PAIR), two=backend("b", priority=7, **SECOND))
    rivals = r"b \(two 2\.0\) and a \(one 2\.0\) claim the same device, pci:0000:11:.*--accelerator b,.*RLHF_PLUGINS"
    with pytest.raises(AcceleratorError, match=rivals):
        select(environ=NOTHING)
    assert select("a", environ=NOTHING).name == "a"
    assert select("b", environ=NOTHING).name == "b"
    assert select(environ={"RLHF_PLUGINS": "one"}).name == "a"


@pytest.mark.parametrize(
    "others",
    [
        {"one": backend("a", priority=5, **PAIR), "two": backend("b", ok=False, **SECOND)},
        {"one": backend("a", priority=5, **SECOND), "two": backend("b", devices=("pci:0000:10:00.0",))},
        {"one": backend("a", priority=5), "two": backend("b")},
        {"one": backend("a", priority=5), "two": backend("b", **PAIR), "three": backend("c", **PAIR)},
    ],
)
def test_only_claims_to_the_best_backends_device_are_ambiguous(installed, others):
    installed(rlhf=backend("cpu"), **others)
    assert select(environ=NOTHING).name == "a"


def test_summary_says_where_a_name_came_from(installed):
    installed(rlhf=backend("cpu"))
    assert select("cpu", environ=NOTHING).summary == "asked for with --accelerator"
    assert select(config="cpu", environ=NOTHING).summary == "asked for in the config"
    assert select(environ={"RLHF_ACCELERATOR": "cpu"}).summary == "asked for with RLHF_ACCELERATOR"


def test_a_tie_is_an_error_that_names_both(installed):
    installed(one=backend("a", priority=5), two=backend("b", priority=5), rlhf=backend("cpu"))
    with pytest.raises(AcceleratorError, match=r"a \(one 2.0\) and b \(two 2.0\).*--accelerator a"):
        select(environ=NOTHING)


def test_tie_below_the_best_is_no_error(installed):
    installed(one=backend("a"), two=backend("b"), three=backend("c", priority=5))
    assert select(environ=NOTHING).name == "c"


@pytest.mark.parametrize(
    ("config", "environ", "source"),
    [("auto", {"RLHF_ACCELERATOR": "x"}, "RLHF_ACCELERATOR"), ("x", NOTHING, "from the config")],
)
def test_error_names_the_source_of_a_name(installed, config, environ, source):
    installed(one=backend("a"))
    with pytest.raises(AcceleratorError, match=rf"accelerator 'x' \({source}\)"):
        select(config=config, environ=environ)


def test_nothing_available_is_an_error_with_every_reason(installed):
    installed(one=backend("a", ok=False))
    with pytest.raises(AcceleratorError, match="a: no a device"):
        select(environ=NOTHING)


def test_unknown_name_error_has_the_nearest_and_broken_plugins(installed):
    installed(rlhf=backend("cpu"), one=backend("good"), other=ImportError("no driver library"))
    line = r"no such accelerator; did you mean 'good'\? available: cpu, good; plugin other 2\.0 is broken.*driver"
    with pytest.raises(AcceleratorError, match=line):
        select("goood", environ=NOTHING)


@pytest.mark.parametrize("wish", ["twin", None])
def test_two_plugins_with_one_name_are_both_named(installed, wish):
    installed(one=backend("twin"), two=backend("twin"), rlhf=backend("cpu"))
    with pytest.raises(AcceleratorError, match=r"one 2\.0 and two 2\.0 both offer"):
        select(wish, environ=NOTHING)
    assert select("cpu", environ=NOTHING).name == "cpu"


def test_reports_come_best_first(installed):
    installed(
        a=ImportError("x"), b=backend("off", priority=99, ok=False), c=backend("low"), d=backend("high", priority=3)
    )
    assert [report.name for report in available(NOTHING)] == ["high", "low", "off", "a_entry"]


@pytest.mark.parametrize(
    ("allowlist", "names"),
    [
        ("", ["npu", "tpu", "cpu"]),
        ("none", ["cpu"]),
        ("npu-plugin", ["npu", "cpu"]),
        ("NPU_Plugin, tpu_plugin", ["npu", "tpu", "cpu"]),
        ("npu_plugin_entry", ["npu", "cpu"]),
    ],
)
def test_allowlist_names_distributions_or_entry_points(installed, allowlist, names):
    installed(rlhf=backend("cpu"), npu_plugin=backend("npu", priority=9), tpu_plugin=backend("tpu", priority=8))
    assert [report.name for report in available({"RLHF_PLUGINS": allowlist})] == names


def test_an_allowlist_that_names_a_missing_plugin_is_reported(installed):
    installed(rlhf=backend("cpu"))
    with pytest.raises(AcceleratorError, match="named in RLHF_PLUGINS, but no such plugin is installed"):
        select(environ={"RLHF_PLUGINS": "typo"})


def test_choice_is_exported_with_the_backends_variables(installed):
    installed(one=backend("a", env={"MODE": "eager", "CACHE": "/tmp/a"}))
    environ = {"MODE": "lazy"}
    selection = select(environ=environ)
    selection.export(environ)
    assert environ == {"RLHF_ACCELERATOR": "a", "MODE": "lazy", "CACHE": "/tmp/a"}
    assert select(environ=environ).name == "a"


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        ("nowhere:Nothing", "cannot be imported .ModuleNotFoundError"),
        ("accelerators.backends.cpu.backend:Missing", "failed .AttributeError"),
        ("accelerators.backends.cpu.backend:NO_FP16", "expected a subclass of Accelerator"),
        ("accelerators.backends.cpu.backend:CPU", "its name is 'cpu', expected 'a'"),
    ],
)
def test_a_factory_that_makes_no_fitting_backend_is_an_error(installed, factory, complaint):
    spec = AcceleratorSpec(name="a", api_version=2, factory=factory, probe=lambda: Probe(True, ""))
    installed(one=spec)
    with pytest.raises(AcceleratorError, match=complaint) as raised:
        select("a", environ=NOTHING).create()
    assert "one 2.0" in str(raised.value)


def test_ranks_must_agree():
    verify(["cpu", "cpu"])
    with pytest.raises(AcceleratorError, match="cpu on ranks 0, 2; npu on ranks 1") as raised:
        verify(["cpu", "npu", "cpu"])
    assert raised.value.exit_code == 2
