"""A recording as a device makes it, on the CPU: operators are written down, and replayed without their Python code.

`record` obeys `accelerators.capture.Record`, so that `Graph(fn, key, replaying.record)` shows what a function does when
it is replayed: side effects in Python do not happen again, and every operator works at the addresses of the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


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
        """Run the operators again; what they return anew is copied to where it was in the recording."""
        for func, args, kwargs, results in self._steps:
            again = pytree.tree_leaves(func(*args, **kwargs))
            for own, new in zip(pytree.tree_leaves(results), again, strict=True):
                # An operator that works in place returns its argument.
                if isinstance(own, torch.Tensor) and own.data_ptr() != new.data_ptr():
                    own.copy_(new)


def _addresses(values: Any) -> Any:
    """The tensors as they lie in memory now: like a device, a replay does not follow `tensor.data = ...`."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, values)
