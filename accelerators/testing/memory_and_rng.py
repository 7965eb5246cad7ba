"""Checks of where tensors are, how much memory they take, and the state of the random number generators."""

from __future__ import annotations

import gc
import io
import random
import time
from collections import namedtuple
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import torch
from torch import Tensor

from accelerators import host
from accelerators.errors import AcceleratorError, describe_error, find_out_of_memory

if TYPE_CHECKING:
    from accelerators import Selection
    from accelerators.accelerator import Accelerator

PEBIBYTE = 1 << 50
BLOCK = 128 << 20
"""Bytes of the allocation that memory figures must show: allocators do not keep such a large block."""

ENOUGH = BLOCK * 3 // 4
"""Bytes of it that must show; the rest allows for other allocations of the process."""

HEALTH_SECONDS = 2.0
"""Time limit of `health`, which a run asks at the start and the end of each stage."""

Pair = namedtuple("Pair", "left right")


def check_health(accelerator: Accelerator) -> str:
    """Check readings and counts before and after some work; return the readings as a note."""
    before = accelerator.health()
    start = time.monotonic()
    after = accelerator.health()
    seconds = time.monotonic() - start
    assert seconds <= HEALTH_SECONDS, f"health() took {seconds:.1f} s, expected at most {HEALTH_SECONDS:g} s"
    for text in (*after.readings.values(), *after.problems):
        assert isinstance(text, str) and text, f"health() has {text!r}, expected words"
    for name, count in after.errors.items():
        earlier = before.errors.get(name, 0)
        assert count >= earlier, f"health() counts {count} {name} after {earlier}: expected that counts never fall"
    return ", ".join(f"{name} {value}" for name, value in after.readings.items())


def check_teardown(selection: Selection) -> None:
    """Check that a backend can be torn down, and then bound and used again."""
    backend = selection.create()
    backend.bind(0)
    backend.to_device(torch.ones(8))
    backend.teardown()
    try:
        device = backend.device()
    except AcceleratorError:
        pass
    else:
        raise AssertionError(f"device() after teardown() is {device}, expected an AcceleratorError")
    backend.teardown()  # nothing is left to do
    backend.bind(0)
    total = float(backend.to_device(torch.ones(8)).sum())
    assert total == 8, f"after teardown() and bind(0), the sum of 8 ones is {total}"


def check_placement(selection: Selection) -> None:
    """Check `device()` before and after `bind`, and `to_device` of a batch with every structure."""
    unbound = selection.create()
    try:
        device = unbound.device()
    except AcceleratorError:
        pass
    else:
        raise AssertionError(f"device() before bind() is {device}, expected an AcceleratorError")
    bound = unbound.bind(0)
    assert bound == unbound.device(), f"bind(0) returns {bound}, but device() is {unbound.device()}: expected the same"
    tensor = torch.arange(6)
    batch: dict[str, Any] = {
        "dict": {"inner": tensor},
        "list": [tensor, 1],
        "tuple": (tensor, None),
        "named tuple": Pair(tensor, 2.5),
    }
    moved = unbound.to_device(batch)
    for kind, original in batch.items():
        value = moved[kind]
        assert type(value) is type(original), f"to_device makes a {type(value).__name__} of a {kind}"
        inner = value["inner"] if kind == "dict" else value[0]
        assert _same_device(inner.device, bound), (
            f"to_device leaves a tensor in a {kind} on {inner.device}, not {bound}"
        )
        same = inner.dtype == tensor.dtype and torch.equal(inner.cpu(), tensor)
        assert same, f"to_device changes a tensor in a {kind}: found {inner.cpu()}, expected {tensor}"
    others = (moved["list"][1], moved["tuple"][1], moved["named tuple"].right)
    assert others == (1, None, 2.5), f"to_device changes what is no tensor: {others}"


def check_random_numbers(accelerator: Accelerator) -> None:
    """Check samples of every generator after `seed` and `set_rng_state`, also from a saved state."""
    accelerator.seed(7)
    first = _samples(accelerator)
    accelerator.seed(7)
    _same("seed(7) twice", _samples(accelerator), first)
    accelerator.seed(8)
    equal = [name for name, sample in _samples(accelerator).items() if torch.equal(sample, first[name])]
    assert not equal, f"seed(7) and seed(8) give the same samples of {', '.join(equal)}"

    state = accelerator.rng_state()
    expected = _samples(accelerator)
    accelerator.set_rng_state(state)
    _same("set_rng_state(rng_state())", _samples(accelerator), expected)

    saved = io.BytesIO()
    state = accelerator.rng_state()
    expected = _samples(accelerator)
    torch.save(state, saved)
    saved.seek(0)
    try:
        state = torch.load(saved, weights_only=True)
    except Exception as error:
        text = str(error).splitlines()[0]
        raise AssertionError(f"torch.load(weights_only=True) does not read a saved rng_state(): {text}") from error
    accelerator.set_rng_state(state)
    _same("set_rng_state of a saved state", _samples(accelerator), expected)


