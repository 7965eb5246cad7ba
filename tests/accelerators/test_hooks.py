"""Every hook is documented by a plugin that runs, and all objections to a run come in one error."""

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
    hookspecs,
    select,
)
from tests.accelerators.fake_plugins import fast, plugin, raises

HOOKS = {
    "rlhf_accelerators": ({}, AcceleratorSpec),
    "rlhf_kernels": ({"accelerator": SimpleNamespace(name="npu")}, KernelImpl),
    "rlhf_check_run": ({"accelerator": SimpleNamespace(name="npu"), "run": {"engine": {"zero_stage": 3}}}, Problem),
}


def documented_plugin(hook: str) -> ModuleType:
    """The indented part of a hook's docstring, as a module."""
    paragraphs = inspect.getdoc(getattr(hookspecs, hook)).splitlines()
    code = "\n".join(line for line in paragraphs if not line.strip() or line.startswith("    "))
    module = ModuleType(f"example_of_{hook}")
    exec(textwrap.dedent(code), vars(module))
    return module


def with_plugins(*plugins: ModuleType) -> Selection:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for number, module in enumerate(plugins):
        manager.register(module, name=f"plugin-{number}")
    return Selection(select("cpu", environ={"RLHF_PLUGINS": "none"}).spec, "rlhf", "", manager)


@pytest.mark.parametrize("hook", HOOKS)
def test_plugin_in_hooks_docstring_runs(hook):
    arguments, kind = HOOKS[hook]
    manager = with_plugins(documented_plugin(hook)).plugins
    manager.check_pending()
    (answers,) = getattr(manager.hook, hook)(**arguments)
    (answer,) = answers
    assert type(answer) is kind
    if kind is AcceleratorSpec:
        assert isinstance(answer.probe(), Probe)
    if kind is KernelImpl:
        assert answer.supported(arguments["accelerator"]).ok


def test_all_hooks_are_tried_above():
    assert list(HOOKS) == [name for name in vars(hookspecs) if name.startswith("rlhf_")]


def test_all_objections_to_a_run_come_in_one_error():
    objecting = plugin(rlhf_check_run=lambda run: [Problem("too large", "use a smaller model")])
    content = plugin(rlhf_check_run=lambda: ())
    selection = with_plugins(objecting, plugin(rlhf_check_run=raises(KeyError("zero"))), content)
    with pytest.raises(AcceleratorError) as raised:
        selection.check_run(selection.create(), {})
    assert "too large: use a smaller model" in str(raised.value)
    assert "the check of plugin plugin-1 failed (KeyError: 'zero')" in str(raised.value)
    selection = with_plugins(content)
    assert selection.check_run(selection.create(), {}) is None  # type: ignore[func-returns-value]


def test_plugin_whose_kernels_fail_stops_no_other(caplog):
    kernel = fast("graph_capture", max)
    working, failing = (plugin(rlhf_kernels=hook) for hook in (lambda: [kernel], raises(OSError("no library"))))
    for plugins in ((failing, working), (working, failing)):
        kernels = with_plugins(*plugins).create().kernels
        assert kernels.capabilities()["graph_capture"].implementation == "fast"
        assert f"plugin plugin-{plugins.index(failing)} offers no kernels: OSError: no library" in caplog.text
