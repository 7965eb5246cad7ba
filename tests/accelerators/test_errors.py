"""Errors in a plugin's code: one line with the plugin and the method, unless they are somebody else's errors."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerators import (
    AcceleratorError,
    CaptureError,
    DeepSpeedDevice,
    DeviceInfo,
    KernelImpl,
    Memory,
    PluginError,
    Precision,
    Problem,
    blame_plugin,
    find_out_of_memory,
    select,
)
from accelerators.backends.cpu.backend import CPU
from tests.accelerators.fake_plugins import NAME, fast, npu, offers, plugin, raises, spec

INFO = DeviceInfo("NPU", 1, "none")
BACKEND = "accelerator npu of bad 2.0"
NO_CARD = OSError("no card")


def returns(value: Any) -> Any:
    return lambda *args, **kwargs: value


class VaguePrecision(Precision):
    def autocast(self):
        raise NO_CARD


class Sluggish(torch.optim.SGD):
    def step(self, closure=None):
        raise NO_CARD


# the methods of a backend

CALLS = {
    "bind raises": ({"bind": raises(NO_CARD)}, lambda npu: npu.bind(0), "bind()", OSError),
    "bind returns 0": ({"bind": returns(0)}, lambda npu: npu.bind(0), "bind()", TypeError),
    "synchronize exits": ({"synchronize": raises(SystemExit(3))}, lambda npu: npu.synchronize(), "synchronize()", None),
    "info returns a dict": ({"info": returns({})}, lambda npu: npu.info(), "info()", TypeError),
    "memory returns a tuple": ({"memory": returns((1, 2, 3))}, lambda npu: npu.memory(), "memory()", TypeError),
    "precision is a dtype": (
        {"precision": returns(torch.float32)},
        lambda npu: npu.precision(),
        "precision()",
        TypeError,
    ),
    "autocast raises": (
        {"precision": returns(VaguePrecision(torch.float32, "fp32", "the only one"))},
        lambda npu: npu.precision().autocast(),
        "autocast()",
        OSError,
    ),
    "prepare_deepspeed returns None": (
        {"prepare_deepspeed": returns(None)},
        lambda npu: npu.prepare_deepspeed(),
        "prepare_deepspeed()",
        TypeError,
    ),
    "deepspeed_accelerator raises": (
        {"deepspeed_accelerator": raises(NO_CARD)},
        lambda npu: npu.prepare_deepspeed(),
        "deepspeed_accelerator()",
        OSError,
    ),
    "precision fails when DeepSpeed asks": (
        {"precision": raises(NO_CARD), "deepspeed_accelerator": lambda npu: DeepSpeedDevice(npu)},
        lambda npu: npu.bind(0) and npu.deepspeed_accelerator().supported_dtypes(),
        "precision()",
        OSError,
    ),
    "to_device returns None": (
        {"to_device": returns(None)},
        lambda npu: npu.to_device({"rows": torch.zeros(1)}),
        "to_device() failed (TypeError: it returned None, expected a result)",
        TypeError,
    ),
    "shape_policy returns None": (
        {"shape_policy": returns(None)},
        lambda npu: npu.shape_policy(),
        "shape_policy()",
        TypeError,
    ),
    "rng_state returns None": ({"rng_state": returns(None)}, lambda npu: npu.rng_state(), "rng_state()", TypeError),
    "kernel_implementations returns a dict": (
        {"kernel_implementations": returns([{"operation": "adamw"}])},
        lambda npu: npu.kernels.capabilities(),
        "kernel_implementations()",
        TypeError,
    ),
    "capture returns None": (
        {"capture": returns(None)},
        lambda npu: npu.capture(print, key="step"),
        "capture()",
        TypeError,
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_backend_method_fails_names_plugin(created, case):
    methods, call, method, cause = CALLS[case]
    with pytest.raises(PluginError) as raised:
        call(created(**methods))
    line = str(raised.value)
    assert line.startswith(f"{BACKEND}: ") and method in line
    assert line.endswith("; report it to the plugin's authors") and "\n" not in line
    assert isinstance(raised.value.__cause__, cause or SystemExit)


def test_built_in_backend_fails_unchanged(monkeypatch):
    monkeypatch.setattr(CPU, "memory", raises(KeyError("ours")))
    monkeypatch.setattr(CPU.memory, "__module__", "accelerators.backends.cpu.backend")
    with pytest.raises(KeyError):
        select("cpu", environ={}).create().memory()


def test_backend_refusal_stays_unchanged(created):
    with pytest.raises(AcceleratorError, match=r"^no fp16 here; use fp32$") as raised:
        created(precision=raises(AcceleratorError("no fp16 here; use fp32"))).precision("fp16")
    assert not isinstance(raised.value, PluginError)


@pytest.mark.parametrize("error", [KeyError("npu"), RuntimeError("wrong size")])
def test_set_rng_state_error_reaches_trainers(created, error):
    with pytest.raises(type(error)):
        created(set_rng_state=raises(error)).set_rng_state({})


def test_ctrl_c_passes(created):
    with pytest.raises(KeyboardInterrupt):
        created(synchronize=raises(KeyboardInterrupt())).synchronize()


def test_missing_methods_are_named(misbehaved, monkeypatch):
    from accelerators import Accelerator

    npu(monkeypatch)
    monkeypatch.setattr("npu_backend.NPU", type("NPU", (Accelerator,), {"name": "npu", "info": returns(INFO)}))
    misbehaved(lambda: offers(spec(factory="npu_backend:NPU")))
    with pytest.raises(PluginError, match=rf"^{BACKEND}: factory 'npu_backend:NPU' failed .*bind.*precision"):
        select("npu").create()


def test_misspelled_method_is_refused_with_its_name():
    with pytest.raises(TypeError, match=r"^NPU defines step_boundery, .* 'step_boundary'\? .* helper _step_boundery$"):
        type("NPU", (CPU,), {"step_boundery": returns(None)})
    type("NPU", (CPU,), {"_step_boundery": returns(None), "recipes": returns(None)})


def test_backend_that_cannot_be_created_names_plugin(created):
    with pytest.raises(PluginError, match=rf"^{BACKEND}: factory .* failed \(SystemExit: 3"):
        created(__init__=raises(SystemExit(3)))
    with pytest.raises(AcceleratorError, match=r"^driver 1\.0 is too old$"):
        created(__init__=raises(AcceleratorError("driver 1.0 is too old")))


@pytest.mark.parametrize("env", [lambda run: {"CARDS": 3}, lambda run: None, raises(KeyError())])
def test_wrong_environment_names_plugin_and_sets_nothing(misbehaved, env):
    misbehaved(lambda: offers(spec(env=env)))
    environ: dict[str, str] = {}
    with pytest.raises(PluginError, match=rf"^{BACKEND}: its env failed \("):
        select("npu").export(environ)
    assert environ == {}


# inside the plugin


class Loud(RuntimeError):
    """An error that the plugin itself catches."""


def guarded(self):
    try:
        self.info()
    except Loud:
        return Memory(1, 2, 3)


def test_plugin_may_catch_its_own_errors(created):
    accelerator = created(info=raises(Loud("not yet")), memory=guarded)
    assert accelerator.memory() == Memory(1, 2, 3)
    with pytest.raises(PluginError):
        accelerator.info()


def test_named_backend_behaves_like_the_plain_one(created):
    accelerator = created(info=functools.partial(returns(INFO)))
    assert isinstance(accelerator, CPU)
    accelerator.model = "mine"
    copied = copy.deepcopy(accelerator)
    copied.model = "copy"
    assert (accelerator.model, copied.model, copied.info()) == ("mine", "copy", INFO)
    del accelerator.model
    assert not hasattr(accelerator, "model")


# memory


class DeviceOutOfMemory(RuntimeError):
    """The class of a vendor's runtime."""


