"""Judge every operator of a step on the device: it is at fault if its result is beyond the band that its inputs give.

A dispatch mode sees each operator below autograd, forward, backward and in the optimizer. It copies the inputs to the
host before the call, and compares the result with the float64 truth of these inputs. So an operator that passes on a
wrong input is not blamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from rlhf.lockstep.places import Places
from rlhf.lockstep.rounding import base_name, is_view
from rlhf.lockstep.truth import compute_truth, find_error, results_of, to_host, written_by
from rlhf.reporting.step_records import PHASES

Kind = Literal["wrong", "read early", "changed input", "changed between", "random", "kernel"]

KINDS: dict[Kind, str] = {
    "wrong": "its result is wrong for its inputs",
    "read early": "its result was wrong when it was read, and right after the device had finished: a missing wait",
    "changed input": "it changed an input that it must only read",
    "changed between": "the memory of its input changed after the operator that wrote it: shared or freed too early",
    "random": "its random numbers are not of their distribution, or repeat earlier ones",
    "kernel": "the fused kernel's result is wrong for its inputs",
}

MOST = 200
"""Faults after which no more are looked for."""

_NAMESPACES = ("aten", "prims")


@dataclass
class Fault:
    """An operator at fault.

    Attributes:
        number: its number among the operators of the step.
        occurrence: how often the same operator of the same module had run before.
        ratio: its error in bands.
        element, value, truth: the element that is farthest off, its value, and the truth in float64.
    """

    number: int
    operator: str
    kind: Kind
    module: str
    line: str
    backward: bool
    occurrence: int
    ratio: float
    element: tuple[int, ...]
    value: float
    truth: float
    shapes: str
    phase: str = ""
    role: str = ""
    update: int = 0
    other: float | None = None
    """The value of the other backend at the same place, if it ran the same operator there."""

    def to_json(self) -> dict[str, Any]:
        """Return the fault as values for JSON."""
        return asdict(self) | {"meaning": KINDS[self.kind]}


class OperatorJudge(TorchDispatchMode):
    """Judges operators while it is active.

    Attributes:
        faults: the operators at fault, in the order in which they ran.
        judged: how many were judged.
        not_judged: those that the host lacks in float64, with the reason.
    """

    def __init__(self, places: Places, synchronize: Callable[[], None], until: str | None = None) -> None:
        """Judge until all tensors of the phase `until` have been reported; None: to the end of the step."""
        super().__init__()
        self.places, self.synchronize, self.until = places, synchronize, until
        self.faults: list[Fault] = []
        self.judged, self.number = 0, 0
        self.not_judged: dict[str, str] = {}
        self._calls: dict[tuple[str, str, bool], int] = {}
        self._written: dict[tuple[Any, ...], tuple[StorageWeakRef, Tensor]] = {}
        self._storages: dict[int, list[tuple[Any, ...]]] = {}
        self._drawn: set[bytes] = set()
        self._assigned = 0
        self._is_done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and judge it."""
        kwargs = kwargs or {}
        name = base_name(func)
        if self._is_done or func.namespace not in _NAMESPACES or is_view(func) or name.startswith(_NOT_JUDGED):
            returned = func(*args, **kwargs)
            if not is_view(func):
                for item in tree_flatten((args, kwargs, returned))[0]:
                    if isinstance(item, Tensor):
                        self._forget(item)
            return returned
        self.number += 1
        place = self.places.current()
        operator = f"{func.namespace}::{func.overloadpacket.__name__}"
        key = (place.module, operator, place.backward)
        occurrence = self._calls[key] = self._calls.get(key, -1) + 1
        inputs = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
        before_args, before_kwargs = to_host((args, kwargs))
        before = [item for item in tree_flatten((before_args, before_kwargs))[0] if isinstance(item, Tensor)]

        def blame(kind: Kind, ratio: float, index: tuple[int, ...], value: float, truth: float) -> None:
            shapes = ", ".join(f"{list(item.shape)} {str(item.dtype).removeprefix('torch.')}" for item in inputs)
            where = (place.module, place.line, place.backward, occurrence)
            self.faults.append(Fault(self.number, operator, kind, *where, ratio, index, value, truth, shapes))

        if len(self.faults) >= MOST:
            self._is_done = True
        for item, copy in zip(inputs, before):
            storage, known = self._written.get(_memory(item), (None, copy))
            # A tensor that was freed has left its place to others, which operators may write without this mode.
            is_same = storage is not None and not storage.expired()
            if is_same and (number := _first_difference(known, copy)) is not None:
                blame("changed between", math.inf, *_element(copy, known, number))
                self._written.pop(_memory(item))
        returned = func(*args, **kwargs)
        written = {id(item) for item in written_by(func, args, kwargs)}
        for item in inputs:
            if id(item) in written:
                self._forget(item)
        results = results_of(func, returned, args, kwargs)
        copies = to_host(results)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._judge_draws(func, copies, blame)
        else:
            self._judge(func, before_args, before_kwargs, results, copies, blame)
        for item, copy in zip(inputs, before):
            shares = any(_storage(item) == _storage(other) for other in inputs if id(other) in written)
            if id(item) not in written and not shares:
                number = _first_difference(to_host(item), copy)
                if number is not None:
                    blame("changed input", math.inf, *_element(to_host(item), copy, number))
        for item, copy in zip(results, copies):
            self._forget(item)  # new memory may lie where a freed tensor was
            self._remember(item, copy)
        return returned

    def assign(self, phase: str, role: str, update: int) -> None:
        """Give the faults since the last call their phase; no operator computes the rows of the data."""
        if phase == "rows":
            return
        for fault in self.faults[self._assigned :]:
            fault.phase, fault.role, fault.update = phase, role, update
        self._assigned = len(self.faults)
        self._is_done = self.until is not None and PHASES.index(phase) > PHASES.index(self.until)

    def _judge(self, func: Any, args: Any, kwargs: Any, results: Any, copies: list[Tensor], blame: Any) -> None:
        try:
            with _disable_current_modes():
                error = find_error(func, args, kwargs, copies)
        except Exception as failure:  # the host has no such operator in float64: reported, not guessed
            self.not_judged.setdefault(f"{func.namespace}::{base_name(func)}", str(failure).splitlines()[0][:120])
            return
        self.judged += 1
        if error is None:
            return
        ratio, number, index = error
        with _disable_current_modes():
            truth = compute_truth(func, args, kwargs)[number]
        value = float(copies[number][index]) if index or not copies[number].dim() else math.nan
        self.synchronize()
        copies[:] = to_host(results)
        with _disable_current_modes():
            kind: Kind = "wrong" if find_error(func, args, kwargs, copies) else "read early"
        blame(kind, ratio, index, value, float(truth[index]) if index or not truth.dim() else math.nan)

    def _judge_draws(self, func: Any, copies: list[Tensor], blame: Any) -> None:
        """Check random numbers against their distribution, within six standard errors, and against earlier ones."""
        for copy in copies:
            numbers = copy.double()
            if numbers.numel() < 64 or not copy.is_floating_point():
                continue
            content = numbers.numpy().tobytes()
            mean, deviation = float(numbers.mean()), float(numbers.std())
            uniform = base_name(func) in ("rand", "uniform", "rand_like")
            far = uniform and abs(mean - 0.5) > 6 * 0.2887 / math.sqrt(numbers.numel())
            if content in self._drawn or deviation == 0 or not math.isfinite(mean) or far:
                blame("random", math.inf, (), mean, 0.5 if uniform else math.nan)
            self._drawn.add(content)

    def _remember(self, item: Tensor, copy: Tensor) -> None:
        key = _memory(item)
        self._written[key] = StorageWeakRef(item.untyped_storage()), copy
        self._storages.setdefault(key[0], []).append(key)

    def _forget(self, item: Tensor) -> None:
        for key in self._storages.pop(_storage(item), ()):
            self._written.pop(key, None)


