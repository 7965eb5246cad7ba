"""Every hook is documented by a plugin that runs, and what plugins answer is kept apart from one another."""

from __future__ import annotations

import inspect
import textwrap
from types import ModuleType, SimpleNamespace

import pluggy
import pytest

from accelerators import (
    AcceleratorError,
    AcceleratorSpec,
    KernelImpl,
    Probe,
    Problem,
    Selection,
    Support,
    hookimpl,
    hookspecs,
    select,
)

HOOKS = [name for name in vars(hookspecs) if name.startswith("rlhf_")]
RUN = {"engine": {"zero_stage": 3}}


def documented_plugin(hook: str) -> ModuleType:
    """The indented part of a hook's docstring, as a module."""
    paragraphs = inspect.getdoc(getattr(hookspecs, hook)).splitlines()
    code = "\n".join(line for line in paragraphs if not line.strip() or line.startswith("    "))
    module = ModuleType(f"example_of_{hook}")
    exec(textwrap.dedent(code), vars(module))
    return module


def with_plugins(**plugins: ModuleType) -> Selection:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name, plugin in plugins.items():
        manager.register(plugin, name=name)
    return Selection(select("cpu", environ={"RLHF_PLUGINS": "none"}).spec, "rlhf", "", manager)


def plugin(**hooks) -> ModuleType:
    module = ModuleType("plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(specname=name)(function))
    return module


def no_objection():
    return []


@pytest.mark.parametrize(
    ("hook", "arguments", "answer"),
    [
        ("rlhf_accelerators", {}, AcceleratorSpec),
        ("rlhf_kernels", {"accelerator": SimpleNamespace(name="npu")}, KernelImpl),
        ("rlhf_check_run", {"accelerator": SimpleNamespace(name="npu"), "run": RUN}, Problem),
    ],
)
def test_the_plugin_in_a_hooks_docstring_runs(hook, arguments, answer):
    manager = with_plugins(example=documented_plugin(hook)).plugins
    manager.check_pending()
    (answers,) = getattr(manager.hook, hook)(**arguments)
    answers = list(answers)
    assert [type(value) for value in answers] == [answer]
    if answer is AcceleratorSpec:
        assert isinstance(answers[0].probe(), Probe)
    if answer is KernelImpl:
        assert answers[0].supported(arguments["accelerator"]).ok


def test_there_are_three_hooks_and_all_are_tried_above():
    assert HOOKS == ["rlhf_accelerators", "rlhf_kernels", "rlhf_check_run"]


def test_all_objections_to_a_run_come_in_one_error():
    def broken(run):
        raise KeyError("zero")

    selection = with_plugins(
        one=plugin(rlhf_check_run=lambda run: [Problem("too large", "use a smaller model")]),
        two=plugin(rlhf_check_run=broken),
        three=plugin(rlhf_check_run=no_objection),
    )
    with pytest.raises(AcceleratorError) as raised:
        selection.check_run(selection.create(), RUN)
    assert "too large: use a smaller model" in str(raised.value)
    assert "the check of plugin two failed (KeyError: 'zero')" in str(raised.value)


def test_a_run_without_objections_may_start():
    selection = with_plugins(one=plugin(rlhf_check_run=no_objection))
    selection.check_run(selection.create(), RUN)


def test_a_plugin_whose_kernels_fail_is_logged_and_the_others_stay(caplog):
    always = Support(True, "the only one")
    kernel = KernelImpl(operation="graph_capture", name="y", factory=lambda a: max, supported=lambda a: always)

    def broken(accelerator):
        raise OSError("no library")

    accelerator = with_plugins(
        one=plugin(rlhf_kernels=broken), two=plugin(rlhf_kernels=lambda accelerator: [kernel])
    ).create()
    assert accelerator.kernels.capabilities()["graph_capture"].implementation == "y"
    assert "plugin one offers no kernels: OSError: no library" in caplog.text
