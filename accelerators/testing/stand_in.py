"""Stand-ins for a device's runtime, over CPU tensors, for tests of a backend on machines without the device.

A recording is made as a device makes it: operators are written down, and replayed without their Python code. `record`
obeys `accelerators.capture.Record`, so that `Graph(fn, key, stand_in.record)` shows what a function does when it is
replayed: side effects in Python do not happen again, and every operator works at the addresses of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelerators.accelerator import Accelerator
from accelerators.types import API_VERSION, AcceleratorSpec, Probe


def subject(backend: type[Accelerator]) -> Any:
    """Return what checks of the kit ask for (`check.run`): a backend bound to local rank 0, without its plugin."""
    accelerator = backend()
    accelerator.bind(0)
    spec = AcceleratorSpec(name=backend.name, api_version=API_VERSION, factory="", probe=lambda: Probe(True, ""))
    selection = SimpleNamespace(name=backend.name, spec=spec, create=backend)
    return SimpleNamespace(name=backend.name, selection=selection, unbound=accelerator, accelerator=accelerator)


class Streams:
    """The streams and graphs of a module like `torch.cuda`; `replays` lists the stream of each replay."""

    def __init__(self) -> None:
        self.replays: list[str] = []
        self._current = "default"

    def functions(self, kind: str) -> dict[str, Callable[..., Any]]:
        """Return the functions of the module that `StreamGraphs` uses, by name; `kind` names the class of graphs."""
        return {
            kind: lambda: _StreamGraph(self),
            "graph": self._recording,
            "stream": self.on,
            "current_stream": lambda: self._current,
        }

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Make a stream the current one."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def _recording(self, graph: _StreamGraph) -> Iterator[None]:
        before, self._current = self._current, "capture"
        with graph.tape:
            yield
        graph.tape.undo()  # a stream in recording mode runs nothing
        self._current = before  # as in torch, not reached if the recording fails

    def replayed(self) -> None:
        """Note a replay on the current stream."""
        self.replays.append(self._current)


class _StreamGraph:
    def __init__(self, streams: Streams) -> None:
        self.tape = UndoableTape()
        self._streams = streams

    def replay(self) -> None:
        """Run the recorded operators again."""
        self._streams.replayed()
        self.tape.replay()


def record(fn: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Run `fn` once: -> (what it returns, a function that runs its operators again, into the same tensors)."""
    tape = Tape()
    with tape:
        outputs = fn()
    return outputs, tape.replay


class Tape(TorchDispatchMode):
    """The operators that ran inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own_args, own_kwargs = _addresses((args, kwargs))
        results = func(*args, **kwargs)
        # A view moves no data: a device launches nothing for it.
        if not func.is_view and torch.Tag.inplace_view not in func.tags:
            self._steps.append((func, own_args, own_kwargs, _addresses(results)))
        return results

    def replay(self) -> None:
        """Run the operators again, and copy their results to those of the recording."""
        for func, args, kwargs, results in self._steps:
            again = pytree.tree_leaves(func(*args, **kwargs))
            for own, new in zip(pytree.tree_leaves(results), again, strict=True):
                # An operator that works in place returns its argument.
                if isinstance(own, torch.Tensor) and own.data_ptr() != new.data_ptr():
                    own.copy_(new)


class UndoableTape(Tape):
    """A tape whose operators can be made to look as if they had been recorded without being run."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._results: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._before += [(tensor, tensor.clone()) for tensor in _tensors(args)]
        results = super().__torch_dispatch__(func, types, args, kwargs)
        self._results += _tensors(results)
        return results

    def undo(self) -> None:
        """Clear the results, and give the arguments the values that they had before."""
        for tensor in self._results:
            tensor.zero_()
        for tensor, value in reversed(self._before):
            tensor.copy_(value)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors, of expanded ones the elements that memory holds: torch writes to no others."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())] for tensor in tensors]


def _addresses(values: Any) -> Any:
    """Return the tensors as they lie in memory now: like a device, a replay does not follow `tensor.data = ...`."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, values)
