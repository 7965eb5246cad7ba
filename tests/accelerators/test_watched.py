"""A plugin that works goes on working while it is watched, and is not blamed for what others got wrong."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from accelerators import (
    AcceleratorError,
    AcceleratorSpec,
    CaptureError,
    DeviceInfo,
    KernelImpl,
    Memory,
    PluginDefect,
    Precision,
    Support,
    select,
)
from accelerators.cpu import CPU
from rlhf.errors import OutOfMemory
from rlhf.outcome import shortage
from tests.accelerators.misbehaving import GOOD, NAME, npu, plugin, raises

SPEC = {**GOOD, "factory": "npu_backend:NPU"}
INFO = DeviceInfo("NPU", 1, "none")


@pytest.fixture
def created(misbehaved, monkeypatch):
    """The CPU with these methods, as a plugin's backend; `contributed` are kernels that its plugin's hook offers."""

    def create(contributed: tuple[KernelImpl, ...] = (), **methods: Any):
        npu(monkeypatch, __module__="npu_backend", __qualname__="NPU", **methods)
        hooks = {"rlhf_accelerators": lambda: [AcceleratorSpec(**SPEC)], "rlhf_kernels": lambda: list(contributed)}
        misbehaved(lambda: plugin(**hooks))
        return select("npu").create()

    return create


def kernel(operation: str, made: Any, **fields: Any) -> KernelImpl:
    usual = {"name": "fast", "factory": lambda accelerator: made, "supported": lambda accelerator: Support(True, "")}
    return KernelImpl(**{"operation": operation, "priority": 99, **usual, **fields})


# functions of the trainers that a plugin runs


def at_once(self, fn, key):
    fn()
    return fn


def wrapped(self, fn, key):
    try:
        fn()
    except Exception as error:
        raise RuntimeError(f"{key} cannot be recorded") from error


def wrapped_unsaid(self, fn, key):
    try:
        fn()
    except Exception:
        raise RuntimeError(f"{key} cannot be recorded")  # noqa: B904


def in_a_thread(self, fn, key):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(fn).result()


def replayed(self, fn, key):
    return lambda *arguments: wrapped(self, fn, key)


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
    "function": lambda step: lambda: step(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("capture", [at_once, wrapped, wrapped_unsaid, in_a_thread, replayed, by_super])
def test_what_a_function_of_the_trainers_raises_in_a_plugin_passes_as_it_was(created, form, capture):
    step = Step()
    with pytest.raises(KeyError) as raised:
        created(capture=capture).capture(FORMS[form](step), key="step")()
    assert raised.value is step.error


@pytest.mark.parametrize("capture", [at_once, wrapped, wrapped_unsaid, in_a_thread, replayed])
def test_so_it_does_in_a_kernel(created, capture):
    step, recorder = Step(), functools.partial(capture, None)
    with pytest.raises(KeyError) as raised:
        created((kernel("graph_capture", recorder),)).capture(step.method, key="step")()
    assert raised.value is step.error


def test_a_plugin_may_compile_what_it_captures(created):
    accelerator = created(capture=lambda self, fn, key: torch.compile(fn, backend="eager", fullgraph=True))
    assert accelerator.capture(lambda x: x * 2 + 1, key="step")(torch.ones(1)) == 3


def test_a_refusal_to_be_captured_reaches_the_trainers_through_a_plugin(created):
    with pytest.raises(CaptureError):
        created(capture=by_super).capture(lambda: torch.ones(1).item(), key="step")()


@pytest.mark.parametrize("of_a_kernel", [False, True])
def test_what_a_replay_gets_wrong_itself_is_the_plugins(created, of_a_kernel):
    if of_a_kernel:
        accelerator = created((kernel("graph_capture", lambda fn, key: raises(OSError("no card"))),))
        who = f"graph_capture kernel 'fast' of {NAME}"
    else:
        accelerator = created(capture=lambda self, fn, key: raises(OSError("no card")))
        who = "accelerator npu of bad 2.0: capture()"
    captured = accelerator.capture(lambda: None, key="step")
    with pytest.raises(PluginDefect) as raised:
        captured()
    assert str(raised.value).startswith(f"{who}: its recording of 'step' failed (OSError: no card); report it to")


def test_a_function_that_is_not_captured_is_given_back_itself(created):
    step = Step().method
    assert created(capture=lambda self, fn, key: fn).capture(step, key="step") is step


# what a plugin calls of itself


class Loud(RuntimeError):
    """An error that the plugin itself answers."""


def info(self):
    raise Loud("not yet")


def guarded(self, ask=lambda self: self.info()):
    try:
        ask(self)
    except Loud:
        return Memory(1, 2, 3)


def through_super(self):
    return CPU.memory(self) and guarded(self)


def threaded(self):
    with ThreadPoolExecutor(1) as threads:
        return guarded(self, lambda self: threads.submit(self.info).result())


def own_thread(self):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(guarded, self).result()


@pytest.mark.parametrize("memory", [guarded, through_super, threaded, own_thread])
def test_a_plugin_may_answer_its_own_errors(created, memory):
    accelerator = created(info=info, memory=lambda self: memory(self))
    assert accelerator.memory() == Memory(1, 2, 3)
    with pytest.raises(PluginDefect, match=r"info\(\) failed \(Loud: not yet\)"):
        accelerator.info()


def test_a_plugin_may_answer_its_own_errors_in_its_kernels(created):
    def careful(accelerator):
        return guarded(accelerator) and Support(True, "found out")

    own = kernel("attention", None, supported=careful, factory=lambda accelerator: guarded(accelerator) and "eager")
    accelerator = created(info=info, kernels=lambda self: [own])
    assert accelerator.kernel("attention", required=True) == "eager"


@pytest.mark.parametrize("hook", ["rlhf_kernels", "rlhf_check_run"])
def test_a_plugin_may_answer_its_own_errors_in_its_hooks(misbehaved, monkeypatch, caplog, hook):
    npu(monkeypatch, info=info)
    answer = lambda accelerator: guarded(accelerator) and []  # noqa: E731
    misbehaved(lambda: plugin(rlhf_accelerators=lambda: [AcceleratorSpec(**SPEC)], **{hook: answer}))
    selection = select("npu")
    selection.check_run(selection.create(), {})
    assert not caplog.records


def test_a_backend_is_blamed_for_what_it_gets_wrong_in_a_kernel_of_another_plugin(created, misbehaved):
    def clip(parameters, norm):
        return accelerator.info()

    accelerator = created(info=info)
    accelerator.contribute([kernel("clip_grad_norm", clip, plugin="other 1.0 (other)")])
    with pytest.raises(PluginDefect, match=r"^accelerator npu of bad 2\.0: info\(\) failed"):
        accelerator.kernel("clip_grad_norm")([], 1.0)


def test_answers_between_a_plugins_own_methods_are_its_own(created):
    accelerator = created(info=lambda self: None, memory=lambda self: Memory(1, 2, 3) if self.info() is None else None)
    assert accelerator.memory() == Memory(1, 2, 3)


# forms of methods


def described(model):
    return DeviceInfo(model, 1, "none")


@pytest.mark.parametrize(
    "method",
    [
        staticmethod(lambda: INFO),
        classmethod(lambda cls: INFO),
        functools.partial(described, "NPU"),
        functools.partialmethod(lambda self, model: described(model), "NPU"),
        property(lambda self: lambda: INFO),
        functools.cached_property(lambda self: lambda: INFO),
    ],
    ids=lambda method: type(method).__name__,
)
def test_methods_of_any_form_work(created, method):
    if isinstance(method, functools.cached_property):
        method.attrname = "info"
    assert created(info=method).info() == INFO


@pytest.mark.parametrize(
    "bind",
    [
        staticmethod(lambda local_rank: torch.device("cpu", local_rank)),
        classmethod(lambda cls, local_rank: torch.device("cpu", local_rank)),
        functools.partial(torch.device, "cpu"),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_bind_of_any_form_works_and_is_remembered(created, bind):
    accelerator = created(bind=bind)
    assert accelerator.bind(0) == accelerator.device() == torch.device("cpu", 0)


def test_a_class_that_guards_its_attributes_works(created):
    def guard(self, name, value):
        if name in ("info", "capture"):
            raise AttributeError(name)
        object.__setattr__(self, name, value)

    assert created(info=lambda self: INFO, __setattr__=guard).info() == INFO


# copies


def model(self):
    return DeviceInfo(getattr(self, "model", "NPU"), 1, "none")


model.__name__ = "info"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_a_backend_is_a_backend_of_its_own(created, copied):
    accelerator = created(info=model)
    again = copied(accelerator)
    again.model = "copy"
    assert (accelerator.info().model, again.info().model) == ("NPU", "copy")


class Mine(Precision):
    def deepspeed_config(self):
        return {"fp32": self.reason}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), dataclasses.replace]
)
def test_a_precision_is_shared_and_copied_as_before(created, copied):
    shared = Mine(torch.float32, "fp32", "the only one")
    accelerator = created(precision=lambda self, wish="auto": shared)
    assert accelerator.precision() is accelerator.precision() is shared
    again = copied(shared)
    assert again == shared
    assert again.deepspeed_config() == {"fp32": "the only one"}


def test_a_scheduler_of_torch_drives_an_optimizer_of_a_plugin(created):
    accelerator = created((kernel("adamw", lambda params, **settings: torch.optim.SGD(params, lr=1.0)),))
    weight = torch.ones(1, requires_grad=True)
    optimizer = accelerator.kernel("adamw")([weight])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    weight.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert weight.item() == 0.5


# what is nobody's mistake, or the user's, or ours


@pytest.mark.parametrize("of_the_function", [False, True])
def test_ctrl_c_passes_and_leaves_the_plugin_watched(created, of_the_function):
    stop = raises(KeyboardInterrupt())
    accelerator = created(synchronize=stop, capture=at_once, info=info)
    with pytest.raises(KeyboardInterrupt):
        accelerator.capture(stop, key="step") if of_the_function else accelerator.synchronize()
    with pytest.raises(PluginDefect):
        accelerator.info()


class DeviceOutOfMemory(RuntimeError):
    """What a vendor's runtime raises."""


