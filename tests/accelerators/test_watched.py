"""A plugin that works goes on working while it is watched, and is not blamed for what others got wrong."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accelerators import (
    AcceleratorError,
    AcceleratorSpec,
    DeviceInfo,
    Memory,
    PluginDefect,
    Precision,
    Support,
    select,
)
from accelerators.backends.cpu.backend import CPU
from rlhf.errors import OutOfMemory
from rlhf.launchers.exit_status import as_resource_error
from tests.accelerators.misbehaving import NPU, fast, npu, plugin, raises

INFO = DeviceInfo("NPU", 1, "none")


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

    own = fast("attention", None, supported=careful, factory=lambda accelerator: guarded(accelerator) and "eager")
    accelerator = created(info=info, kernels=lambda self: [own])
    assert accelerator.kernel("attention", required=True) == "eager"


@pytest.mark.parametrize("hook", ["rlhf_kernels", "rlhf_check_run"])
def test_a_plugin_may_answer_its_own_errors_in_its_hooks(misbehaved, monkeypatch, caplog, hook):
    npu(monkeypatch, info=info)
    answer = lambda accelerator: guarded(accelerator) and []  # noqa: E731
    misbehaved(lambda: plugin(rlhf_accelerators=lambda: [AcceleratorSpec(**NPU)], **{hook: answer}))
    selection = select("npu")
    selection.check_run(selection.create(), {})
    assert not caplog.records


def test_a_backend_is_blamed_for_what_it_gets_wrong_in_a_kernel_of_another_plugin(created, misbehaved):
    def clip(parameters, norm):
        return accelerator.info()

    accelerator = created(info=info)
    accelerator.contribute([fast("clip_grad_norm", clip, plugin="other 1.0 (other)")])
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
    accelerator = created((fast("adamw", lambda params, **settings: torch.optim.SGD(params, lr=1.0)),))
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
    accelerator = created(synchronize=stop, capture=lambda self, fn, key: fn(), info=info)
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
    advice = as_resource_error(raised.value)
    assert isinstance(advice, OutOfMemory)
    assert "3 GiB" in str(advice)


def test_a_lack_of_memory_as_a_backend_is_made_is_nobodys_mistake(created):
    with pytest.raises(DeviceOutOfMemory):
        created(__init__=raises(DeviceOutOfMemory("3 GiB")))


def test_a_backend_may_refuse_as_it_is_made(created):
    with pytest.raises(AcceleratorError, match=r"^driver 1\.0 is too old; update it to 2\.0$"):
        created(__init__=raises(AcceleratorError("driver 1.0 is too old; update it to 2.0")))


def test_a_transformers_that_cannot_be_imported_is_not_the_plugins(created, monkeypatch, caplog):
    accelerator = created((fast("attention", "flash"),))
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", None)
    with pytest.raises(ImportError, match="transformers"):
        accelerator.kernel("attention")
    assert not caplog.records


def test_a_deepspeed_that_cannot_be_imported_is_not_the_plugins(created, monkeypatch):
    accelerator = created(info=lambda self: INFO)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match="deepspeed"):
        accelerator.prepare_deepspeed()