def wrapping(error):
    def method(self):
        try:
            raise error
        except Exception as cause:
            raise ValueError("the step failed") from cause

    return method


@pytest.mark.parametrize(
    "error",
    [OSError(12, "no memory"), RuntimeError("can't allocate memory"), DeviceOutOfMemory("3 GiB")],
)
def test_out_of_memory_stays_unchanged(created, error):
    with pytest.raises(type(error)) as raised:
        created(synchronize=raises(error)).synchronize()
    assert raised.value is error
    with pytest.raises(ValueError, match="the step failed") as raised:
        created(synchronize=wrapping(error)).synchronize()
    assert find_out_of_memory(raised.value) is error


def test_backend_recognizes_out_of_memory_in_its_own_words(created):
    tiles = KeyError("tiles")
    with pytest.raises(KeyError):
        created(synchronize=raises(tiles), is_out_of_memory=lambda self, error: error is tiles).synchronize()
    with pytest.raises(PluginError):
        created(synchronize=raises(tiles), is_out_of_memory=raises(KeyError("mine"))).synchronize()


# kernels of a plugin

KERNELS = {
    "adamw raises": (fast("adamw", raises(NO_CARD)), lambda adamw: adamw([])),
    "adamw does not step": (
        fast("adamw", lambda params: Sluggish(params)),
        lambda adamw: adamw([torch.nn.Parameter(torch.zeros(1))]).step(),
    ),
    "clip_grad_norm raises": (fast("clip_grad_norm", raises(NO_CARD)), lambda clip: clip([], 1.0)),
    "graph_capture raises": (fast("graph_capture", raises(NO_CARD)), lambda record: record(print, "step")),
    "a recording raises": (
        fast("graph_capture", lambda fn, key: raises(NO_CARD)),
        lambda record: record(print, "step")(),
    ),
}


