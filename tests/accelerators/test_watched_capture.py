"""What the trainers' own function does while a plugin records it is not the plugin's; what its recording does is."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accelerators import CaptureError, PluginDefect
from accelerators.backends.cpu.backend import CPU
from tests.accelerators.misbehaving import NAME, fast, raises


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
        created((fast("graph_capture", recorder),)).capture(step.method, key="step")()
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
        accelerator = created((fast("graph_capture", lambda fn, key: raises(OSError("no card"))),))
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
