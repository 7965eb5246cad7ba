"""Sequences for rows that memory may not hold: `Spool` has its items in a temporary file, `Selection` is a part of one.

Sources may have millions of rows. Whatever passes over them reads one row at a time.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.errors import DataError

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class Spool(Sequence[T]):
    """The items that were appended; each is created when it is accessed.

    The file has no name: no other program can write to it, so its pickles are this process's own, and the system
    deletes it when the process ends, however it ends.

    Raises:
        DataError: the temporary folder cannot be written, or its disk is full.
    """

    def __init__(self) -> None:
        self._ends = array("q", [0])
        try:
            self._file = TemporaryFile()  # noqa: SIM115 - open for as long as its items are used
        except OSError as error:
            raise _not_written(error) from error

    def append(self, item: T) -> None:
        """Add an item to the end.

        Raises:
            DataError: the disk is full.
            RecursionError: the item is nested too deeply.
        """
        data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        try:
            self._file.write(data)
        except OSError as error:
            raise _not_written(error) from error
        self._ends.append(self._ends[-1] + len(data))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Selection(self, range(len(self))[index])
        index = range(len(self))[index]
        start, end = self._ends[index : index + 2]
        try:
            self._file.flush()
            data = os.pread(self._file.fileno(), end - start, start)  # a fork shares the position of `seek`
        except OSError as error:
            raise _not_written(error) from error
        return pickle.loads(data)


class Selection(Sequence[T]):
    """The items of another sequence at some indices, in that order."""

    def __init__(self, items: Sequence[T], indices: Sequence[int] | np.ndarray) -> None:
        self._items, self._indices = items, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Selection(self._items, self._indices[index])
        return self._items[self._indices[index]]


def _not_written(error: OSError) -> DataError:
    return DataError(
        f"the rows cannot be written to a temporary file ({error.strerror}); set TMPDIR to a folder with free space"
    )
