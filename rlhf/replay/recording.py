"""The tensors of one step: a digest, a norm and a sample of each, in the order of computation, and their comparison."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlhf.utils.units import format_number

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.engine.observer import Place

SAMPLE = 64
"""Numbers of a tensor that are kept: evenly spaced, the first and the last among them."""

_WHOLE = ("gradients", "update")  # the same on all ranks


class Entry(NamedTuple):
    """One tensor of a step; see `rlhf.engine.observer.Place` for the first five fields.

    Attributes:
        rank: the rank that computed it.
        digest: the first 16 digits of the SHA-256 of its bytes.
        norm: the root of the sum of its squares.
        sample: `SAMPLE` of its numbers, or all.
    """

    phase: str
    role: str
    update: int
    micro_batch: int
    name: str
    rank: int
    dtype: str
    shape: list[int]
    digest: str
    norm: float
    sample: list[float]

    @property
    def place(self) -> tuple[str, str, int, int, str, int]:
        """The tensor's identity in its step."""
        return self[:6]

    def __str__(self) -> str:
        model = f" of the {self.role} model" if self.role else ""
        part = f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        update = f", update {self.update + 1}" if self.update else ""
        return f"{self.name}{model}{part}{update}{f', rank {self.rank}' if self.rank else ''}"


@dataclass
class StepRecording:
    """An observer that keeps an entry of each tensor; the whole ones of all ranks are kept by rank 0."""

    rank: int
    host: torch.device
    entries: list[Entry] = field(default_factory=list)

    def __call__(self, place: Place, name: str, tensor: Tensor) -> None:
        """Keep a tensor; see `rlhf.engine.observer.Observer`."""
        if place.phase in _WHOLE and self.rank:
            return
        whole = tensor.detach().to(self.host).contiguous()
        flat = whole.flatten()
        places = torch.linspace(0, max(flat.numel() - 1, 0), min(SAMPLE, flat.numel())).round().long()
        self.entries.append(
            Entry(
                *(place.phase, place.role, place.update, place.micro_batch, name, self.rank),
                str(whole.dtype).removeprefix("torch."),
                list(whole.shape),
                hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
                float(flat.double().norm()),
                flat[places].double().tolist(),
            )
        )


class TensorDifference(NamedTuple):
    """One tensor that differs between two computations of a step.

    Attributes:
        entry: the tensor.
        first, second: its values where they differ most in the sample; NaN if only other numbers differ.
        change: the size of the difference relative to the tensor, as far as sample and norm show it; infinite if one
            side lacks the tensor, or has another shape.
    """

    entry: Entry
    first: float
    second: float
    change: float

    def __str__(self) -> str:
        if self.change == math.inf:
            return f"{self.entry}: one of the two has no such tensor, or another shape"
        values = f"{self.first:.9g} and {self.second:.9g}" if self.first == self.first else "outside of its sample"
        return f"{self.entry}: {values}, a change of {format_number(100 * self.change)} %"


def compare_entries(
    first: Sequence[Entry], second: Sequence[Entry], *, tolerance: float = 0.0
) -> list[TensorDifference]:
    """Return the tensors that differ, in the order of computation.

    Args:
        tolerance: the relative change up to which two tensors count as equal; 0: bit for bit.
    """
    others = dict(_number(second))
    differences = []
    for key, entry in _number(first):
        other = others.pop(key, None)
        if other is None or other.shape != entry.shape:
            differences.append(TensorDifference(entry, math.nan, math.nan, math.inf))
        elif other.digest != entry.digest:
            difference = _measure(entry, other)
            if not difference.change <= tolerance or not tolerance:
                differences.append(difference)
    if others and not differences:
        differences.append(TensorDifference(next(iter(others.values())), math.nan, math.nan, math.inf))
    return differences


def _number(entries: Sequence[Entry]) -> Iterator[tuple[Any, Entry]]:
    """Yield entries with their places, and a number for those of one place."""
    seen = Counter[Any]()
    for entry in entries:
        yield (entry.place, seen[entry.place]), entry
        seen[entry.place] += 1


def _measure(first: Entry, second: Entry) -> TensorDifference:
    pairs = list(zip(first.sample, second.sample))
    gaps = [abs(one - other) if one == one and other == other else math.inf for one, other in pairs]
    largest = max(range(len(gaps)), key=gaps.__getitem__)
    size = math.sqrt(sum(one * one for one, _ in pairs)) or 1.0
    change = max(math.sqrt(sum(gap * gap for gap in gaps)) / size, abs(first.norm - second.norm) / (first.norm or 1.0))
    if not gaps[largest]:
        return TensorDifference(first, math.nan, math.nan, change)
    return TensorDifference(first, *pairs[largest], change if change == change else math.inf)
