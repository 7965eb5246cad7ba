"""Checks of how operators run: step boundaries and captured functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelerators.errors import CaptureError
from accelerators.testing.reference import assert_close, batch, model

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

CALLS, SIZE, RANGE = 5, 256, "conformance/range"

HOST_READS: dict[str, Callable[[Tensor], Any]] = {
    ".item()": lambda x: x * x.sum().item(),
    "bool(tensor)": lambda x: x if x.sum() > 0 else -x,
    "nonzero": lambda x: x.nonzero(),
}
"""Functions that wait for the device on their first line."""


def check_step_boundary(accelerator: Accelerator) -> None:
    """Check that boundaries change no value, and do nothing in eager execution."""
    _check_values(accelerator)
    if not accelerator.is_lazy():
        _check_nothing_done(accelerator)


def check_timing(accelerator: Accelerator) -> None:
    """Check marks against the host's clock, and that ranges show in torch's profiler."""
    factor = torch.full((SIZE, SIZE), 1 / SIZE, device=accelerator.device())
    accelerator.synchronize()
    clock, start, product = time.perf_counter(), accelerator.mark(), factor
    for _ in range(CALLS):
        product = product @ factor
    accelerator.step_boundary("check/timing")
    end = accelerator.mark()
    accelerator.synchronize()
    limit = time.perf_counter() - clock
    seconds = end.seconds_since(start)
    assert 0 < seconds <= 1.1 * limit, f"marks around {limit:.2g} s of work are {seconds:.2g} s apart"
    on_host = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=on_host) as recording, accelerator.named_range(RANGE):
        factor.add_(1)
    names = {event.name for event in recording.events()}
    assert RANGE in names, f"named_range({RANGE!r}) shows as no range in torch's profiler"


def check_capture(accelerator: Accelerator) -> None:
    """Compare captured and plain calls with the same inputs, of functions that also change a tensor in place."""
    device = accelerator.device()
    inputs = [torch.linspace(-1.0, 1.0, 8, device=device) * (call + 1) for call in range(CALLS)]
    with torch.no_grad():
        plain = _accumulator(device)
        expected = [pytree.tree_map(torch.clone, plain(x)) for x in inputs]
        captured = accelerator.capture(_accumulator(device), key="conformance/accumulate")
        copies, results = [], []
        for x in inputs:
            result = captured(x)
            copies.append(pytree.tree_map_only(Tensor, torch.clone, result))
            results.append(result)
    for call in range(CALLS):
        for name in expected[call]:
            what = f"call {call + 1} of {CALLS} of a captured function, {name}"
            assert_close(what, copies[call][name], expected[call][name])
            assert_close(f"{what}, read after the last call", results[call][name], expected[call][name])


def check_capture_refusal(accelerator: Accelerator) -> None:
    """Check that each host read is a `CaptureError` that names its line."""
    for read, function in HOST_READS.items():
        captured = accelerator.capture(function, key=f"conformance/{read}")
        try:
            captured(torch.ones(4, device=accelerator.device()))
        except CaptureError as error:
            refusal = str(error)
        except Exception as error:
            kind = type(error).__name__
            raise AssertionError(f"capture answers {read} with {kind}, expected CaptureError: {error}") from error
        else:
            raise AssertionError(f"capture lets {read} through, expected CaptureError")
        place = f"{Path(__file__).name}:{function.__code__.co_firstlineno}"
        assert place in refusal, f"capture refuses {read} without naming {place}: {refusal}"


def _accumulator(device: torch.device) -> Callable[[Tensor], dict[str, Tensor]]:
    total = torch.zeros(8, device=device)

    def add(x: Tensor) -> dict[str, Tensor]:
        total.add_(x)
        return {"a function of its input": x.tanh(), "its state": total * 2}

    return add


def _check_values(accelerator: Accelerator) -> None:
    """Compare steps of SGD with boundaries on the device with steps on the CPU."""
    losses = []
    for device, boundary in (
        (torch.device("cpu"), lambda tag: None),
        (accelerator.device(), accelerator.step_boundary),
    ):
        network = model().to(device)
        tokens, labels = (tensor.to(device) for tensor in batch())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        step_losses = []
        for _ in range(3):
            boundary("check/before-forward")
            logits = network(tokens)
            boundary("check/forward")
            loss = torch.nn.functional.cross_entropy(logits, labels)
            boundary("check/loss")
            loss.backward()
            boundary("check/backward")
            optimizer.step()
            optimizer.zero_grad()
            boundary("check/step")
            step_losses.append(loss.detach())
        losses.append(torch.stack(step_losses).cpu())
    assert_close("losses of three steps with step boundaries", losses[1], losses[0])


def _check_nothing_done(accelerator: Accelerator) -> None:
    accelerator.synchronize()
    generators = accelerator.rng_state()
    compiled = accelerator.compilations()
    waits: list[mock.Mock] = []
    with ExitStack() as stack:
        of_device = getattr(torch, accelerator.device().type, None)
        for owner in (accelerator, of_device, torch.accelerator):
            if hasattr(owner, "synchronize"):
                waits.append(stack.enter_context(mock.patch.object(owner, "synchronize")))
        operators = stack.enter_context(_Operators())
        accelerator.step_boundary("check/eager")
    expected = "expected nothing: is_lazy() is False"
    assert not any(wait.called for wait in waits), f"step_boundary calls synchronize(); {expected}"
    assert not operators.names, f"step_boundary runs {', '.join(operators.names)}; {expected}"
    before, after = (pytree.tree_leaves(state) for state in (generators, accelerator.rng_state()))
    same = all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(before, after))
    assert same, f"step_boundary changes the state of a random number generator; {expected}"
    assert accelerator.compilations() == compiled, f"step_boundary compiles a graph; {expected}"


class _Operators(TorchDispatchMode):
    """Records the names of the operators that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
