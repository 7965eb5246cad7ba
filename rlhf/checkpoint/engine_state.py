"""The trained numbers of an engine in a checkpoint, which any number of ranks can read at any ZeRO stage.

Each rank writes one safetensors file with its fragments of the float32 weights, of the optimizer's moments and of the
moving average; at ZeRO 0, where all ranks have the same, rank 0 alone does. Other numbers are not included: a stage
loads frozen weights and buffers again from their source, and the 16-bit weights are the rounded float32 ones.

DeepSpeed's universal checkpoints do not serve here (0.19.8): they know no ZeRO 0, give all groups of parameters the
weight decay and learning rate of the first when ZeRO-3 reads them, and run code in the files.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf.checkpoint.safetensors_writer import SafetensorsWriter
from rlhf.engine import distributed, fragments
from rlhf.engine.fp32_weights import CHUNK
from rlhf.engine.fragments import AVERAGE, WEIGHT, Fragment, OptimizerTensors

if TYPE_CHECKING:
    from rlhf.engine.engine import TrainingEngine


class Key(NamedTuple):
    """What a tensor of a file holds: numbers of one kind, of a parameter's flattened tensor from `start` on."""

    kind: str
    name: str
    start: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}/{self.start}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """Read `str(key)`."""
        kind, name, start = text.split("/")
        return cls(kind, name, int(start))


def save_engine(engine: TrainingEngine, folder: Path) -> int:
    """Write this rank's numbers of an engine to `folder`, and read them back; every rank calls it.

    Returns:
        How many of the written weights are NaN or infinite.
    """
    world, not_finite = distributed.world(), 0
    if engine.zero_stage == 0 and not world.is_main:
        return 0
    outlines = {str(key): outline for key, outline in _list_outlines(engine)}
    with SafetensorsWriter(folder, outlines, stem=f"rank{world.rank}", file_size=sys.maxsize, read_back=True) as writer:
        for index, parts in _group(engine):
            with fragments.open_tensors(engine, index) as tensors:
                for part in parts:
                    for kind, numbers in tensors.numbers.items():
                        count = writer.write(str(Key(kind, part.name, part.start)), part.of(numbers))
                        not_finite += count if kind == WEIGHT else 0
                    for counter, value in tensors.counters.items():
                        writer.write(str(Key(counter, part.name, part.start)), _as_tensor(value))
    return not_finite


def load_engine(engine: TrainingEngine, folder: Path) -> None:
    """Set an engine's numbers to those in `folder`, whatever ranks and ZeRO stage wrote them; every rank calls it.

    Raises:
        ValueError: the files are of a model with other parameters, or lack some of their numbers.
    """
    with SavedTensors(folder) as saved:
        trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
        if different := sorted(trained ^ saved.names):
            raise ValueError(f"{different[0]} is trained {'here' if different[0] in trained else 'there'} only")
        for index, parts in _group(engine):
            with fragments.open_tensors(engine, index, write=True) as tensors:
                if saved.has_moments and not tensors.counters:
                    fragments.create_moments(engine, index)
                for part in parts:
                    for kind, numbers in tensors.numbers.items():
                        saved.read(Key(kind, part.name, part.start), part.of(numbers))
                for counter in tensors.counters:
                    tensors.set_counter(counter, max(saved.read_counter(counter, part.name) for part in parts))
    fragments.finish_loading(engine)


class SavedTensors:
    """The files of all ranks in a folder, as one set of flattened tensors; a context manager that closes them.

    Attributes:
        names: the names of the trained parameters.
        has_moments: False if no step had been taken.
    """

    def __init__(self, folder: Path) -> None:
        self._open = ExitStack()
        self._parts: dict[tuple[str, str], list[tuple[int, Any, str]]] = defaultdict(list)
        for path in sorted(folder.glob("rank*.safetensors")):
            file = self._open.enter_context(safe_open(path, "pt"))
            for text in file.keys():  # noqa: SIM118 (not a dictionary)
                kind, name, start = Key.parse(text)
                self._parts[kind, name].append((start, file, text))
        self.names = {name for kind, name in self._parts if kind == WEIGHT}
        self.has_moments = any(kind not in (WEIGHT, AVERAGE) for kind, _ in self._parts)

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def read(self, key: Key, out: Tensor) -> None:
        """Copy the numbers from `key.start` on to `out`, a chunk at a time.

        Moments that no file has are those of a parameter that never had a gradient: 0.

        Raises:
            ValueError: some of the numbers are in no file.
        """
        parts = self._parts.get((key.kind, key.name), [])
        if not parts and key.kind not in (WEIGHT, AVERAGE):
            out.zero_()
            return
        copied = 0
        for start, file, text in parts:
            numbers = file.get_slice(text)
            first, last = max(start, key.start), min(start + numbers.get_shape()[0], key.start + len(out))
            for place in range(first, last, CHUNK):
                end = min(place + CHUNK, last)
                out[place - key.start : end - key.start].copy_(numbers[place - start : end - start])
            copied += max(0, last - first)
        if copied != len(out):
            raise ValueError(f"{len(out) - copied:,} numbers of {key.kind} of {key.name} are missing")

    def read_counter(self, counter: str, name: str) -> float:
        """Return a counter of a parameter, or 0 if it never had a gradient."""
        parts = self._parts.get((counter, name), [])
        return max((float(file.get_tensor(text)) for _, file, text in parts), default=0.0)


def _list_outlines(engine: TrainingEngine) -> Iterator[tuple[Key, Tensor]]:
    """Yield the keys of what this rank writes, with tensors of the shapes and types that have no numbers."""
    for index, parts in _group(engine):
        tensors = OptimizerTensors(engine, index)  # those that wait on NVMe are empty, but have a type
        for part in parts:
            for kind, numbers in tensors.numbers.items():
                yield Key(kind, part.name, part.start), torch.empty(part.size, dtype=numbers.dtype, device="meta")
            for counter, value in tensors.counters.items():
                yield Key(counter, part.name, part.start), _as_tensor(value)


def _group(engine: TrainingEngine) -> Iterator[tuple[int, list[Fragment]]]:
    """Yield the indices of the optimizer's tensors, each with its fragments."""
    for index, parts in groupby(fragments.list_fragments(engine), lambda part: part.index):
        yield index, list(parts)


def _as_tensor(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)
