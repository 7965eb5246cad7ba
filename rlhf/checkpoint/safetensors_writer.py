"""Safetensors files written tensor by tensor: no more than one tensor is ever held.

The names, shapes and types of all tensors flow in first, then one tensor after the other, in any order; out come a
file, or several with an index, as `save_pretrained` names them.
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
"""Bytes of tensors in a file, at most, but for a tensor that is larger."""

_NAMES = {dtype: name for name, dtype in _TYPES.items()}  # safetensors 0.8 has them nowhere else


class SafetensorsWriter:
    """Files in a folder that tensors are written to; a context, which ends when all of them are there."""

    def __init__(self, folder: Path, outlines: Mapping[str, Tensor], *, file_size: int | None = None) -> None:
        """`outlines` have the shapes and types, and may be on the meta device; `file_size` is FILE_SIZE by default."""
        self._open = ExitStack()
        self._places: dict[str, tuple[BinaryIO, int, Tensor]] = {}
        groups = _split(outlines, file_size or FILE_SIZE)
        names = ["model.safetensors"]
        if len(groups) > 1:
            names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        for name, group in zip(names, groups):
            self._begin(folder / name, group)
        if len(groups) > 1:
            total = sum(map(_size, outlines.values()))
            numbers = sum(tensor.numel() for tensor in outlines.values())
            index = {key: name for name, group in zip(names, groups) for key in group}
            metadata = {"total_parameters": numbers, "total_size": total}
            atomic_write_json(folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": index})

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()
        assert error or not self._places, f"not written: {sorted(self._places)}"

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, from whatever device it is on."""
        file, place, outline = self._places.pop(name)
        assert tensor.shape == outline.shape and tensor.dtype == outline.dtype, name
        file.seek(place)
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for part in flat.split(1 << 26):
            file.write(part.to(torch.get_default_device()).numpy())

    def _begin(self, path: Path, group: Mapping[str, Tensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # Wide numbers first, so that each begins at a multiple of its size: readers take views of the file.
        for name, tensor in sorted(group.items(), key=lambda item: -item[1].element_size()):
            starts[name], end = end, end + _size(tensor)
            offsets = [starts[name], end]
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin where numbers may
        file = self._open.enter_context(path.open("wb"))
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + end)
        for name, start in starts.items():
            self._places[name] = file, 8 + len(text) + start, group[name]


def _split(outlines: Mapping[str, Tensor], file_size: int) -> list[dict[str, Tensor]]:
    """Tensors by file, in their order."""
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
