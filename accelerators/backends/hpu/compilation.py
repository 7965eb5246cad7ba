"""Compilation in eager mode: decoding steps as a whole, and the layers of a model one by one.

Without it, eager mode launches every operator separately. A part is compiled again for each new shape; the limit of
torch, after which it silently runs functions uncompiled, is raised here, and reaching it is reported.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from accelerators import capture
from accelerators.accelerator import Accelerator
from accelerators.backends.hpu import info as hpu_info
from accelerators.errors import CaptureError
from accelerators.types import KernelImpl, Support

Function = TypeVar("Function", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

COMPILER = "hpu_backend"
"""Gaudi's backend of torch.compile."""

COMPILED_SHAPES = 256
"""Maximum number of graphs of one function; a recipe needs four for each shape of its rollouts, and two for each shape
of its training batches."""


def compiled_steps(accelerator: Accelerator) -> Callable[[Function, str], Any]:
    """Return a compiler of whole functions; the first call runs the function itself, to check for host reads."""
    _raise_limits()

    def record(fn: Function, key: str) -> Any:
        # Not `checked(torch.compile(fn))`: torch never compiles a function that it first saw under the guard.
        check, compiled = capture.checked(fn, key), torch.compile(fn, backend=COMPILER, dynamic=False, fullgraph=True)
        checked = False

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal checked
            if checked:
                try:
                    return compiled(*args, **kwargs)
                except FailOnRecompileLimitHit as error:
                    raise CaptureError(f"{key}: {COMPILED_SHAPES} shapes are compiled already") from error
                except TorchDynamoException as error:
                    raise CaptureError(f"{key}: {_first_line(error)}") from error
            result = check(*args, **kwargs)
            checked = True
            return result

        return call

    return record


def compiled_layers(accelerator: Accelerator) -> Callable[[nn.Module], None]:
    """Return a function that lets a model compile its layers; layers of one class share their graphs."""
    _raise_limits()
    compiled = torch.compile(_forward, backend=COMPILER, dynamic=False, fullgraph=True)
    refused: set[type] = set()

    def compile_layers(model: nn.Module) -> None:
        for layer in _layers(model):
            # Where `nn.Module.compile` puts its result: copies of a module and its state leave it out.
            layer._compiled_call_impl = _CompiledLayer(layer, compiled, refused, accelerator)

    return compile_layers


class _CompiledLayer:
    """Calls a layer compiled, unless the call decodes or DeepSpeed has to fetch weights in it."""

    def __init__(
        self, layer: nn.Module, compiled: Callable[..., Any], refused: set[type], accelerator: Accelerator
    ) -> None:
        self._layer = layer
        self._compiled = compiled
        self._refused = refused
        self._accelerator = accelerator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        if type(layer) in self._refused or _has_cache(args, kwargs):
            return layer._call_impl(*args, **kwargs)
        if _has_hooks(layer):
            self._report("DeepSpeed's hooks fetch their weights at ZeRO 3")
            return layer._call_impl(*args, **kwargs)
        try:
            return self._compiled(layer, args, kwargs)
        except FailOnRecompileLimitHit:
            reason = f"{COMPILED_SHAPES} shapes are compiled already; engine.shapes=static has few"
        except TorchDynamoException as error:
            reason = _first_line(error)
            logger.debug("%s cannot be compiled", type(layer).__name__, exc_info=True)
        self._refused.add(type(layer))
        self._report(reason)
        return layer._call_impl(*args, **kwargs)

    def _report(self, reason: str) -> None:
        name = type(self._layer).__name__
        self._accelerator.report_fallback(name, f"layers run uncompiled, and slower: {name}: {reason}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _forward(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer that has no hooks; all layers share the graphs of this function."""
    return layer.forward(*args, **kwargs)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of a model's lists of modules: its layers, but not what a layer consists of."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def _has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call decodes: each layer then reads its own number, and would need separate graphs."""
    from transformers.cache_utils import Cache

    return any(isinstance(value, Cache) for value in (*args, *kwargs.values()))


def _has_hooks(layer: nn.Module) -> bool:
    return any(module._forward_pre_hooks or module._forward_hooks for module in layer.modules())


def _raise_limits() -> None:
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILED_SHAPES)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, COMPILED_SHAPES)
    limits.fail_on_recompile_limit_hit = True


def _supported(accelerator: Accelerator, lazy: str, eager: str) -> Support:
    if accelerator.is_lazy():
        return Support(False, lazy)
    if COMPILER not in torch.compiler.list_backends(exclude_tags=()):
        return Support(False, f"{hpu_info.RUNTIME} has not registered {COMPILER} with torch.compile")
    return Support(True, eager)


STEPS = KernelImpl(
    operation="graph_capture",
    name="torch-compile",
    factory=compiled_steps,
    supported=functools.partial(
        _supported,
        lazy=f"the {COMPILER} of torch.compile exists in eager mode only",
        eager=f"eager mode: compiled by {COMPILER} for fixed shapes",
    ),
    priority=10,
)
LAYERS = KernelImpl(
    operation="fused_layers",
    name="torch-compile",
    factory=compiled_layers,
    supported=functools.partial(
        _supported,
        lazy="in lazy mode the graph compiler fuses operators itself",
        eager=f"eager mode: each layer compiled by {COMPILER}, forward and backward",
    ),
    priority=10,
)
