"""The error of a stage that ran out of memory: the phase, the memory of each model, and settings that would help.

It is an `OutOfMemory` of one line; `rlhf.memory.advice` provides the settings.
"""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf.errors import OutOfMemory, translate_errors
from rlhf.memory.advice import advise
from rlhf.memory.environment import Environment, list_zero_stages
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.engine.engine import TrainingEngine
    from rlhf.trainers.context import StageContext


def translate_stage_errors(context: StageContext, output: Path | None = None) -> AbstractContextManager[None]:
    """Return `translate_errors` for a block that runs a stage: out of memory, the error suggests settings.

    With the run's folder as `output`, errors of disk and permissions are translated too.
    """
    return translate_errors(output, describe_memory=partial(_describe_out_of_memory, context))


def _describe_out_of_memory(context: StageContext, cause: BaseException) -> OutOfMemory:
    phase, context.phases.current = context.phases.current, "preparation"
    accelerator, world, stage = context.accelerator, context.world, context.directory.name
    has_device = accelerator.host_device() != accelerator.device()
    on_host = isinstance(cause, (MemoryError, OSError)) or "CPUAllocator" in str(cause)
    advice = advise(
        context.config,
        stage,
        phase,
        Environment(
            world.size,
            context.precision.name,
            chunk_elements=accelerator.chunk_elements,
            unified_memory=on_host or not has_device,
            zero_stages=list_zero_stages(accelerator),
        ),
        accelerator.precision().name,
        started=context.directory.started,
        continued=any(directory.started for directory in context.run.stages),
    )
    models = measure_models(context.models)
    offloaded = measure_models(context.models, accelerator.host_device()) if has_device else {}
    message = format_message(
        cause,
        f"on {'the host' if on_host else accelerator.name} in {stage}, {phase}",
        _format_peak(accelerator),
        {role: count - offloaded.get(role, 0) for role, count in models.items()},
        advice,
        offloaded,
        "" if on_host else _advise_allocator(accelerator),
    )
    return OutOfMemory((f"rank {world.rank}: " if world.size > 1 else "") + message)


def format_message(
    cause: BaseException,
    place: str,
    peak: str,
    models: Mapping[str, int],
    advice: tuple[list[str], list[str]],
    offloaded: Mapping[str, int] | None = None,
    allocator: str = "",
) -> str:
    """Return one line: what happened, the peak, the bytes of each model on device and host, and what to do."""
    reason = textwrap.shorten(f"{type(cause).__name__}: {cause}".removesuffix(": "), 120, placeholder=" ...")
    parts = [f"out of memory {place} ({reason})", peak]
    for title, sizes in {"weights, gradients and optimizer": models, "and on the host": offloaded or {}}.items():
        if listed := [f"{role} {format_bytes(count)}" for role, count in sizes.items() if count]:
            parts.append(f"{title}: {', '.join(listed)}")
    now, later = advice
    if now:
        parts.append(f"try, with --set and in this order: {', '.join(now)}")
    if later:
        parts.append(f"with another --output{', also' if now else ''}: {', '.join(later)}")
    if allocator:
        parts.append(f"if memory is fragmented, start with {allocator}")
    if not now and not later:
        parts.append("no setting of this run would help: use a device with more memory")
    return "; ".join(filter(None, parts))


def measure_models(
    models: Mapping[str, TrainingEngine | nn.Module], device: torch.device | None = None
) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state that only one of `models` has on this rank, by role.

    Bytes that several models share, such as the base under their adapters, are listed as `shared`. If `device` is
    given, only bytes on that device count.
    """
    storages = {role: _storages(model, device) for role, model in models.items()}
    owners = Counter(key for sizes in storages.values() for key in sizes)
    shared = {key: size for sizes in storages.values() for key, size in sizes.items() if owners[key] > 1}
    single = {role: sum(size for key, size in sizes.items() if owners[key] == 1) for role, sizes in storages.items()}
    return single | ({"shared": sum(shared.values())} if shared else {})


def _storages(model: TrainingEngine | nn.Module, device: torch.device | None) -> dict[int, int]:
    """Return the bytes of each storage of a model, its gradients and its optimizer."""
    module = model if isinstance(model, nn.Module) else model.module
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    tensors += [
        part for tensor in tensors for part in (tensor.grad, getattr(tensor, "ds_tensor", None)) if part is not None
    ]
    if not isinstance(model, nn.Module):
        optimizer = model.engine.optimizer
        base = getattr(optimizer, "optimizer", optimizer)
        tensors += _tensors([vars(optimizer), base.param_groups, dict(base.state)])
        tensors += model.ema.tensors if model.ema else []
    # DeepSpeed replaces offloaded gradients by tensors without memory.
    present = [tensor for tensor in tensors if not tensor.is_meta and device in (None, tensor.device)]
    sizes = {id(tensor): tensor.nbytes for tensor in present if tensor.layout != torch.strided}  # a device's format
    strided = (tensor.untyped_storage() for tensor in present if tensor.layout == torch.strided)
    return sizes | {storage._cdata: storage.nbytes() for storage in strided}


def _tensors(value: Any) -> list[Tensor]:
    """Return every tensor in nested containers, with its gradient."""
    if isinstance(value, Tensor):
        return [value] if value.grad is None else [value, value.grad]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _advise_allocator(accelerator: Accelerator) -> str:
    """Return the setting of the device's allocator against fragmented memory; "" if there is none, or one is set."""
    variable, value = accelerator.allocator_setting
    return f"{variable}={value}" if variable and variable not in os.environ else ""


def _format_peak(accelerator: Accelerator) -> str:
    try:
        memory = accelerator.memory()
    except Exception:  # the device may not respond any more; the rest of the message is still useful
        return ""
    return f"peak {format_bytes(memory.peak)} of {format_bytes(memory.total)}"
