"""Reading: the name of a source goes in, its records and where each of them stands come out.

A source is a file (JSON, JSONL, CSV, Parquet), a `save_to_disk` folder, a hub name or the embedded world.
Only a hub name may reach for the network.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.paths import WORLD, is_path, missing_path_hint
from rlhf.data import toy_world
from rlhf.data.report import NOT_AN_OBJECT, NOT_JSON, OTHER_FIELDS
from rlhf.errors import DataError
from rlhf.models import hub

_LONGEST_FIELD = 2**31 - 1  # of a CSV file, in characters; the module's own limit is 131,072
_AT_ONCE = 2**20  # bytes
_CONVERSION = "refs/convert/parquet"
_SCRIPT = "Dataset scripts are no longer supported"  # what datasets says
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs"}

# What datasets says of a hub data set that is there and whose part is not: in words alone.
_PARTS = {
    "split": re.compile(r"(?:Unknown|Bad) split.*?(\[.*\])", re.DOTALL),
    "subset": re.compile(
        r"(?:Config name is missing|BuilderConfig .* not found|Available configs).*?(\[.*?\])", re.DOTALL
    ),
}


@dataclass(frozen=True)
class SourceRecord:
    """One record of a source; `values` is None where it cannot be read (a broken line of JSONL, say): `fault`."""

    values: dict[str, Any] | None
    source: str
    fault: str = ""

    @classmethod
    def of(cls, value: Any, source: str) -> SourceRecord:
        """The record of a value that may be no object."""
        return cls(value, source) if isinstance(value, dict) else cls(None, source, NOT_AN_OBJECT)


def read_records(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> list[SourceRecord]:
    """The records of a source, in its order.

    Args:
        split, subset, revision: of a source that has several; only hub data sets have the latter two.
        limit: no more than so many records, drawn from all of them: a source may be sorted. Default: all.
        seed: decides which are drawn, and the rows of the embedded world.

    Raises:
        DataError: the source does not exist, cannot be reached, or cannot be read as a whole.
    """
    check_source_exists(source)
    path = Path(source)
    for key, value in (("subset", subset), ("revision", revision)):
        if value is not None and (source == WORLD or path.exists()):
            raise DataError(f"{source}: has no {key}s, hub data sets have; leave {key} {value!r} out")

    if source == WORLD:
        values, name = list(toy_world.generate_records(seed)), f"{WORLD}:"
    elif path.is_dir():
        values, name = _saved_folder(path, split), f"{path.name}, row "
    elif path.suffix in _READERS:
        return [record for _, record in _drawn(_file(path), limit, seed)]
    elif path.is_file():
        raise DataError(f"{source}: unknown kind of file; use one of {', '.join(_READERS)}")
    else:
        values, name = _hub(source, subset, split, revision), f"{source}, row "
    return [SourceRecord.of(value, f"{name}{place + 1}") for place, value in _drawn(values, limit, seed)]


def _drawn(values: Any, limit: int | None, seed: int) -> Iterable[tuple[int, Any]]:
    """The values that are read, each with its place among all; those of a table alone that are drawn are made."""
    if limit is None or limit >= len(values):
        return enumerate(values)
    places = sorted(random.Random(f"limit {seed}").sample(range(len(values)), limit))
    return zip(
        places, values.select(places) if hasattr(values, "select") else (values[at] for at in places), strict=True
    )


def check_source_exists(source: str, key: str = "data.datasets") -> None:
    """Raise `DataError` where a file or folder is not there; hub names pass. Opens nothing."""
    if is_path(source) and not Path(source).exists():
        raise DataError(f"{source}: no such file or folder; check {key}{missing_path_hint(source)}")


def has_splits(source: str) -> bool:
    """Whether a source may have splits, of which one is read: a file and the embedded world have none."""
    path = Path(source)
    return source != WORLD and (path.suffix not in _READERS or path.is_dir())


def _numbered(values: Iterable[Any], name: Callable[[int], str]) -> list[SourceRecord]:
    return [SourceRecord.of(value, name(number)) for number, value in enumerate(values, start=1)]


def hash_source(source: str, *, split: str = "train", subset: str | None = None, revision: str | None = None) -> str:
    """A digest of what a source holds, which reads its bytes and makes no record of them.

    That of a hub data set is the library's own, of the files that it was made from. The embedded world has none: it is
    made by a seed.

    Raises:
        DataError: the source does not exist, or cannot be reached or read.
    """
    check_source_exists(source)
    path = Path(source)
    if source == WORLD:
        return ""
    if not path.exists():
        return str(_hub(source, subset, split, revision)._fingerprint)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with _readable(file), file.open("rb") as stream:
                digest.update(f"{file.relative_to(path)}\n".encode())
                while some := stream.read(_AT_ONCE):
                    digest.update(some)
    return digest.hexdigest()


def _file(path: Path) -> list[SourceRecord]:
    with _readable(path):
        return list(_READERS[path.suffix](path))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check data.datasets") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({_first_line(error)})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a UTF-8 text file; save it as UTF-8") from error


def _jsonl(path: Path) -> Iterator[SourceRecord]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield SourceRecord.of(json.loads(line), f"{path.name}:{number}")
                except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, lists without end
                    yield SourceRecord(None, f"{path.name}:{number}", NOT_JSON)


def _json(path: Path) -> list[SourceRecord]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not readable as JSON ({error.msg}); is it JSONL?") from error
    except RecursionError as error:
        raise DataError(f"{path}: not readable as JSON (nested too deeply)") from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise DataError(f'{path}: expected a list of objects, or {{"data": [...]}}')
    return _numbered(rows, lambda number: f"{path.name}, row {number}")


def _csv(path: Path) -> Iterator[SourceRecord]:
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig") as lines:  # a line break in a field is the same one on every system
        reader = csv.DictReader(lines)
        try:
            header = reader.fieldnames or ()
            for delimiter, name in _OTHER_DELIMITERS.items():
                if len(header) == 1 and delimiter in header[0]:
                    raise DataError(f"{path}: its fields are separated by {name}, not by commas; save it with commas")
            if twice := [name for name, times in Counter(header).items() if times > 1]:
                raise DataError(f"{path}: several columns are named {twice[0]!r}; rename all but one")
            end = 1 if header else 0
            for values in reader:
                whole = None not in values and None not in values.values()
                yield SourceRecord(
                    dict(values) if whole else None, f"{path.name}:{end + 1}", "" if whole else OTHER_FIELDS
                )
                end = reader.line_num  # a quoted field may span lines, and a row is named by its first
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not readable as CSV ({error})") from error


def _parquet(path: Path) -> list[SourceRecord]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        rows = read_table(path).to_pylist()
    except ArrowException as error:
        raise DataError(f"{path}: not readable as Parquet ({_first_line(error)}); is it whole?") from error
    return _numbered(rows, lambda number: f"{path.name}, row {number}")


_READERS: dict[str, Callable[[Path], Iterable[SourceRecord]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _saved_folder(path: Path, split: str) -> Any:
    if not ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
        raise DataError(f"{path}: not a folder that datasets.save_to_disk wrote; name a file, or save it with that")
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except Exception as error:  # the reader's errors have no common base
        raise DataError(f"{path}: cannot be read as a saved data set ({_first_line(error)})") from error
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise DataError(f"{path}: no split {split!r}; found: {', '.join(dataset)}; {_set('split')}")
        return dataset[split]
    return dataset


def _hub(name: str, subset: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset

    hub.check_available(name, "dataset")
    # In the hub's own conversion of a data set, subsets are folders.
    converted = {"data_dir": subset} if revision == _CONVERSION and subset else {}
    try:
        return load_dataset(name, None if converted else subset, split=split, revision=revision, **converted)
    except Exception as error:  # network, hub and reader errors have no common base
        if known := _known(error):
            key, listed = known
            wrong = f"no split {split!r}" if key == "split" else f"no subset {subset!r}" if subset else "has subsets"
            raise DataError(f"{name}: {wrong}; found: {listed}; {_set(key)}") from error
        if _SCRIPT in str(error):
            raise DataError(
                f"{name}: comes with a loading script, which is not run; set `revision` to {_CONVERSION}, the hub's "
                "own conversion of it"
            ) from error
        if revision and "revision" in str(error).lower():
            raise DataError(f"{name}: no revision {revision!r}; {_set('revision')}") from error
        raise DataError(
            f"{name}: not loaded from the hub ({_first_line(error)}); check the network, or name a local copy"
        ) from error


def _set(key: str) -> str:
    return f"set `{key}`, or `heldout_{key}` where it is the held-out source"


def _known(error: Exception) -> tuple[str, str] | None:
    """("split" or "subset", those that there are) where a hub data set is there and its part is not."""
    for key, words in _PARTS.items():
        if isinstance(error, ValueError) and (found := words.search(str(error))):
            return key, ", ".join(re.findall(r"'([^']+)'", found[1]))
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
