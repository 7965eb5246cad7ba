"""A plugin that misbehaves in a run, or as a backend is explained: it is named, and runs on other backends go on."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerators import (
    AcceleratorError,
    AcceleratorSpec,
    DeepSpeedView,
    DeviceInfo,
    KernelImpl,
    Memory,
    PluginDefect,
    Precision,
    Problem,
    Support,
    select,
)
from accelerators.backends.cpu.backend import CPU
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
    assert cpu.kernel("attention", required=True) == "cpu_composed"
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
    assert cpu.kernel("attention", required=True) == "cpu_composed"
    (*others, (refused, support)) = cpu.candidates("attention")
    assert len(others) == 3 and all(other.ok for _, other in others)
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
    assert cpu.kernel("attention", required=True) == "cpu_composed"
    assert cpu.kernel("attention") == "cpu_composed"
    (record,) = caplog.records
    assert record.getMessage().startswith("attention: fast is not used: its factory failed (")
    assert reason in record.getMessage()
    assert NAME in record.getMessage()
    assert cpu.capabilities()["attention"].implementation == "composed"


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


@pytest.mark.parametrize("hook", ["rlhf_kernels", "rlhf_check_run"])
def test_a_hook_that_does_not_answer_is_named_while_it_is_waited_for(misbehaved, monkeypatch, caplog, hook):
    def slow():
        time.sleep(0.3)
        return []

    misbehaved(lambda: plugin(**{hook: slow}))
    selection = select("cpu")
    monkeypatch.setenv("RLHF_PROBE_TIMEOUT", "0.1")
    selection.check_run(selection.create(), {})
    (record,) = caplog.records
    assert record.getMessage() == f"plugin {NAME} does not answer {hook} (for 0.1 s now)"


@pytest.mark.parametrize(
    ("operation", "hint"),
    [("adamW", "did you mean 'adamw'? "), ("graph-capture", "did you mean 'graph_capture'? "), ("x", ""), ("", "")],
)
def test_an_unknown_operation_is_refused_as_its_kernel_is_made(operation, hint):
    said = f"KernelImpl: no operation is named {operation!r}; {hint}known: adamw, adamw_cpu_offload, clip_grad_norm, "
    with pytest.raises(ValueError, match=re.escape(said)):
        kernel(operation=operation)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("step_boundery", "step_boundary"),
        ("is_lasy", "is_lazy"),
        ("synchronise", "synchronize"),
        ("reset_paek", "reset_peak"),
        ("empty_cach", None),  # the beginning of a name is another form of it, as its plural is
        ("emptycache", "empty_cache"),
        ("abscent", "absent"),
        ("_step_boundery", None),
        ("presision", None),  # precision itself is there
        ("devices", None),
        ("compilation", None),
        ("captured", None),
        ("get_rng_state", None),
        ("on_device", None),
        ("completions", None),
        ("speed", None),
        ("names", None),
        ("machine", None),
        ("queue_depth", None),
    ],
)
def test_a_name_that_is_nearly_one_of_the_interface_is_an_error(misbehaved, monkeypatch, name, meant):
    own = {"precision": CPU.precision, name: lambda self: None}
    npu(monkeypatch, **own)
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    if meant is None:
        select("npu").create()
        return
    with pytest.raises(PluginDefect) as raised:
        select("npu").create()
    assert str(raised.value) == (
        f"accelerator npu of bad 2.0: factory 'npu_backend:NPU' defines {name}, which no trainer calls; "
        f"name it {meant}, or _{name} if it is a helper; report it to the plugin's authors"
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: DeviceInfo("NPU", "2", "none"), "DeviceInfo: count is '2', expected an int"),
        (
            lambda: DeviceInfo("NPU", 2, "none", peak_flops=4e12),
            "DeviceInfo: peak_flops is 4000000000000.0, expected a Mapping",
        ),
        *(
            (
                lambda peaks=peaks: DeviceInfo("NPU", 2, "none", peak_flops=peaks),
                f"DeviceInfo: peak_flops has {peaks}, expected bf16 or fp16 or fp32 and a number above 0",
            )
            for peaks in ({"int8": 4e12}, {"bf16": "4e12"}, {"fp32": 0})
        ),
        (lambda: Memory(1.5, 2, 3), "Memory: allocated is 1.5, expected an int"),
        (lambda: Precision(torch.float32, "fp12", ""), "Precision: name is 'fp12', expected bf16, fp16, fp32"),
        (lambda: Precision("float32", "fp32", ""), "Precision: dtype of fp32 is float32, expected torch.float32"),
    ],
)
def test_values_of_a_backend_are_checked_as_they_are_made(value, said):
    with pytest.raises((TypeError, ValueError)) as raised:
        value()
    assert str(raised.value) == said


def test_a_refused_precision_is_no_defect(misbehaved, monkeypatch):
    npu(monkeypatch, precision=raises(AcceleratorError("no fp16 here; use fp32")))
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(AcceleratorError, match=r"^no fp16 here; use fp32$") as raised:
        select("npu").create().precision("fp16")
    assert not isinstance(raised.value, PluginDefect)


@pytest.mark.parametrize("error", [KeyError("npu"), RuntimeError("wrong size")])
def test_a_state_of_other_generators_is_the_trainers_to_answer(misbehaved, monkeypatch, error):
    npu(monkeypatch, set_rng_state=raises(error))
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(type(error)):
        select("npu").create().set_rng_state({})


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "no memory"), RuntimeError("can't allocate memory")])
def test_a_lack_of_memory_passes_as_it_is(misbehaved, monkeypatch, error):
    npu(monkeypatch, synchronize=raises(error))
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(type(error)) as raised:
        select("npu").create().synchronize()
    assert raised.value is error


def test_collectives_may_become_known_as_the_device_is_bound(misbehaved, monkeypatch):
    npu(monkeypatch, dist_backend=lambda self: "hccl")
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    accelerator = select("npu").create()
    assert accelerator.dist_backend() == "hccl"
    accelerator.bind(0)
    with pytest.raises(PluginDefect, match=r"gave 'hccl' instead of a backend that torch.distributed knows"):
        accelerator.dist_backend()
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo", "hccl"])
    assert accelerator.dist_backend() == "hccl"


def test_what_a_captured_function_raises_is_not_the_plugins(misbehaved, monkeypatch):
    npu(monkeypatch, capture=lambda self, fn, key: fn)
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(KeyError):
        select("npu").create().capture(raises(KeyError("mine")), key="step")()


def test_the_built_in_backends_are_not_watched(monkeypatch):
    monkeypatch.setattr(CPU, "memory", raises(KeyError("ours")))
    monkeypatch.setattr(CPU.memory, "__module__", "accelerators.backends.cpu.backend")
    with pytest.raises(KeyError):
        select("cpu", environ={}).create().memory()


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
