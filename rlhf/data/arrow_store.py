"""Store examples in an Arrow file and read them memory-mapped, one at a time.

`ExampleWriter` writes examples in record batches of a thousand. `ExampleTable` reads them by index, `StoredExamples` is
a sequence of some of them. All processes of a machine share the pages of a file; no process holds its tokens.
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

_BATCH = 1000  # examples in a record batch; the last one may have fewer
_ROW = "row"


class UnstorableRowError(Exception):
    """A row has a value that this format does not restore exactly; the message names it."""


class ExampleWriter:
    """Writes a file of examples of one type, in the order of `add`; `close` completes it.

    Raises:
        OSError: the file cannot be written.
        UnstorableRowError: a row's record has values other than text, numbers, lists and objects.
    """

    def __init__(self, path: Path, example_type: type[Example]) -> None:
        from pyarrow import OSFile, ipc

        self._parts, self._schema = _part_names(example_type), _schema(example_type)
        self._file = OSFile(str(path), "wb")
        self._writer = ipc.new_file(self._file, self._schema)
        self._buffer: list[Example] = []

    def add(self, example: Example) -> None:
        """Add an example; every thousand are written to the file."""
        self._buffer.append(example)
        if len(self._buffer) == _BATCH:
            self._flush()

    def close(self) -> None:
        """Write the remaining examples and the end of the file."""
        self._flush()
        self._writer.close()
        self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa

        columns = [[getattr(example, part) for example in self._buffer] for part in self._parts]
        columns += [[_serialize_row(example.row) for example in self._buffer]]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        if self._buffer:
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._buffer = []


class ExampleTable:
    """Reads the examples of a file that an `ExampleWriter` completed.

    Raises:
        OSError, ValueError: the file does not exist, or is incomplete.
    """

    def __init__(self, path: Path, example_type: type[Example]) -> None:
        from pyarrow import ipc, memory_map

        self._parts = _part_names(example_type)
        self._make_example: Callable[..., Example] = example_type
        reader = ipc.open_file(memory_map(str(path)))
        self._batches: list[pa.RecordBatch] = [reader.get_batch(number) for number in range(reader.num_record_batches)]

    def __getitem__(self, index: int) -> Example:
        batch, offset = divmod(index, _BATCH)
        *parts, row = self._batches[batch].columns
        ids = [part[offset].values.to_numpy().tolist() for part in parts]
        return self._make_example(*ids, _deserialize_row(row[offset].as_py()))

    def token_counts(self, indices: np.ndarray) -> TokenCounts:
        """Return the number of tokens of each part of the examples at `indices`, without reading the tokens."""
        import numpy as np

        counts = TokenCounts()
        for part in self._parts:
            batch_lengths = [batch.column(part).value_lengths().to_numpy() for batch in self._batches]
            lengths = array("i")
            lengths.frombytes(np.concatenate(batch_lengths)[indices].astype(np.intc).tobytes())
            counts[part.removesuffix("_ids")] = lengths
        return counts


class StoredExamples(Sequence[Example]):
    """The examples of a table at some indices, in that order; each is created when it is accessed."""

    def __init__(self, table: ExampleTable, indices: np.ndarray) -> None:
        self._table, self._indices = table, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> StoredExamples: ...

    def __getitem__(self, index: int | slice) -> Example | StoredExamples:
        if isinstance(index, slice):
            return StoredExamples(self._table, self._indices[index])
        return self._table[int(self._indices[index])]

    def token_counts(self) -> TokenCounts:
        """Return the number of tokens of each part, in the order of the examples."""
        return self._table.token_counts(self._indices)


def _part_names(example_type: type[Example]) -> list[str]:
    return [field.name for field in fields(example_type) if field.name != _ROW]


def _schema(example_type: type[Example]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([*((part, pa.list_(pa.int32())) for part in _part_names(example_type)), (_ROW, pa.large_binary())])


def _serialize_row(row: Row) -> bytes:
    turns = [(message.role, message.content) for message in row.prompt]
    record = json.dumps(row.record, default=_reject_value)
    if repr(json.loads(record)) != repr(row.record):
        raise UnstorableRowError("a row has columns that JSON would change")
    values = [turns, row.text, row.response, row.chosen, row.rejected, row.source, row.undecided, row.margin]
    return json.dumps([*values, row.record], ensure_ascii=False).encode("utf-8", "surrogatepass")


def _deserialize_row(serialized: bytes) -> Row:
    turns, *values = json.loads(serialized)
    return Row(tuple(Message(role, content) for role, content in turns), *values)


def _reject_value(value: Any) -> None:
    raise UnstorableRowError(f"a row has a column with a {type(value).__name__}")