class Wanted(NamedTuple):
    """An element of the result of an operator, by the operator's place in the step."""

    module: str
    operator: str
    backward: bool
    occurrence: int
    element: tuple[int, ...]


class OperatorWatch(TorchDispatchMode):
    """Reads elements of the results of some operators; `values` has them, or None if the operator did not run."""

    def __init__(self, places: Places, wanted: Sequence[Wanted]) -> None:
        super().__init__()
        self.places = places
        self.values: dict[Wanted, float | None] = dict.fromkeys(wanted)
        self._names = {item.operator for item in wanted}
        self._calls: dict[tuple[str, str, bool], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and read what is wanted of it."""
        place = self.places.current()  # of each operator, since backward operators find theirs by it
        returned = func(*args, **(kwargs or {}))
        name = f"{func.namespace}::{func.overloadpacket.__name__}"
        if name in self._names:
            key = (place.module, name, place.backward)
            occurrence = self._calls[key] = self._calls.get(key, -1) + 1
            for item in self.values:
                if item[:4] == (*key, occurrence):
                    tensor = results_of(func, returned, args, kwargs or {})[0]
                    fits = [number < size for number, size in zip(item.element, tensor.shape)]
                    if len(fits) == tensor.dim() == len(item.element) and all(fits):
                        self.values[item] = float(tensor[item.element])
        return returned


_NOT_JUDGED = ("empty", "new_empty", "set", "resize", "_local_scalar_dense", "record_stream", "_fused_sdp_choice")
"""Beginnings of names of operators whose results have no values, or are numbers of Python."""


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return _storage(tensor), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _first_difference(first: Tensor, second: Tensor) -> int | None:
    same = (first == second) | ((first != first) & (second != second))
    return None if bool(same.all()) else int((~same).flatten().to(torch.uint8).argmax())


def _element(tensor: Tensor, truth: Tensor, number: int) -> tuple[tuple[int, ...], float, float]:
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(number), tensor.shape)) if tensor.dim() else ()
    return index, float(tensor.flatten()[number]), float(truth.flatten()[number])
