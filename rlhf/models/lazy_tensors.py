"""Lazy tensors: sources of a parameter's numbers, in a file or in memory, of which any part can be read alone.

`open_checkpoint` returns a `Source` for each tensor of a folder or hub name. Files are read with `pread` and closed
again, since pages of a mapped file would count as this process's memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Elements that are read at a time if the type or device differs from the stored tensor's."""

# In the order in which transformers looks for them.
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class OnDisk:
    """A tensor in a safetensors file."""

    path: Path
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Read elements from the file."""
        stop = self.shape.numel() if stop is None else stop
        tensor = torch.empty(stop - start, dtype=self.dtype)
        self.read_into(tensor, start)
        return tensor

    def read_into(self, tensor: Tensor, start: int) -> None:
        """Fill a flat tensor of the stored type, in the host's memory, with elements from `start` on."""
        rest = memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]  # Python 3.10 knows no Buffer
        position = self.offset + start * self.dtype.itemsize
        file = os.open(self.path, os.O_RDONLY)
        try:
            while rest:
                count = os.preadv(file, [rest], position)
                if not count:
                    raise OSError(f"{self.path}: truncated: it ends before its tensors do")
                rest, position = rest[count:], position + count
        finally:
            os.close(file)


@dataclass(frozen=True)
class InMemory:
    """A tensor in memory."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensor."""
        return self.tensor.dtype

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a view of elements."""
        return self.tensor.detach().reshape(-1)[start:stop]


@dataclass(frozen=True)
class Computed:
    """A tensor that is computed when it is read, always as a whole."""

    compute: Callable[[], Tensor]
    shape: torch.Size
    dtype: torch.dtype

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Compute the tensor and return elements of it."""
        return self.compute().reshape(-1)[start:stop]


@dataclass(frozen=True)
class Extended:
    """A matrix or vector `original` with rows added, all equal to `row`, which is float32."""

    original: Source
    rows: int
    row: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape with the added rows."""
        return torch.Size((self.rows, *self.original.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The type that fits the stored numbers and float32."""
        return torch.promote_types(self.original.dtype, self.row.dtype)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Read elements of the original and of the added rows."""
        stop = self.shape.numel() if stop is None else stop
        old = self.original.shape.numel()
        parts = []
        if start < old:
            parts.append(self.original.read(start, min(stop, old)).to(self.dtype))
        if stop > old:
            indices = torch.arange(max(start, old), stop) % self.row.numel()
            parts.append(self.row.reshape(-1)[indices].to(self.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


Source: TypeAlias = OnDisk | InMemory | Computed | Extended
"""A tensor of a known `shape` and stored `dtype`.

`read(start, stop)` returns its elements from `start` to `stop`, flat, in stored order and in the stored type.
"""


def open_checkpoint(path: str) -> dict[str, Source] | None:
    """Return the tensors of the checkpoint at `path`, a folder or a hub name, by their stored names.

    Returns:
        None if its files are not those that `save_pretrained` writes, so that transformers must read them.
    """
    from transformers.utils.hub import cached_file

    for name in _FILES:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is None:
            continue
        files = [file]
        if name.endswith(".json"):
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            files = [cached_file(path, part) for part in sorted(set(content["weight_map"].values()))]
        sources: dict[str, Source] = {}
        for part in map(Path, files):
            sources |= _open_bin(part) if part.suffix == ".bin" else _open_safetensors(part)
        return sources if all(sources.values()) else None
    return None


def copy_source(source: Source, out: Tensor, start: int = 0) -> Tensor:
    """Fill `out` with elements of `source` from `start` on, in small pieces, and return it.

    Each number is rounded once, to the type of `out`.
    """
    flat = out.detach().view(-1)
    if isinstance(source, OnDisk) and out.dtype == source.dtype and out.device == torch.get_default_device():
        source.read_into(flat, start)
        return out
    step = _get_chunk(source)
    for first in range(0, flat.numel(), step):
        last = min(first + step, flat.numel())
        flat[first:last].copy_(source.read(start + first, start + last))
    return out


def read_whole(source: Source, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return the whole tensor of `source`."""
    return copy_source(source, torch.empty(source.shape, dtype=dtype, device=device))


def compute_in_parts(
    compute_rows: Callable[[slice], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Return a matrix in `dtype`; `compute_rows` returns some of its rows at a time, in float32."""
    out = torch.empty(shape, dtype=dtype, device=device)
    step = max(1, CHUNK // shape[1:].numel())
    for first in range(0, shape[0], step):
        rows = slice(first, min(first + step, shape[0]))
        out[rows] = compute_rows(rows)
    return out


def sources_equal(left: Source, right: Source) -> bool:
    """Return True if two sources have the same numbers."""
    size, step = left.shape.numel(), max(_get_chunk(left), _get_chunk(right))
    parts = [(first, min(first + step, size)) for first in range(0, size, step)]
    return left.shape == right.shape and all(
        torch.equal(left.read(*part).float(), right.read(*part).float()) for part in parts
    )


def compute_mean_row(source: Source) -> Tensor:
    """Return the mean of the rows of `source`, in float32; sums in float64 make it independent of how it is read."""
    rows, size = source.shape[0], source.shape[1:].numel()
    total = torch.zeros(size, dtype=torch.float64)
    step = max(1, _get_chunk(source) // size)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        total += source.read(first * size, last * size).double().view(-1, size).sum(0)
    return (total / rows).float().reshape(source.shape[1:])


def _get_chunk(source: Source) -> int:
    """Return the number of elements to read at a time: all, if each read computes the whole tensor."""
    return max(1, source.shape.numel()) if isinstance(source, Computed) else CHUNK


def _open_safetensors(path: Path) -> dict[str, Any]:
    """Return its tensors; None for each whose type is that of a quantized checkpoint."""
    from safetensors import safe_open

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        with safe_open(path, "pt"):  # raises if the file is damaged
            header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: OnDisk(path, 8 + length + entry["data_offsets"][0], torch.Size(entry["shape"]), _TYPES[entry["dtype"]])
        if entry["dtype"] in _TYPES
        else None
        for name, entry in header.items()
    }


def _open_bin(path: Path) -> dict[str, Any]:
    """Return its tensors, mapped into memory: pages that were read may stay there as long as the tensors exist."""
    from transformers.modeling_utils import load_state_dict

    return {name: InMemory(tensor) for name, tensor in load_state_dict(path).items()}
