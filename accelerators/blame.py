"""Says of a plugin what the plugin did: what its code gets wrong becomes one line with its name.

In: a backend that a plugin offers, or what a kernel's factory made. Out: the same, except that an exception or an
answer of the wrong kind is a `PluginDefect`. What its class and its signatures tell is checked once, as it is made; a
call costs one more frame. What `accelerators` itself defines is not watched: an error there is no plugin's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MethodType, NoneType, SimpleNamespace
from typing import Any

import torch

from accelerators.guard import text
from accelerators.shapes import ShapePolicy
from accelerators.types import (
    ALLOWLIST_ENV,
    AUTHORS,
    OPERATIONS,
    DeepSpeedView,
    DeviceInfo,
    KernelImpl,
    Memory,
    PluginDefect,
    Precision,
    Support,
    one_line,
    received,
)
from accelerators.watched import ANYTHING, Expected, Watched, WatchedRecorder, ours, running, shown


def _a(*kinds: type) -> Expected:
    named = {NoneType: "None", torch.device: "torch.device", torch.optim.Optimizer: "torch.optim.Optimizer"}
    names = [named.get(kind, kind.__name__) for kind in kinds]
    return " or ".join(names), lambda found, *given: isinstance(found, kinds)


_FUNCTION: Expected = ("a function", lambda found, *given: callable(found))
_OPTIMIZER = _a(torch.optim.Optimizer)

METHODS: Mapping[str, Expected] = {
    "bind": _a(torch.device),
    "device": _a(torch.device),
    "to_device": ("what it was given", lambda found, *given: not given or _alike(found, given[0])),
    "info": _a(DeviceInfo),
    "synchronize": ANYTHING,
    "step_boundary": ANYTHING,
    "capture": _FUNCTION,
    "is_lazy": _a(bool),
    "compilations": _a(int, NoneType),
    "precision": _a(Precision),
    "kernels": _a(list),
    "shape_policy": _a(ShapePolicy),
    "host_device": _a(torch.device),
    "pins_memory": _a(bool),
    "memory": _a(Memory),
    "reset_peak": ANYTHING,
    "empty_cache": ANYTHING,
    "is_out_of_memory": _a(bool),
    "seed": ANYTHING,
    "rng_state": _a(dict),
    "set_rng_state": ANYTHING,
    "dist_backend": _a(str),
    "deepspeed_accelerator": (
        "a DeepSpeedAccelerator or None",
        lambda found: found is None or _is_deepspeeds(found),
    ),
    "prepare_deepspeed": _a(DeepSpeedView),
    "deepspeed_operator": _a(Support),
}
"""What the trainers call a backend for, and what each answers."""

_PRECISION: Mapping[str, Expected] = {
    "autocast": ("a context", lambda found: hasattr(found, "__enter__") and hasattr(found, "__exit__")),
    "deepspeed_config": _a(dict),
}

_ATTRIBUTES = ("absent", "deepspeed_name", "name")

# Trainers answer these: a checkpoint may hold the state of another device's generators.
_EXPECTED_ERRORS = {"set_rng_state": (KeyError, TypeError, ValueError, RuntimeError)}

_OF_QUANTIZED: Mapping[str, Expected] = {
    "pack": _a(dict),
    "unpack": _a(torch.Tensor),
    "multiply": _a(torch.Tensor),
}
"""What trainers call of quantized weights, and what each method gives."""

_MAKES: Mapping[str, Expected] = {
    "adamw": _FUNCTION,
    "adamw_cpu_offload": _FUNCTION,
    "clip_grad_norm": _FUNCTION,
    "attention": _a(str),
    "graph_capture": _FUNCTION,
    "quantized_weights": (
        "an object with pack, unpack and multiply",
        lambda found: all(callable(getattr(found, name, None)) for name in _OF_QUANTIZED),
    ),
    "inference_weights": _FUNCTION,
    "fused_layers": _FUNCTION,
}
"""What the factory of an operation's kernel makes."""

_GIVES: Mapping[str, Expected] = {
    "adamw": _OPTIMIZER,
    "adamw_cpu_offload": _OPTIMIZER,
    "clip_grad_norm": (
        "a scalar tensor",
        lambda found, *given: isinstance(found, torch.Tensor) and found.numel() == 1,
    ),
    "graph_capture": _FUNCTION,
    "inference_weights": _FUNCTION,
}
"""What a kernel gives when it is called."""