@pytest.mark.parametrize("case", KERNELS)
def test_kernel_fails_names_plugin(created, case):
    kernel, use = KERNELS[case]
    with pytest.raises(PluginError, match=rf"^{kernel.operation} kernel 'fast' of bad 2.0 \(bad_entry\)") as raised:
        use(created([kernel]).kernels.get(kernel.operation))
    assert str(raised.value).endswith("or leave it out with RLHF_PLUGINS")
    assert raised.value.__cause__ is NO_CARD


def test_scheduler_of_torch_drives_optimizer_of_plugin(created):
    accelerator = created([fast("adamw", lambda params: torch.optim.SGD(params, lr=1.0))])
    weight = torch.ones(1, requires_grad=True)
    optimizer = accelerator.kernels.get("adamw")([weight])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    weight.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert weight.item() == 0.5


@pytest.mark.parametrize(
    "kernel",
    [
        fast("attention", None, factory=raises(SystemExit(3))),
        fast("attention", 7),
        fast("attention", "flash_atention"),
    ],
)
def test_kernel_that_cannot_be_made_gives_way_with_one_warning(created, caplog, kernel):
    kernels = created([kernel]).kernels
    assert kernels.capabilities()["attention"].implementation == "fast"
    with caplog.at_level(logging.WARNING):
        assert kernels.get("attention", required=True) == kernels.get("attention") == "cpu_composed"
    (record,) = caplog.records
    assert record.getMessage().startswith("attention: fast is not used: its factory failed (")
    assert NAME in record.getMessage()
    assert kernels.capabilities()["attention"].implementation == "composed"


@pytest.mark.parametrize("supported", [returns(True), raises(SystemExit(3))])
def test_support_check_that_fails_is_a_refusal(created, supported):
    kernels = created([fast("attention", "eager", supported=supported)]).kernels
    assert kernels.get("attention", required=True) == "cpu_composed"
    (support,) = [support for implementation, support in kernels.candidates("attention") if implementation.plugin]
    assert not support.ok and support.reason.startswith("its check failed (")


WRONG_ANSWERS = [returns("adamw"), returns(7), returns([None]), raises(NO_CARD), raises(SystemExit(3))]