def check_out_of_memory(accelerator: Accelerator) -> None:
    """Check an allocation that fails on most devices; one that succeeds is fine too."""
    assert not accelerator.is_out_of_memory(ValueError("7")), (
        "is_out_of_memory() recognizes a ValueError as out of memory"
    )
    refusal: Exception | None = None
    try:
        torch.full((PEBIBYTE // 4,), 1.0, device=accelerator.device())
        accelerator.step_boundary("check/out-of-memory")
        accelerator.synchronize()
    except Exception as error:
        refusal = error
    if refusal is not None:
        # Both are asked: checks before this one create backends, and `find_out_of_memory` knows the last of them.
        recognized = find_out_of_memory(refusal) or accelerator.is_out_of_memory(refusal)
        reason = f"a block of 1 PiB is refused ({describe_error(refusal)})"
        assert recognized, f"{reason}, not recognized by is_out_of_memory()"


def check_memory(accelerator: Accelerator) -> None:
    """Check figures before, with and after a block of 128 MiB; skipped at the end if the system keeps the peak."""

    def settled() -> None:
        gc.collect()
        accelerator.step_boundary("check/memory")
        accelerator.synchronize()
        accelerator.empty_cache()

    kept = torch.arange(1000, device=accelerator.device())
    settled()
    before = accelerator.memory()
    block = torch.full((BLOCK // 4,), 1.0, device=accelerator.device())
    accelerator.step_boundary("check/memory")
    accelerator.synchronize()
    during = accelerator.memory()
    del block
    settled()
    after = accelerator.memory()

    grown, shrunk = during.allocated - before.allocated, during.allocated - after.allocated
    assert grown >= ENOUGH, f"memory().allocated grew by {_mib(grown)} with a block of {_mib(BLOCK)}"
    assert shrunk >= ENOUGH, f"memory().allocated fell by {_mib(shrunk)} when a block of {_mib(BLOCK)} was freed"
    for when, memory in (("before", before), ("with", during), ("after", after)):
        ordered = 0 <= memory.allocated <= memory.peak <= memory.total
        assert ordered, f"{memory} {when} the block, expected allocated <= peak <= total"
    # Not >= during.allocated: an operating system counts a process's pages to within a few.
    risen = after.peak - before.allocated
    assert risen >= ENOUGH, f"memory().peak shows {_mib(risen)} more than was in use before a block of {_mib(BLOCK)}"
    assert before.total == after.total, f"memory().total changed from {before.total} to {after.total}"
    assert torch.equal(kept.cpu(), torch.arange(1000)), "empty_cache() changed a tensor that is in use"

    accelerator.reset_peak()
    fell = after.peak - accelerator.memory().peak
    if fell < ENOUGH and accelerator.device().type == "cpu" and not host.reset_peak_memory():
        raise SkipTest("this system lets no process reset its peak; every other figure is right")
    assert fell >= ENOUGH, f"the peak fell by {_mib(fell)} with reset_peak() after {_mib(BLOCK)} were freed"


def _same_device(device: torch.device, expected: torch.device) -> bool:
    """Return whether devices are equal; some devices have no index while their tensors have one."""
    return device.type == expected.type and (device == expected or None in (device.index, expected.index))


def _samples(accelerator: Accelerator) -> dict[str, Tensor]:
    device = accelerator.device()
    return {
        "Python": torch.tensor([random.random() for _ in range(8)]),
        "torch on the CPU": torch.rand(8),
        "uniform numbers on the device": torch.rand(64, device=device).cpu(),
        "normal numbers on the device": torch.randn(64, device=device).cpu(),
        "draws on the device": torch.multinomial(torch.ones(1000, device=device), 64, replacement=True).cpu(),
        "dropout on the device": torch.nn.functional.dropout(torch.ones(256, device=device)).cpu(),
    }


def _same(what: str, samples: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    different = [name for name, sample in samples.items() if not torch.equal(sample, expected[name])]
    assert not different, f"{what}: other samples of {', '.join(different)}; expected the same"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
