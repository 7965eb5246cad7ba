"""Write safetensors files tensor by tensor, so that no more than one tensor is in memory.

The names, shapes and types of all tensors are known first; then the tensors come one by one, in any order. The result
is one file, or several with an index, named as `save_pretrained` does unless another `stem` is given.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from rlhf.utils.atomic_io import atomic_write_json, drop_from_memory, read_back_error
from rlhf.utils.full_disk import open_waiting

FILE_SIZE = 4 * 2**30
"""Largest number of bytes in a file, unless one tensor is larger."""

_CHUNK = 1 << 26  # bytes that are written or read at a time
_NAMES = {dtype: name for name, dtype in _TYPES.items()}  # private; safetensors 0.8 has no public table


class SafetensorsWriter:
    """Files in a folder that tensors are written to; a context manager that ends when all tensors are written."""

    def __init__(
        self,
        folder: Path,
        outlines: Mapping[str, Tensor],
        *,
        stem: str = "model",
        file_size: int | None = None,
        read_back: bool = False,
    ) -> None:
        """Begin the files.

        Args:
            folder: exists.
            outlines: the tensors' shapes and types; they may be on the meta device.
            stem: the name of the file, or its beginning.
            file_size: FILE_SIZE by default.
            read_back: at the end, compare what the disk has with what was written.
        """
        self._read_back = read_back
        self._written: list[tuple[Path, int, int, int]] = []  # file, position, size, CRC-32
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
        if self._read_back and not error:
            self._compare()

    def write(self, name: str, tensor: Tensor) -> int:
        """Write a tensor, from any device.

        Returns:
            With `read_back`, how many of its numbers are NaN or infinite; they are counted here because each host read
            of another shape costs some devices a compilation.

        Raises:
            RunError: on leaving the block, with `read_back`: the disk returns other bytes.
        """
        file, position, outline = self._positions.pop(name)
        assert tensor.shape == outline.shape and tensor.dtype == outline.dtype, name
        file.seek(position)
        flat, checksum = tensor.detach().contiguous().view(-1).view(torch.uint8), 0
        not_finite = 0
        for part in flat.split(_CHUNK):
            part = part.to(torch.get_default_device())
            data = part.numpy()
            file.write(data)
            if self._read_back:
                checksum = zlib.crc32(data, checksum)
                not_finite += int((~part.view(tensor.dtype).isfinite()).sum())
        self._written.append((Path(file.name), position, len(flat), checksum))
        return not_finite

    def _compare(self) -> None:
        """Raise `RunError` if the disk returns other bytes than were written."""
        for path, parts in groupby(sorted(self._written), key=itemgetter(0)):
            drop_from_memory(path)
            with path.open("rb") as file:
                if any(_read_checksum(file, position, size) != checksum for _, position, size, checksum in parts):
                    raise read_back_error(path)

    def _begin(self, path: Path, group: Mapping[str, Tensor]) -> None:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # Wide types first, so that each tensor starts at a multiple of its element size: readers map the file.
        for name, tensor in sorted(group.items(), key=lambda item: -item[1].element_size()):
            starts[name], end = end, end + _size(tensor)
            offsets = [starts[name], end]
            entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)  # aligns the tensors
        file = self._open.enter_context(open_waiting(path))
        header = len(text).to_bytes(8, "little") + text
        file.write(header)
        self._written.append((path, 0, len(header), zlib.crc32(header)))
        os.truncate(file.fileno(), len(header) + end)
        for name, start in starts.items():
            self._positions[name] = file, len(header) + start, group[name]


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


def _read_checksum(file: BinaryIO, position: int, size: int) -> int:
    checksum = 0
    file.seek(position)
    while size > 0 and (data := file.read(min(size, _CHUNK))):
        checksum, size = zlib.crc32(data, checksum), size - len(data)
    return checksum if not size else -1


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