@pytest.mark.parametrize("hook", WRONG_ANSWERS)
def test_wrong_kernels_of_another_plugin_are_left_out(misbehaved, caplog, hook):
    misbehaved(lambda: plugin(rlhf_kernels=hook))
    assert select("cpu").create().kernels.get("attention", required=True) == "cpu_composed"
    assert [f"plugin {NAME} offers no kernels: " in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("hook", WRONG_ANSWERS)
def test_wrong_kernels_of_the_backends_plugin_end_the_run(offered, hook):
    offered({"rlhf_kernels": hook})
    with pytest.raises(PluginError, match=rf"^{BACKEND}: its hook rlhf_kernels failed \("):
        select("npu").create()


@pytest.mark.parametrize("hook", WRONG_ANSWERS)
def test_run_check_that_fails_stops_only_its_own_backend(offered, caplog, hook):
    offered({"rlhf_check_run": hook})
    failure = f"the check of plugin {NAME} failed ("
    selection = select("cpu")
    selection.check_run(selection.create(), {})
    assert failure in caplog.text
    selection = select("npu")
    with pytest.raises(AcceleratorError) as raised:
        selection.check_run(selection.create(), {})
    assert failure in str(raised.value)


@pytest.mark.parametrize("hook", ["rlhf_kernels", "rlhf_check_run"])
def test_slow_hook_is_named_while_it_runs(misbehaved, monkeypatch, caplog, hook):
    misbehaved(lambda: plugin(**{hook: lambda: time.sleep(0.3)}))
    selection = select("cpu")
    monkeypatch.setenv("RLHF_PROBE_TIMEOUT", "0.1")
    selection.check_run(selection.create(), {})
    (record,) = caplog.records
    assert record.getMessage() == f"plugin {NAME} does not answer {hook} (for 0.1 s now)"


# captured functions


def at_once(self, fn, key):
    fn()
    return fn


def wrapped(self, fn, key):
    try:
        fn()
    except Exception as error:
        raise RuntimeError(f"{key} cannot be recorded") from error


def threaded(self, fn, key):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(fn).result()


def replayed(self, fn, key):
    return lambda *args: wrapped(self, fn, key)


def by_super(self, fn, key):
    return CPU.capture(self, fn, key)


class Step:
    """A defect of the trainers, in each form that a function may have."""

    def __init__(self) -> None:
        self.error = KeyError("defect in the decoder")

    def __call__(self) -> None:
        raise self.error

    def method(self) -> None:
        self()

    @torch.no_grad()
    def decorated(self) -> None:
        self()


FORMS = {
    "method": lambda step: step.method,
    "decorated": lambda step: step.decorated,
    "object": lambda step: step,
    "partial": lambda step: functools.partial(Step.method, step),
}


@pytest.mark.parametrize(
    ("form", "capture"),
    [
        *((form, wrapped) for form in FORMS),
        *(("method", capture) for capture in (at_once, threaded, replayed, by_super)),
    ],
)
def test_error_of_captured_function_stays_unchanged(created, form, capture):
    step = Step()
    with pytest.raises(KeyError) as raised:
        created(capture=capture).capture(FORMS[form](step), key="step")()
    assert raised.value is step.error


@pytest.mark.parametrize("capture", [at_once, replayed])
def test_error_of_function_in_recorder_kernel_is_unchanged(created, capture):
    step, recorder = Step(), functools.partial(capture, None)
    with pytest.raises(KeyError) as raised:
        created([fast("graph_capture", recorder)]).capture(step.method, key="step")()
    assert raised.value is step.error


def test_error_of_replay_names_plugin(created):
    captured = created(capture=lambda self, fn, key: raises(NO_CARD)).capture(lambda: None, key="step")
    with pytest.raises(PluginError) as raised:
        captured()
    assert str(raised.value).startswith(f"{BACKEND}: capture(): its recording of 'step' failed (OSError: no card)")


def test_plugin_may_compile_captured_function(created):
    accelerator = created(capture=lambda self, fn, key: torch.compile(fn, backend="eager", fullgraph=True))
    assert accelerator.capture(lambda x: x * 2 + 1, key="step")(torch.ones(1)) == 3


def test_capture_error_reaches_trainers(created):
    with pytest.raises(CaptureError):
        created(capture=by_super).capture(lambda: torch.ones(1).item(), key="step")()


def test_function_that_is_not_recorded_is_returned_itself(created):
    step = Step().method
    assert created(capture=lambda self, fn, key: fn).capture(step, key="step") is step


# values


@pytest.mark.parametrize(
    "value",
    [
        lambda: DeviceInfo("NPU", "2", "none"),
        lambda: DeviceInfo("NPU", 2, "none", peak_flops={"int8": 4e12}),
        lambda: DeviceInfo("NPU", 2, "none", peak_flops={"fp32": 0}),
        lambda: Memory(1.5, 2, 3),
        lambda: Precision(torch.float32, "fp12", ""),
        lambda: Precision(torch.float32, "bf16", ""),
        lambda: Problem("not today", None),
        lambda: KernelImpl(operation="adamW", name="fast", factory=print, supported=print),
        lambda: KernelImpl(operation="adamw", name="fast", factory="a:b", supported=print),
        lambda: KernelImpl(operation="adamw", name="auto", factory=print, supported=print),
    ],
)
def test_wrong_field_of_a_value_is_refused(value):
    with pytest.raises((TypeError, ValueError), match=r"(expected|known:)"):
        value()


def test_vendors_package_that_breaks_the_import_of_torch_is_named(monkeypatch):
    """torch's own code raises the error, so that the test notices if its words change."""
    extension = SimpleNamespace(name="torch_chip", load=raises(ImportError("libchip.so: cannot open")))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [extension])
    with pytest.raises(RuntimeError) as caught:
        torch._import_device_backends()
    line = str(blame_plugin(caught.value))
    assert line.startswith("import torch failed in torch_chip (ImportError: libchip.so: cannot open); ")
    assert line.endswith("or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use another device")
