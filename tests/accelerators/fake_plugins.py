"""Plugins made of functions, for tests of what happens when one misbehaves."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accelerators import AcceleratorSpec, KernelImpl, Probe, Support, hookimpl

ENDLESS = threading.Event()
BAD = SimpleNamespace(name="bad", version="2.0")
NAME = "bad 2.0 (bad_entry)"
GOOD: dict[str, Any] = {
    "name": "npu",
    "api_version": 2,
    "factory": "accelerators.backends.cpu.backend:CPU",
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
    backend.NPU = type(
        "NPU", (importlib.import_module("accelerators.backends.cpu.backend").CPU,), {"name": "npu", **methods}
    )
    monkeypatch.setitem(sys.modules, "npu_backend", backend)


def fast(operation: str, made: Any, **fields: Any) -> KernelImpl:
    """A kernel that is preferred to all others."""
    usual = {"name": "fast", "factory": lambda accelerator: made, "supported": lambda accelerator: Support(True, "")}
    return KernelImpl(**{"operation": operation, "priority": 99, **usual, **fields})
