"""Examples in Arrow: written as they are made, and read where they lie, memory-mapped, one by one when asked for.

`Writer` takes examples and holds a thousand at a time; `Table` gives them back by their places, and `Stored` those of
some places, as a sequence. All processes of a machine share the pages of a file; a process holds no token of it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rlhf.data.examples import Example, TokenCounts
from rlhf.data.records import Message, Row

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_AT_ONCE = 1000  # examples in a record batch, but for the last
_ROW = "row"


class UnstorableRowError(Exception):
    """A row holds what this format does not give back as it was; the message says what."""


class ExampleWriter:
    """A file of examples of one kind, in the order in which they are added; `close` completes it.

    Raises:
        OSError: the file cannot be written.
        Unstorable: a row's record holds more than text, numbers, lists and objects.
    """

    def __init__(self, path: Path, kind: type[Example]) -> None:
        from pyarrow import OSFile, ipc

        self._parts, self._schema = _parts(kind), _schema(kind)
        self._file = OSFile(str(path), "wb")
        self._writer = ipc.new_file(self._file, self._schema)
        self._waiting: list[Example] = []

    def add(self, example: Example) -> None:
        """Write one example more; a thousand at a time reach the file."""
        self._waiting.append(example)
        if len(self._waiting) == _AT_ONCE:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the file's end."""
        self._flush()
        self._writer.close()
        self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa

        columns = [[getattr(example, part) for example in self._waiting] for part in self._parts]
        columns += [[_written(example.row) for example in self._waiting]]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        if self._waiting:
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._waiting = []


class ExampleTable:
    """The examples of a file that a `Writer` completed.

    Raises:
        OSError, ValueError: the file is not there, or not whole.
    """

    def __init__(self, path: Path, kind: type[Example]) -> None:
        from pyarrow import ipc, memory_map

        self._parts = _parts(kind)
        self._example: Callable[..., Example] = kind
        reader = ipc.open_file(memory_map(str(path)))
        self._batches: list[pa.RecordBatch] = [reader.get_batch(number) for number in range(reader.num_record_batches)]

    def __getitem__(self, place: int) -> Example:
        number, at = divmod(place, _AT_ONCE)
        *parts, row = self._batches[number].columns
        ids = [part[at].values.to_numpy().tolist() for part in parts]
        return self._example(*ids, _read(row[at].as_py()))

    def token_counts(self, places: np.ndarray) -> TokenCounts:
        """Tokens of each part of the examples in those places; the tokens themselves are not read."""
        import numpy as np

        found = TokenCounts()
        for part in self._parts:
            of_batches = [batch.column(part).value_lengths().to_numpy() for batch in self._batches]
            counts = array("i")
            counts.frombytes(np.concatenate(of_batches)[places].astype(np.intc).tobytes())
            found[part.removesuffix("_ids")] = counts
        return found


class StoredExamples(Sequence[Example]):
    """The examples of a table in some places, in their order; each is made when it is asked for."""

    def __init__(self, table: ExampleTable, places: np.ndarray) -> None:
        self._table, self._places = table, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> Example: ...

    @overload
    def __getitem__(self, at: slice) -> StoredExamples: ...

    def __getitem__(self, at: int | slice) -> Example | StoredExamples:
        if isinstance(at, slice):
            return StoredExamples(self._table, self._places[at])
        return self._table[int(self._places[at])]

    def token_counts(self) -> TokenCounts:
        """Of each part, the tokens that each example has of it, in their order."""
        return self._table.token_counts(self._places)


def _parts(kind: type[Example]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != _ROW]


def _schema(kind: type[Example]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([*((part, pa.list_(pa.int32())) for part in _parts(kind)), (_ROW, pa.large_binary())])


def _written(row: Row) -> bytes:
    turns = [(message.role, message.content) for message in row.prompt]
    record = json.dumps(row.record, default=_refuse)
    if repr(json.loads(record)) != repr(row.record):
        raise UnstorableRowError("a row has columns that JSON would change")
    values = [turns, row.text, row.response, row.chosen, row.rejected, row.source, row.undecided, row.margin]
    return json.dumps([*values, row.record], ensure_ascii=False).encode("utf-8", "surrogatepass")


def _read(written: bytes) -> Row:
    turns, *values = json.loads(written)
    return Row(tuple(Message(role, content) for role, content in turns), *values)


def _refuse(value: Any) -> None:
    raise UnstorableRowError(f"a row has a column that holds a {type(value).__name__}")
