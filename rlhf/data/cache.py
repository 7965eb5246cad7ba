"""Cache the examples of a stage, tokenized once, in a folder named by a digest of their inputs.

One process of a machine builds the folder (`StageCache.build`), all processes open it (`StageCache.load`); it appears
complete or not at all, and a damaged one is rebuilt. The examples are in an Arrow file, which is memory-mapped: all
processes share its pages, and no process holds its tokens. The folder is next to the data sets that the `datasets`
package caches (HF_DATASETS_CACHE, or HF_HOME), and may be deleted while no run uses it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from rlhf.config.schema import Config, DataConfig, Stage
from rlhf.data.examples import EXAMPLE_TYPES, Example, TokenCounts, list_parts
from rlhf.data.load_sources import list_stage_sources, read_sources
from rlhf.data.records import Message, Row
from rlhf.data.report import DataReport
from rlhf.data.stage_dataset import StageData, select_examples
from rlhf.errors import DataError
from rlhf.models.hub import find_datasets_cache
from rlhf.reporting.console import console
from rlhf.utils.atomic_io import atomic_directory
from rlhf.utils.manifest import hash_file, hash_json

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

_EXAMPLES, _TRAIN, _HELDOUT, _STAGE = "examples.arrow", "train.npy", "heldout.npy", "stage.json"
_LIBRARIES = ("transformers", "tokenizers", "jinja2")  # their versions may change the tokens
_ROW = "row"
_BATCH = 1000  # examples in a record batch; the last one may have fewer

_Column = tuple["memoryview[int]", "memoryview[int]"]
"""(Where each item begins in the values, and where the last one ends; the values)."""


class UnstorableRowError(Exception):
    """A row has a value that the cache would not restore exactly; the message names it."""


@dataclass(frozen=True)
class StageCache:
    """The cached examples of a stage: the result of `load_stage` with these arguments.

    If `records` is true, each row has its record, for reward functions.
    """

    config: DataConfig
    stage: Stage
    tokenizer: PreTrainedTokenizerBase
    seed: int
    end_ids: Sequence[int]
    records: bool = False

    @classmethod
    def of(cls, config: Config, stage: Stage, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> StageCache:
        """Return the cache of a stage of a run."""
        needs_records = stage == "ppo" and bool(config.ppo.reward_functions)
        return cls(config.data, stage, tokenizer, config.data_seed, end_ids, records=needs_records)

    @cached_property
    def key(self) -> str:
        """A digest of all inputs of the examples; the sources are read as bytes.

        Raises:
            DataError: a source cannot be read, or the stage has none.
        """
        inputs = {
            "code": _code_version(),
            "settings": self.config.model_dump(mode="json", exclude={"pretraining", "seed"}),
            "sources": [source.content() for source in list_stage_sources(self.config, self.stage)],
            "stage": self.stage,
            "seed": self.seed,
            "tokenizer": _hash_tokenizer(self.tokenizer),
            "end_ids": list(self.end_ids),
            "records": self.records,
        }
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]

    @cached_property
    def folder(self) -> Path:
        """The folder of the examples, which may not exist yet."""
        return find_datasets_cache().expanduser() / "rlhf" / f"{self.stage}-{self.key}"

    def find(self) -> StageData | None:
        """Return the examples if they are cached and complete, else None.

        Raises:
            DataError: as `key`.
        """
        return self.load() if self._is_complete() else None

    def build(self, *, show: bool = False) -> str | None:
        """Write the examples, unless they are cached already; wait for another process that is building the same.

        Returns:
            The reason why they cannot be cached (the folder cannot be written, or rows have values that it cannot
            store), or None.

        Raises:
            DataError: as `load_stage`.
        """
        waiting = f"{self.stage}: waiting for another run that tokenizes the same rows" if show else ""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock_build(self.folder, waiting):
                if not self._is_complete():
                    with atomic_directory(self.folder) as folder:
                        self._write(folder, show)
        except OSError as error:
            if self._is_complete():  # in a shared cache that this process may only read
                return None
            reason = error.strerror or error
            return f"{self.folder.parent} cannot be written ({reason}); set HF_DATASETS_CACHE to another folder"
        except UnstorableRowError as error:
            return str(error)
        return None

    def load(self) -> StageData:
        """Open the examples in the folder, which `build` has completed; each is read when it is accessed."""
        import numpy as np

        metadata = json.loads((self.folder / _STAGE).read_text(encoding="utf-8"))["metadata"]
        examples = StoredExamples.open(self.folder / _EXAMPLES, EXAMPLE_TYPES[self.stage])
        train, heldout = (
            examples.select(np.load(self.folder / name, mmap_mode="r", allow_pickle=False))
            for name in (_TRAIN, _HELDOUT)
        )
        names = (source.absolute_name() for source in list_stage_sources(self.config, self.stage))
        return StageData(
            train,
            heldout,
            [_restore_report(values, examples) for values in metadata["reports"]],
            metadata["prompt_format"],
            tuple(metadata["end_ids"]),
            dict(zip(names, metadata["fingerprints"], strict=True)),
        )

    def _write(self, folder: Path, show: bool) -> None:
        import numpy as np

        config, stage = self.config, self.stage
        sources = read_sources(config, [stage], seed=self.seed, show=show, records=self.records)
        writer = ExampleWriter(folder / _EXAMPLES, EXAMPLE_TYPES[stage])
        options: dict[str, Any] = {"seed": self.seed, "end_ids": self.end_ids, "sources": sources}
        selection = select_examples(config, stage, self.tokenizer, writer.add, **options)
        writer.close()
        for name, numbers in ((_TRAIN, selection.train), (_HELDOUT, selection.heldout)):
            np.save(folder / name, np.array(numbers, np.int64))
        metadata = {
            "reports": [vars(report) for report in selection.reports],
            "prompt_format": selection.prompt_format,
            "end_ids": selection.end_ids,
            "fingerprints": [sources[source].fingerprint() for source in list_stage_sources(config, stage)],
        }
        digests = {name: hash_file(folder / name) for name in (_EXAMPLES, _TRAIN, _HELDOUT)}
        if replace(self).key != self.key:
            raise DataError(f"{stage}: a source of data.datasets changed while it was read; run the command again")
        content = {"metadata": metadata, "files": digests, "digest": hash_json(metadata)}
        (folder / _STAGE).write_text(json.dumps(content), encoding="utf-8")

    def _is_complete(self) -> bool:
        """Return True if every byte is as it was written."""
        try:
            content = json.loads((self.folder / _STAGE).read_text(encoding="utf-8"))
            if content["digest"] != hash_json(content["metadata"]):
                return False
            return all(hash_file(self.folder / name) == digest for name, digest in content["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False


class ExampleWriter:
    """Writes an Arrow file of examples of one type, in the order of `add`; `close` completes it.

    Raises:
        OSError: the file cannot be written.
        UnstorableRowError: a row's record has values other than text, numbers, lists and objects.
    """

    def __init__(self, path: Path, example_type: type[Example]) -> None:
        import pyarrow as pa

        columns = {f"{part}_ids": pa.large_list(pa.int32()) for part in list_parts(example_type)}
        self._schema = pa.schema(columns | {_ROW: pa.large_binary()})
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
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

        columns = [
            _build_column([array("i", getattr(example, name)).tobytes() for example in self._buffer], pa.int32())
            for name in self._schema.names[:-1]
        ]
        columns += [_build_column([_serialize_row(example.row) for example in self._buffer])]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._buffer = []


class StoredExamples(Sequence[Example]):
    """The stored examples at some indices, in that order; each is created when it is accessed.

    Args:
        batches: the columns of each record batch, the row last.
        example_type: the class of the examples.
        indices: the indices of the examples in the file.
    """

    def __init__(
        self, batches: list[list[_Column]], example_type: type[Example], indices: Sequence[int] | np.ndarray
    ) -> None:
        self._batches, self._example_type, self._indices = batches, example_type, indices

    @classmethod
    def open(cls, path: Path, example_type: type[Example]) -> StoredExamples:
        """Return all examples of a file that an `ExampleWriter` completed, memory-mapped."""
        import pyarrow as pa

        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        rows = sum(batch.num_rows for batch in batches)
        return cls([[_view_column(column) for column in batch.columns] for batch in batches], example_type, range(rows))

    def select(self, indices: Sequence[int] | np.ndarray) -> StoredExamples:
        """Return the stored examples at `indices`."""
        return StoredExamples(self._batches, self._example_type, indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.select(self._indices[index])
        batch, offset = divmod(int(self._indices[index]), _BATCH)
        *parts, row = (values[offsets[offset] : offsets[offset + 1]] for offsets, values in self._batches[batch])
        make_example: Callable[..., Example] = self._example_type
        return make_example(*(ids.tolist() for ids in parts), _deserialize_row(row))

    def token_counts(self) -> TokenCounts:
        """Return the number of tokens of each part, in the order of the examples, without reading the tokens."""
        import numpy as np

        *parts, _ = zip(*self._batches, strict=True)
        lengths = [np.concatenate([np.diff(offsets) for offsets, _ in columns])[self._indices] for columns in parts]
        names = list_parts(self._example_type)
        return {name: array("i", counts.astype(np.intc).tobytes()) for name, counts in zip(names, lengths, strict=True)}


def _build_column(items: list[bytes], kind: pa.DataType | None = None) -> pa.Array:
    """Return an Arrow array of bytes, or of lists of a fixed-size type, without `pa.array`, which imports pandas."""
    import pyarrow as pa

    values = pa.py_buffer(b"".join(items))
    offsets = array("q", accumulate(map(len, items), initial=0))
    if kind is None:
        return pa.Array.from_buffers(pa.large_binary(), len(items), [None, pa.py_buffer(offsets), values])
    offsets = array("q", (offset // kind.byte_width for offset in offsets))
    children = [pa.Array.from_buffers(kind, offsets[-1], [None, values])]
    return pa.Array.from_buffers(pa.large_list(kind), len(items), [None, pa.py_buffer(offsets)], children=children)


def _view_column(column: pa.Array) -> _Column:
    """Return the buffers of a column, without `to_numpy`, which imports pandas."""
    import pyarrow as pa

    offsets, values = (memoryview(buffer) for buffer in column.buffers() if buffer is not None)
    return offsets.cast("q")[: len(column) + 1], values.cast("B" if column.type == pa.large_binary() else "i")


def _serialize_row(row: Row) -> bytes:
    turns = [(message.role, message.content) for message in row.prompt]
    record = json.dumps(row.record, default=_reject_value)
    if repr(json.loads(record)) != repr(row.record):
        raise UnstorableRowError("a row has columns that JSON would change")
    values = [turns, row.text, row.response, row.chosen, row.rejected, row.source, row.undecided, row.margin]
    return json.dumps([*values, row.record, row.template], ensure_ascii=False).encode("utf-8", "surrogatepass")


def _deserialize_row(serialized: memoryview[int]) -> Row:
    turns, *values = json.loads(str(serialized, "utf-8", "surrogatepass"))
    return Row(tuple(Message(*turn) for turn in turns), *values)


def _reject_value(value: Any) -> None:
    raise UnstorableRowError(f"a row has a column with a {type(value).__name__}")


def _lock_build(folder: Path, waiting: str) -> AbstractContextManager[Any]:
    """Run a block in one process at a time; another says that it waits. The lock ends with its process."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        if waiting:
            console.print(waiting, markup=False)
        return lock.acquire()


@cache
def _code_version() -> list[str]:
    """Return the libraries' versions and a digest of this package, because other code may make other examples."""
    package = Path(__file__).parent
    files = sorted(path for path in package.iterdir() if path.suffix in (".py", ".yaml"))
    digest = hashlib.sha256(b"\n".join(path.read_bytes() for path in files)).hexdigest()
    return [digest, *(f"{name} {version(name)}" for name in _LIBRARIES)]


def _hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the files of a saved tokenizer, chat template included."""
    try:
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            return hash_json([(path.name, hash_file(path)) for path in files])
    except OSError as error:
        raise DataError(
            f"the tokenizer cannot be written to a temporary folder ({error}); set TMPDIR to a folder with free space"
        ) from error


def _restore_report(values: dict[str, Any], examples: StoredExamples) -> DataReport:
    """Return a report from its JSON, which has lists for tuples."""
    tuples = {
        name: {key: tuple(items) for key, items in values[name].items()} for name in ("tokens", "dropped", "lengths")
    }
    return DataReport(**values | tuples | {"example": examples[values["example"]]})