CHECK_OF_A_MODEL = "its check of the model"
"""How a refusal begins that is a mistake of the plugin's."""


def mistake(cls: type, interface: type) -> str:
    """What is wrong with a plugin's class, as far as the class itself shows it; empty where nothing is."""
    written: dict[str, Any] = {}
    for base in cls.__mro__:
        if issubclass(base, interface) and not ours(base):
            written |= vars(base)
    for name in written:
        if not (name.startswith("_") or name in METHODS or hasattr(interface, name)):
            unwritten = [known for known in (*METHODS, *_ATTRIBUTES) if known not in written]
            if meant := next((known for known in unwritten if _slip(name, known)), ""):
                return f"defines {name}, which no trainer calls; name it {meant}, or _{name} if it is a helper"
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        return f"lacks {', '.join(missing)}"
    if not isinstance(called := getattr(cls, "deepspeed_name", None), str):
        return f"has the deepspeed_name {shown(called)}, expected a str: what DeepSpeed calls the device"
    if not isinstance(absent := getattr(cls, "absent", None), Mapping):
        return f"has {shown(absent)} as absent, expected a mapping of operations to reasons"
    for operation, reason in absent.items():
        if operation not in OPERATIONS or not isinstance(reason, str):
            return f"has {shown({operation: reason})} as absent, expected reasons for some of {', '.join(OPERATIONS)}"
    return ""


def watch(accelerator: Any, interface: type, who: str) -> None:
    """Replace, in this object, the methods that a plugin wrote by ones that say whose mistake it is.

    Args:
        who: the backend and the plugin, for messages.

    Raises:
        PluginDefect: a method is none, or cannot be called as the interface says.
    """
    for name, expected in METHODS.items():
        try:
            method = getattr(accelerator, name)
        except (Exception, SystemExit) as error:
            raise PluginDefect(f"{who}: {name} failed ({text(error)}); {AUTHORS}") from error
        # The interface's own prepare_deepspeed calls what the plugin gave DeepSpeed, if it gave anything.
        if ours(method) and (name != "prepare_deepspeed" or ours(accelerator.deepspeed_accelerator)):
            continue
        if not callable(method):
            raise PluginDefect(f"{who}: {name} is {shown(method)}, expected a method; {AUTHORS}")
        if misfit := _misfit(method, getattr(interface, name)):
            raise PluginDefect(f"{who}: {name} {misfit}; {AUTHORS}")
        if name == "dist_backend":
            expected = _collectives_of(accelerator)
        kind = WatchedRecorder if name == "capture" else Watched
        finish: Mapping[str, Callable[[Any], Any]] = {
            "kernels": _listed,
            "precision": functools.partial(_precise, accelerator.provider, who),
        }
        vars(accelerator)[name] = kind(  # past a __setattr__ of the plugin's
            method,
            accelerator.provider,
            f"{who}: {name}()",
            expected,
            passes=_EXPECTED_ERRORS.get(name, ()),
            finish=finish.get(name),
        )


def wrongly_made(implementation: KernelImpl, made: Any) -> str:
    """Why what a factory made cannot be used for its operation; empty where it can."""
    words, right = _MAKES.get(implementation.operation, ANYTHING)
    if made is None or not right(made):
        return f"it made {shown(made)} instead of {words}"
    if implementation.operation == "attention" and not ours(implementation.factory):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        known = ("eager", *ALL_ATTENTION_FUNCTIONS.keys())
        if made not in known and "/" not in made:  # a name with a slash is a kernel's on the hub
            return f"it made {made!r}, which transformers does not know; known: {', '.join(known)}"
    return ""


def refusal(implementation: KernelImpl, model: Any, plugin: str) -> str:
    """Why an implementation cannot serve a model; a check of `plugin`'s that fails is a refusal too."""
    try:
        with running(plugin):
            found = implementation.refuses(model)
    except (Exception, SystemExit) as error:
        return f"{CHECK_OF_A_MODEL} failed ({text(error)}), which is for the authors of {plugin}"
    if isinstance(found, str):
        return one_line(found)
    return f"{CHECK_OF_A_MODEL} gave {shown(found)} instead of a str, which is for the authors of {plugin}"


