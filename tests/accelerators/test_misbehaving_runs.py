"""A plugin that misbehaves in a run, or as a backend is explained: it is named, and runs on other backends go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerators import AcceleratorError, AcceleratorSpec, DeepSpeedView, KernelImpl, Problem, Support, select
from rlhf.cli.accelerators import explain
from tests.accelerators.misbehaving import GOOD, NAME, altered, npu, offers, plugin, raises, spec


def kernel(**fields: Any) -> KernelImpl:
    usual = {
        "operation": "attention",
        "name": "fast",
        "factory": lambda accelerator: "fast",
        "supported": lambda accelerator: Support(True, "fast here"),
        "priority": 99,
    }
    return KernelImpl(**{**usual, **fields})


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
        (raises(OSError("no library")), "OSError: no library"),
        (raises(SystemExit(3)), "SystemExit: 3"),
    ],
)
def test_a_plugin_with_wrong_kernels_offers_none_and_is_named(misbehaved, caplog, answer, reason):
    misbehaved(lambda: plugin(rlhf_kernels=lambda accelerator: answer(accelerator)))
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
        (raises(SystemExit(3)), "its check failed (SystemExit: 3)"),
    ],
)
def test_a_check_that_gives_no_support_is_a_refusal(misbehaved, supported, reason):
    misbehaved(
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
        (raises(ImportError("libfast.so")), "ImportError: libfast.so"),
        (raises(SystemExit(3)), "SystemExit: 3"),
        (lambda accelerator: None, "it made None"),
        (lambda accelerator: 7, "it made 7"),
        (lambda: "fast", "takes 0 positional arguments"),
    ],
)
def test_a_kernel_that_cannot_be_made_gives_way_with_one_warning(misbehaved, caplog, factory, reason):
    misbehaved(lambda: plugin(rlhf_kernels=lambda accelerator: [kernel(factory=factory)]))
    cpu = select("cpu").create()
    assert cpu.capabilities()["attention"].implementation == "fast"
    assert cpu.kernel("attention", required=True) == "sdpa"
    assert cpu.kernel("attention") == "sdpa"
    (record,) = caplog.records
    assert record.getMessage().startswith("attention: fast is not used: its factory failed (")
    assert reason in record.getMessage()
    assert NAME in record.getMessage()
    assert cpu.capabilities()["attention"].implementation == "sdpa"


def test_where_no_kernel_is_left_the_error_names_the_plugin(misbehaved):
    failing = kernel(operation="graph_capture", factory=raises(ImportError("libfast.so")))
    misbehaved(lambda: plugin(rlhf_kernels=lambda accelerator: [failing]))
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
def test_a_check_that_fails_stops_runs_on_its_own_backend_alone(misbehaved, monkeypatch, caplog, answer, reason):
    npu(monkeypatch)
    misbehaved(
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
        (raises(KeyError("seed")), "KeyError: 'seed'"),
        (raises(SystemExit(3)), "SystemExit: 3"),
    ],
)
def test_an_environment_that_is_none_is_the_plugins_error_and_sets_nothing(misbehaved, env, reason):
    misbehaved(lambda: offers(spec(env=env)))
    environ: dict[str, str] = {}
    with pytest.raises(AcceleratorError) as raised:
        select("npu").export(environ)
    assert "accelerator npu of bad 2.0: its env failed (" in str(raised.value)
    assert reason in str(raised.value)
    assert environ == {}
    select("cpu").export(environ)
    assert environ == {"RLHF_ACCELERATOR": "cpu"}


@pytest.mark.parametrize("error", [ImportError("libnpu.so"), SystemExit(3)])
def test_a_backend_that_cannot_be_made_is_the_plugins_error(misbehaved, monkeypatch, error):
    npu(monkeypatch, __init__=raises(error))
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(AcceleratorError, match=r"accelerator npu of bad 2.0: .* failed \((ImportError|SystemExit)"):
        select("npu").create()


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (lambda self: [{"operation": "adamw"}], "TypeError: a dict instead of KernelImpl"),
        (raises(OSError("no library")), "OSError: no library"),
        (raises(SystemExit(3)), "SystemExit: 3"),
    ],
)
def test_a_backend_whose_own_kernels_are_none_is_the_plugins_error(misbehaved, monkeypatch, kernels, reason):
    npu(monkeypatch, kernels=kernels)
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(AcceleratorError, match=rf"bad 2.0: kernels\(\) failed \({reason}"):
        select("npu").create().kernel("adamw")


@pytest.mark.parametrize(
    ("method", "answer"),
    [("memory", (1, 2, 3)), ("info", {"model": "NPU"}), ("shape_policy", "static"), ("precision", None), ("bind", 0)],
)
def test_a_backend_that_cannot_be_explained_is_the_plugins_error(misbehaved, monkeypatch, method, answer):
    view = DeepSpeedView("none", "cpu", "gloo", (), "0")
    npu(monkeypatch, **{"prepare_deepspeed": lambda self: view, method: lambda self, *arguments: answer})
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    monkeypatch.setenv("RLHF_ACCELERATOR", "auto")
    with pytest.raises(AcceleratorError, match=r"bad 2.0.*report it to"):
        explain("npu")