def wrapping(error):
    def method(self):
        try:
            raise error
        except Exception as cause:
            raise ValueError("the step failed") from cause

    return method


@pytest.mark.parametrize(
    "method",
    [raises(DeviceOutOfMemory("3 GiB")), wrapping(DeviceOutOfMemory("3 GiB")), wrapping(MemoryError("3 GiB"))],
)
def test_a_lack_of_memory_is_told_alike_by_backends_and_by_commands(created, method):
    with pytest.raises((RuntimeError, ValueError)) as raised:
        created(synchronize=method).synchronize()
    advice = shortage(raised.value)
    assert isinstance(advice, OutOfMemory)
    assert "3 GiB" in str(advice)


def test_a_lack_of_memory_as_a_backend_is_made_is_nobodys_mistake(created):
    with pytest.raises(DeviceOutOfMemory):
        created(__init__=raises(DeviceOutOfMemory("3 GiB")))


def test_a_backend_may_refuse_as_it_is_made(created):
    with pytest.raises(AcceleratorError, match=r"^driver 1\.0 is too old; update it to 2\.0$"):
        created(__init__=raises(AcceleratorError("driver 1.0 is too old; update it to 2.0")))


def test_a_transformers_that_cannot_be_imported_is_not_the_plugins(created, monkeypatch, caplog):
    accelerator = created((kernel("attention", "flash"),))
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", None)
    with pytest.raises(ImportError, match="transformers"):
        accelerator.kernel("attention")
    assert not caplog.records


def test_a_deepspeed_that_cannot_be_imported_is_not_the_plugins(created, monkeypatch):
    accelerator = created(info=lambda self: INFO)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match="deepspeed"):
        accelerator.prepare_deepspeed()
