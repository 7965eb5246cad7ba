"""Functions that run repeatedly on the same shapes: checked once, and recorded if the device can replay them.

`checked` runs the first call under a guard that refuses host reads, on every backend: code that would stop a
recording on one device then fails on all devices, with the line that has to change. `Graph` adds the recording: the
first call warms up, the second records, later calls replay.
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

from accelerators.errors import CaptureError

Function = TypeVar("Function", bound=Callable[..., Any])

Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Runs a function once while recording it: -> (its result, a function that replays it into the same tensors)."""

_TORCH = Path(torch.__file__).parent
_MASKED = (torch.bool, torch.uint8)


def checked(fn: Function, key: str) -> Function:
    """Return `fn`, whose first call fails if it waits for the device.

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
    """A recording of the second call of `fn`: later calls copy their tensors in, replay, and copy the results out.

    `fn` may also change tensors that it holds in place. Its other effects (changed Python values, replaced tensors)
    happen on the first two calls only.
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
        """Return the result of `fn`.

        Raises:
            CaptureError: `fn` waits for the device, or the arguments do not fit the recording.
        """
        if not self._warm:
            result = self._copied(self._warm_up(*args, **kwargs))
            self._warm = True
            return result
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if self._replay is None:
            self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self._structure = structure
            static_args, static_kwargs = pytree.tree_unflatten(self._inputs, structure)
            guarded = checked(self._fn, self.key)
            try:
                self._outputs, self._replay = self._record(lambda: guarded(*static_args, **static_kwargs))
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(f"{self.key} cannot be recorded: {' '.join(str(error).split())}") from error
        else:
            self._fill(leaves, structure)
            self._replay()
        return self._copied(self._outputs)

    def _fill(self, leaves: list[Any], structure: Any) -> None:
        if structure != self._structure:
            raise CaptureError(f"{self.key}: called with other arguments than it was recorded with")
        for static, new in zip(self._inputs, leaves):
            if not _alike(static, new):
                raise CaptureError(f"{self.key}: recorded for {_described(static)}, called with {_described(new)}")
        for static, new in zip(self._inputs, leaves):
            if isinstance(static, torch.Tensor):
                static.copy_(new)

    def _copied(self, outputs: Any) -> Any:
        """Return copies that the caller may keep: the next replay writes into the recording's tensors."""
        return pytree.tree_map(self._copy, outputs)

    def _copy(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                raise CaptureError(f"{self.key} returns a tensor with a gradient; recordings have none; use no_grad()")
            return leaf.clone()
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        raise CaptureError(f"{self.key} returns a {type(leaf).__name__}; use tuples, lists or dicts of tensors")


class StreamGraphs:
    """Records functions as graphs of the device's stream, for runtimes that resemble `torch.cuda`.

    Args:
        runtime: the module with `graph`, `stream` and `current_stream`, such as `torch.cuda`.
        kind: name of its class of graphs, such as "CUDAGraph"; each graph has a separate memory pool.
        failed: called after a recording that failed.
    """

    def __init__(self, runtime: Any, kind: str, failed: Callable[[], None] = lambda: None) -> None:
        self.recordings = 0
        self._runtime, self._kind, self._failed = runtime, kind, failed

    def capture(self, fn: Callable[..., Any], key: str) -> Graph:
        """Return `fn`, recorded on its second call (operation `graph_capture`)."""
        return Graph(fn, key, self.record)

    def record(self, fn: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record `fn` and replay it once (a `Record`): operators do not run while they are recorded."""
        runtime = self._runtime
        graph = getattr(runtime, self._kind)()
        try:
            # The outer context restores the current stream even if a recording fails at its end (torch 2.11 to 2.13).
            with runtime.stream(runtime.current_stream()), runtime.graph(graph):
                outputs = fn()
        except Exception:
            self._failed()
            raise
        self.recordings += 1
        graph.replay()
        return outputs, graph.replay


def _alike(static: Any, new: Any) -> bool:
    if isinstance(static, torch.Tensor) and isinstance(new, torch.Tensor):
        return static.shape == new.shape and static.dtype == new.dtype
    return type(static) is type(new) and static == new


def _described(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


class _NoHostReads(TorchDispatchMode):
    """Refuses operators that copy between device and host, or whose result's shape depends on values."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads(func, args, kwargs):
            raise CaptureError(
                f"{self.key} reads values of the device on the host ({func.overloadpacket}, {_line()}); "
                "keep them in tensors (where, gather, masks), or read them outside"
            )
        if _sends(func, args, kwargs):
            raise CaptureError(
                f"{self.key} copies values of the host to the device ({func.overloadpacket}, {_line()}); "
                "make the tensor outside, or on the device (full, arange, zeros)"
            )
        return func(*args, **kwargs)


def _reads(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    tags = getattr(func, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return True
    if func.overloadpacket is torch.ops.aten.index:  # its shape depends on values only if a mask is the index
        return any(index is not None and index.dtype in _MASKED for index in args[1])
    if torch.Tag.dynamic_output_shape in tags:
        return kwargs.get("output_size") is None
    source, target = _way(func, args, kwargs)
    return source != "cpu" and target == "cpu"


def _sends(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func.overloadpacket is torch.ops.aten.lift_fresh:  # torch.tensor(...); a number may stay on the host
        return bool(args[0].dim() > 0 or args[0].device.type != "cpu")
    source, target = _way(func, args, kwargs)
    return source == "cpu" and target != "cpu"


def _way(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str, str]:
    """Return the device types from which and to which an operator copies; equal ones for all other operators."""
    if func.overloadpacket is torch.ops.aten.copy_:
        return args[1].device.type, args[0].device.type
    if func.overloadpacket is torch.ops.aten._to_copy and kwargs.get("device") is not None:
        return args[0].device.type, torch.device(kwargs["device"]).type
    return "cpu", "cpu"


def _line() -> str:
    """Return the innermost line of code that is neither torch's nor this module's."""
    frames = traceback.extract_stack()
    callers = [f for f in frames if f.filename != __file__ and _TORCH not in Path(f.filename).parents]
    return f"{callers[-1].filename}:{callers[-1].lineno}" if callers else "in torch itself"
