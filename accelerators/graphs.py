"""Functions that run again and again on the same shapes: checked once, and recorded where the device can replay.

`checked` runs the first call under a guard that refuses host reads, on every backend: code that would stop a
recording on one device then fails on all, with the line that has to change. `Graph` adds the recording: a first
call that warms up, a second that records, and replays from then on.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelerators.types import CaptureError

Function = TypeVar("Function", bound=Callable[..., Any])

Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Runs a function once while recording it: -> (what it returned, a function that replays it into the same tensors)."""

_TORCH = Path(torch.__file__).parent
_MASKED = (torch.bool, torch.uint8)


def checked(fn: Function, key: str) -> Function:
    """`fn`, whose first call is refused if it waits for the device.

    Raises:
        CaptureError: on that call; the message names the line.
    """
    seen = False

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if seen:
            return fn(*args, **kwargs)
        with _NoHostReads(key):
            result = fn(*args, **kwargs)
        seen = True
        return result

    return cast(Function, call)


class Graph:
    """`fn` as a recording of its second call: later calls copy their tensors in, replay, and copy the results out.

    `fn` may also work in place on tensors that it holds itself. Everything else that it does (Python values it
    changes, tensors it replaces) happens on the first two calls only.
    """

    def __init__(self, fn: Callable[..., Any], key: str, record: Record) -> None:
        self.key = key
        self._fn = fn
        self._warm_up = checked(fn, key)
        self._record = record
        self._warm = False
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Any] = []
        self._structure: Any = None
        self._outputs: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns.

        Raises:
            CaptureError: `fn` waits for the device, or the arguments do not fit the recording.
        """
        if not self._warm:
            result = self._warm_up(*args, **kwargs)
            self._warm = True
            return result
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if self._replay is None:
            self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self._structure = structure
            own_args, own_kwargs = pytree.tree_unflatten(self._inputs, structure)
            try:
                self._outputs, self._replay = self._record(lambda: self._fn(*own_args, **own_kwargs))
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(f"{self.key} cannot be recorded: {' '.join(str(error).split())}") from error
        else:
            self._fill(leaves, structure)
            self._replay()
        # Copies: the next replay writes into the recording's own tensors.
        return pytree.tree_map_only(torch.Tensor, torch.clone, self._outputs)

    def _fill(self, leaves: list[Any], structure: Any) -> None:
        if structure != self._structure:
            raise CaptureError(f"{self.key}: called with other arguments than it was recorded with")
        for own, given in zip(self._inputs, leaves):
            if not isinstance(own, torch.Tensor):
                if own != given:
                    raise CaptureError(f"{self.key}: recorded with the value {own!r}, called with {given!r}")
            elif own.shape != given.shape or own.dtype != given.dtype:
                raise CaptureError(
                    f"{self.key}: recorded for {own.dtype} {tuple(own.shape)}, "
                    f"called with {given.dtype} {tuple(given.shape)}"
                )
            else:
                own.copy_(given)


class _NoHostReads(TorchDispatchMode):
    """Refuses operators whose result, or whose result's shape, the host has to wait for."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            raise CaptureError(
                f"{self.key} reads values of the device on the host ({func.overloadpacket}, {_line()}); "
                "keep them in tensors (where, gather, masks), or read them outside"
            )
        return func(*args, **kwargs)


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    tags = getattr(func, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return True
    if func.overloadpacket is torch.ops.aten.index:  # its shape depends on values only where a mask is the index
        return any(index is not None and index.dtype in _MASKED for index in args[1])
    if torch.Tag.dynamic_output_shape in tags:
        return kwargs.get("output_size") is None
    if func.overloadpacket is torch.ops.aten._to_copy:
        target = kwargs.get("device")
        return target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu"
    return False


def _line() -> str:
    """The innermost line of code that is neither torch's nor this module's."""
    frames = traceback.extract_stack()
    own = [f for f in frames if f.filename != __file__ and _TORCH not in Path(f.filename).parents]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "in torch itself"