def kernel(implementation: KernelImpl, made: Any, plugin: str) -> Any:
    """A kernel that says of `plugin` what goes wrong when it is called."""
    expected = _GIVES.get(implementation.operation, ANYTHING)
    if implementation.operation == "attention" or ours(implementation.factory):
        return made
    who = f"{implementation.operation} kernel {implementation.name!r} of {plugin}"
    # A kernel that a backend brings itself cannot be left out without the backend.
    remedy = f"{AUTHORS}, or leave it out with {ALLOWLIST_ENV}" if implementation.plugin else AUTHORS
    if implementation.operation == "graph_capture":
        return WatchedRecorder(made, plugin, who, expected, remedy=remedy)
    if implementation.operation == "quantized_weights":
        methods = {
            name: Watched(getattr(made, name), plugin, f"{who}: {name}()", given, remedy=remedy)
            for name, given in _OF_QUANTIZED.items()
        }
        return SimpleNamespace(**methods)
    watched = Watched(made, plugin, who, expected, remedy=remedy)
    if expected is not _OPTIMIZER:
        return watched

    @functools.wraps(made, updated=())
    def optimizer(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = watched(*arguments, **options)
        step = Watched(found.step, plugin, f"{who}: step()", remedy=remedy)

        @functools.wraps(found.step)
        def stepped(self: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
            return step(*arguments, **options)

        found.step = MethodType(stepped, found)  # schedulers of torch expect a method
        return found

    return optimizer


def _listed(kernels: Iterable[KernelImpl]) -> list[KernelImpl]:
    """A backend's kernels, run to the end and checked."""
    return [received(implementation, KernelImpl) for implementation in kernels]


def _precise(plugin: str, who: str, precision: Any) -> Any:
    """A backend's precision; what a class of the plugin's own answers later is watched too."""
    if isinstance(precision, Precision):
        for name, expected in _PRECISION.items():
            method = getattr(precision, name)
            if name not in vars(precision) and not ours(method):  # the same one may be given again
                watched = Watched(method, plugin, f"{who}: {name}() of its precision", expected)
                object.__setattr__(precision, name, watched)
    return precision


def _slip(name: str, meant: str) -> bool:
    """Whether a name is a misspelling: one letter is too many, missing or another, or two are swapped.

    Another first letter (`get_`, `set_`), another form of a word (`devices`, `captured`), or a short word, to which
    many are near (`seed`, `speed`), make a name of its own.
    """
    same = next((place for place, pair in enumerate(zip(name, meant)) if pair[0] != pair[1]), None)
    if not same or len(meant) < 6:
        return False
    wanted, found = meant[same:], name[same:]
    swapped = wanted[:2] == found[1::-1] and wanted[2:] == found[2:]
    return swapped or wanted[1:] in (found, found[1:]) or wanted == found[1:]


def _misfit(method: Callable[..., Any], meant: Callable[..., Any]) -> str:
    """Why a method cannot be called as `meant` (a function with `self`) is; empty where it can."""
    parameters = list(inspect.signature(meant).parameters.values())[1:]
    names = ", ".join(parameter.name for parameter in parameters)
    first, *others = [parameter.name for parameter in parameters if parameter.default is parameter.empty] or [""]
    try:
        own = inspect.signature(method)
    except (TypeError, ValueError):  # written in C
        return ""
    try:
        own.bind(*([None] if first else []), **dict.fromkeys(others))
        own.bind(*[None] * len(parameters))
    except TypeError as error:
        return f"takes other arguments than the interface gives it, ({names}): {error}"
    return ""


def _collectives_of(accelerator: Any) -> Expected:
    """A name such as `hccl` or `cpu:gloo,cuda:nccl`; a runtime may make its own known as late as it is bound."""

    def known(found: Any) -> bool:
        if not isinstance(found, str) or accelerator._device is None:
            return isinstance(found, str)
        parts = [part.rpartition(":")[2].lower() for part in found.split(",")]
        return all(part in torch.distributed.Backend.backend_list for part in parts)

    return "a backend that torch.distributed knows", known


def _alike(found: Any, given: Any) -> bool:
    return isinstance(found, Mapping if isinstance(given, Mapping) else type(given))


def _is_deepspeeds(found: Any) -> bool:
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    return isinstance(found, DeepSpeedAccelerator)
