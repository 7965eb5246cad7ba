"""Plugins made of functions or of a few lines of text, for tests of what happens when one misbehaves."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accelerators import AcceleratorSpec, KernelImpl, Probe, Support, hookimpl

FACTORY = "accelerators.backends.cpu.backend:CPU"

# plugins in other processes


def source(
    before: str = "",
    *,
    hook: str = "rlhf_accelerators",
    name: str = "chip",
    api_version: int = 2,
    factory: str = FACTORY,
    probe: str = "Probe(True, 'found one')",
    priority: int = -10,
) -> str:
    """The module of a plugin with one backend."""
    fields = {"name": name, "api_version": api_version, "factory": factory, "priority": priority}
    return f"""
from accelerators import AcceleratorSpec, Probe, hookimpl
{before}

@hookimpl
def {hook}():
    fields = {fields!r}
    return [AcceleratorSpec(probe=lambda: {probe}, **fields)]
"""


SOURCES = {
    "absent": source(name="absent", probe="Probe(False, 'no file /dev/absent0')", priority=90),
    "early_torch": source("import torch", name="early-torch"),
    "future_api": source(name="future", api_version=99),
    "halves": source(name="halves", factory="rlhf_halves_backend:Halves"),
    "hangs": "import time\ntime.sleep(600)\n",  # and holds the locks of what it is importing
    "import_fails": "import a_library_that_nobody_has\n",
    "late_torch": source(name="late-torch", probe="__import__('torch') and Probe(True, 'found one', count=1)"),
    "misspelt_hook": source(hook="rlhf_acelerators"),
    "probe_raises": source(name="shaky", probe="1 / 0"),
    "twin_a": source(name="twin"),
    "twin_b": source(name="twin"),
}
"""Small plugins, by name; larger ones are files of the folder `plugins`."""

IMPORT_TORCH = {"early_torch", "late_torch"}
"""Plugins that import torch when they should not; an empty `torch` in their folder makes that quick."""

# plugins in this process

ENDLESS = threading.Event()
BAD = SimpleNamespace(name="bad", version="2.0")
NAME = "bad 2.0 (bad_entry)"
GOOD: dict[str, Any] = {
    "name": "npu",
    "api_version": 2,
    "factory": FACTORY,
    "probe": lambda: Probe(True, "found"),
    "priority": -10,
}
NPU = {**GOOD, "factory": "npu_backend:NPU"}


def plugin(**hooks: Callable[..., Any]) -> ModuleType:
    module = ModuleType("bad")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(specname=name)(function))
    return module


def offers(*makers: Callable[[], Any]) -> ModuleType:
    """A plugin whose hook yields what each of `makers` returns."""

    def rlhf_accelerators():
        for make in makers:
            yield make()

    return plugin(rlhf_accelerators=rlhf_accelerators)


def spec(**fields: Any) -> Callable[[], AcceleratorSpec]:
    return lambda: AcceleratorSpec(**{**GOOD, **fields})


def raises(error: BaseException) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise error

    return function


def forever() -> Any:
    ENDLESS.wait()


def endless() -> Any:
    while True:
        yield AcceleratorSpec(**GOOD)


def npu(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """Let the factory npu_backend:NPU make a CPU with other methods."""
    backend = ModuleType("npu_backend")
    cpu = importlib.import_module("accelerators.backends.cpu.backend").CPU
    backend.NPU = type("NPU", (cpu,), {"name": "npu", "__module__": "npu_backend", **methods})
    monkeypatch.setitem(sys.modules, "npu_backend", backend)


def fast(operation: str, made: Any, **fields: Any) -> KernelImpl:
    """A kernel that is preferred to all others."""
    usual = {"name": "fast", "factory": lambda accelerator: made, "supported": lambda accelerator: Support(True, "")}
    return KernelImpl(**{"operation": operation, "priority": 99, **usual, **fields})
