"""Write safetensors files tensor by tensor, so that no more than one tensor is in memory.

The names, shapes and types of all tensors are known first; then the tensors come one by one, in any order. The result
is one file, or several with an index, named as `save_pretrained` does unless another `stem` is given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from rlhf.utils.atomic_io import atomic_write_json

FILE_SIZE = 4 * 2**30
"""Largest number of bytes in a file, unless one tensor is larger."""

_NAMES = {dtype: name for name, dtype in _TYPES.items()}  # private; safetensors 0.8 has no public table


class SafetensorsWriter:
    """Files in a folder that tensors are written to; a context manager that ends when all tensors are written."""

    def __init__(
        self, folder: Path, outlines: Mapping[str, Tensor], *, stem: str = "model", file_size: int | None = None
    ) -> None:
        """`outlines` have the shapes and types, and may be on the meta device; `file_size` is FILE_SIZE by default."""
        self._open = ExitStack()
        self._positions: dict[str, tuple[BinaryIO, int, Tensor]] = {}
        groups = _split(outlines, file_size or FILE_SIZE)
        names = [f"{stem}.safetensors"]
        if len(groups) > 1:
            names = [f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        for name, group in zip(names, groups):
            self._begin(folder / name, group)
        if len(groups) > 1:
            total = sum(map(_size, outlines.values()))
            numbers = sum(tensor.numel() for tensor in outlines.values())
            index = {key: name for name, group in zip(names, groups) for key in group}
            metadata = {"total_parameters": numbers, "total_size": total}
            atomic_write_json(folder / f"{stem}.safetensors.index.json", {"metadata": metadata, "weight_map": index})

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()
        assert error or not self._positions, f"not written: {sorted(self._positions)}"

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, from any device."""
        file, position, outline = self._positions.pop(name)
        assert tensor.shape == outline.shape and tensor.dtype == outline.dtype, name
        file.seek(position)
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for part in flat.split(1 << 26):
            file.write(part.to(torch.get_default_device()).numpy())

    def _begin(self, path: Path, group: Mapping[str, Tensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # Wide types first, so that each tensor starts at a multiple of its element size: readers map the file.
        for name, tensor in sorted(group.items(), key=lambda item: -item[1].element_size()):
            starts[name], end = end, end + _size(tensor)
            offsets = [starts[name], end]
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligns the tensors
        file = self._open.enter_context(path.open("wb"))
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + end)
        for name, start in starts.items():
            self._positions[name] = file, 8 + len(text) + start, group[name]


def _split(outlines: Mapping[str, Tensor], file_size: int) -> list[dict[str, Tensor]]:
    """Return the tensors of each file, in order."""
    groups: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in outlines.items():
        if groups[-1] and filled + _size(tensor) > file_size:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += _size(tensor)
    return groups


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
