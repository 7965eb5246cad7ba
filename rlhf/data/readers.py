"""Read the records of a source, each with its place in the source.

A source is a file (JSON, JSONL, CSV, Parquet), a folder of them, a `save_to_disk` folder, a hub name or the embedded
world.
Only hub names use the network.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.paths import WORLD, is_path, missing_path_hint
from rlhf.data import toy_world
from rlhf.data.report import NOT_AN_OBJECT, NOT_JSON, OTHER_FIELDS
from rlhf.data.spool import Selection, Spool
from rlhf.errors import DataError
from rlhf.models import hub
from rlhf.utils.manifest import hash_file

_MAX_CSV_FIELD = 2**31 - 1  # characters; the default of the csv module is 131,072
_PARQUET_REVISION = "refs/convert/parquet"
_SCRIPT_ERROR = "Dataset scripts are no longer supported"  # message of datasets
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs"}

# Messages of datasets if a hub data set exists and its split or subset does not; it has no error types for these.
_PART_ERRORS = {
    "split": re.compile(r"(?:Unknown|Bad) split.*?(\[.*\])", re.DOTALL),
    "subset": re.compile(
        r"(?:Config name is missing|BuilderConfig .* not found|Available configs).*?(\[.*?\])", re.DOTALL
    ),
}


@dataclass(frozen=True)
class SourceRecord:
    """One record of a source; if it cannot be read, `values` is None and `fault` is the reason."""

    values: dict[str, Any] | None
    source: str
    fault: str = ""

    @classmethod
    def from_value(cls, value: Any, source: str) -> SourceRecord:
        """Return the record of a value, which may not be an object."""
        return cls(value, source) if isinstance(value, dict) else cls(None, source, NOT_AN_OBJECT)


def read_records(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Sequence[SourceRecord]:
    """Return the records of a source, in its order; they are on disk, and each is created when it is accessed.

    Args:
        source: a path, a hub name or `world`.
        split: part of a source that has several.
        subset: configuration of a hub data set.
        revision: branch, tag or commit of a hub data set.
        limit: maximum number of records, sampled from all of them, because a source may be sorted; None: all.
        seed: selects the sample, and the rows of the embedded world.

    Raises:
        DataError: the source does not exist, cannot be reached, or cannot be read as a whole.
    """
    check_source_exists(source)
    path = Path(source)
    has_subsets = path.is_dir() and not _is_saved(path)
    for key, value in (("subset", None if has_subsets else subset), ("revision", revision)):
        if value is not None and (source == WORLD or path.exists()):
            raise DataError(f"{source}: has no {key}s, got {key} {value!r}; remove it")

    if source == WORLD:
        values, prefix = list(toy_world.generate_records(seed)), f"{WORLD}:"
    elif path.is_dir():
        values = _load_data_files(path, subset, split) if has_subsets else _load_saved_folder(path, split)
        prefix = f"{path.name}, row "
    elif path.suffix in _READERS:
        with _translate_errors(path):
            records = _spool(_READERS[path.suffix](path))
        return Selection(records, _sample(len(records), limit, seed))
    elif path.is_file():
        raise DataError(f"{source}: unknown kind of file; use one of {', '.join(_READERS)}")
    else:
        values, prefix = _load_from_hub(source, subset, split, revision), f"{source}, row "
    try:
        indices = _sample(len(values), limit, seed)
        sampled = values.select(indices) if hasattr(values, "select") else Selection(values, indices)
        numbered = zip(indices, sampled, strict=True)
        return _spool(SourceRecord.from_value(value, f"{prefix}{index + 1}") for index, value in numbered)
    except (OSError, ValueError, SystemError) as error:  # of pyarrow, for a damaged file that could be opened
        raise DataError(f"{source}: cannot be read as a whole ({_first_line(error)}); copy it here again") from error


def _sample(count: int, limit: int | None, seed: int) -> Sequence[int]:
    """Return the indices of the records to read, of `count`."""
    if limit is None or limit >= count:
        return range(count)
    return sorted(random.Random(f"limit {seed}").sample(range(count), limit))


def _spool(records: Iterable[SourceRecord]) -> Spool[SourceRecord]:
    spool: Spool[SourceRecord] = Spool()
    for record in records:
        try:
            spool.append(record)
        except RecursionError:  # JSON may be nested more deeply than pickles
            spool.append(SourceRecord(None, record.source, NOT_JSON))
    return spool


def check_source_exists(source: str, key: str = "data.datasets") -> None:
    """Raise `DataError` if a file or folder does not exist; hub names pass. Nothing is opened."""
    if is_path(source) and not Path(source).exists():
        raise DataError(f"{source}: no such file or folder; check {key}{missing_path_hint(source)}")
    _refuse_special_file(Path(source))


def _refuse_special_file(path: Path) -> None:
    """Raise `DataError` for a pipe or a device, which is read once, or never ends."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: is a pipe or a device, and sources are read more than once; save its rows to a file")


def has_splits(source: str) -> bool:
    """Return True if a source may have splits; files, a single saved data set and the embedded world have none."""
    path = Path(source)
    is_one = path.suffix in _READERS and not path.is_dir()
    return source != WORLD and not is_one and not (path / "state.json").is_file()


def hash_source(source: str, *, split: str = "train", subset: str | None = None, revision: str | None = None) -> str:
    """Return a digest of a source's content, without parsing its records.

    For a hub data set this is the library's fingerprint, which covers the files. The embedded world has an empty
    digest: its seed determines it.

    Raises:
        DataError: the source does not exist, or cannot be reached or read.
    """
    check_source_exists(source)
    path = Path(source)
    if source == WORLD:
        return ""
    if not path.exists():
        return str(_load_from_hub(source, subset, split, revision)._fingerprint)
    digest = hashlib.sha256()
    for name, content in [(".", _hash(path))] if path.is_file() else _hash_folder(path):
        digest.update(f"{name}\n{content}\n".encode())
    return digest.hexdigest()


def _hash_folder(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 of each file below a folder, also in folders that links lead to, as readers do.

    If a folder was met before under another name, that name stands for its files, so links in a circle end.
    """
    names: dict[str, str] = {}
    for folder, below, files in os.walk(path, followlinks=True):
        name = os.path.relpath(folder, path)
        first = names.setdefault(os.path.realpath(folder), name)
        if first != name:
            below.clear()
            yield name, first
            continue
        below[:] = sorted(name for name in below if not name.startswith("."))  # readers skip .git and .cache
        for file in sorted(file for file in files if not file.startswith(".")):
            _refuse_special_file(place := Path(folder, file))
            if place.is_file():  # no link without an end
                yield str(place.relative_to(path)), _hash(place)


def _hash(file: Path) -> str:
    with _translate_errors(file):
        return hash_file(file)


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Raise `DataError` for the errors of reading a file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check data.datasets") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({_first_line(error)})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a UTF-8 text file; save it as UTF-8") from error


def _number_rows(values: Iterable[Any], path: Path) -> Iterator[SourceRecord]:
    return (SourceRecord.from_value(value, f"{path.name}, row {number}") for number, value in enumerate(values, 1))


def _read_jsonl(path: Path) -> Iterator[SourceRecord]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield SourceRecord.from_value(json.loads(line), f"{path.name}:{number}")
                except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, endless nesting
                    yield SourceRecord(None, f"{path.name}:{number}", NOT_JSON)


def _read_json(path: Path) -> Iterable[SourceRecord]:
    """Read a list of objects, or an object per line, as in the `json` files of `datasets`."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if _is_object(text.lstrip().partition("\n")[0]):
            return _read_jsonl(path)
        raise DataError(
            f"{path}:{error.lineno}: not readable as JSON ({error.msg}); check that the file is complete"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or endless nesting
        reason = "nested too deeply" if isinstance(error, RecursionError) else _first_line(error)
        raise DataError(f"{path}: not readable as JSON ({reason})") from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise DataError(f'{path}: expected a list of objects, or {{"data": [...]}}')
    return _number_rows(rows, path)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_csv(path: Path) -> Iterator[SourceRecord]:
    csv.field_size_limit(_MAX_CSV_FIELD)
    with path.open(encoding="utf-8-sig") as lines:  # text mode: line breaks in a field are alike on every system
        reader = csv.DictReader(lines)
        try:
            header = reader.fieldnames or ()
            for delimiter, name in _OTHER_DELIMITERS.items():
                if len(header) == 1 and delimiter in header[0]:
                    raise DataError(f"{path}: its fields are separated by {name}, not by commas; save it with commas")
            if duplicates := [name for name, count in Counter(header).items() if count > 1]:
                raise DataError(f"{path}: several columns are named {duplicates[0]!r}; rename all but one")
            end = 1 if header else 0
            for values in reader:
                is_complete = None not in values and None not in values.values()
                source = f"{path.name}:{end + 1}"
                yield SourceRecord(dict(values), source) if is_complete else SourceRecord(None, source, OTHER_FIELDS)
                end = reader.line_num  # a quoted field may span lines, and a row is named by its first line
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not readable as CSV ({error})") from error


def _read_parquet(path: Path) -> Iterator[SourceRecord]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        rows = read_table(path).to_pylist()
    except ArrowException as error:
        raise DataError(
            f"{path}: not readable as Parquet ({_first_line(error)}); check that the file is complete"
        ) from error
    return _number_rows(rows, path)


_READERS: dict[str, Callable[[Path], Iterable[SourceRecord]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _is_saved(path: Path) -> bool:
    """Return True if `datasets.save_to_disk` wrote a folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _load_data_files(path: Path, subset: str | None, split: str) -> Any:
    """Read a folder of data files, such as a downloaded data set; their names, or its README, give the splits."""
    from datasets import load_dataset

    try:
        return load_dataset(str(path.absolute()), subset, split=split)
    except Exception as error:  # the reader's errors have no common base
        if missing_part := _find_missing_part(error):
            raise _missing_part_error(str(path), subset, split, *missing_part) from error
        reason = _first_line(error.__cause__ or error)
        raise DataError(
            f"{path}: cannot be read as a data set ({reason}); name a file, a folder of .parquet, .jsonl, .json or "
            ".csv files, or one that datasets.save_to_disk wrote"
        ) from error


def _load_saved_folder(path: Path, split: str) -> Any:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except Exception as error:  # the reader's errors have no common base
        raise DataError(f"{path}: cannot be read as a saved data set ({_first_line(error)})") from error
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise DataError(f"{path}: no split {split!r}; found: {', '.join(dataset)}; {_advise_key('split')}")
        dataset = dataset[split]
    try:
        dataset.data.table.validate(full=True)  # a changed offset would end this process by a signal
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a whole ({_first_line(error)}); copy it here again") from error
    return dataset


def _load_from_hub(name: str, subset: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset

    hub.check_available(name, "dataset")
    # In the hub's conversion of a data set to Parquet, subsets are folders.
    options = {"data_dir": subset} if revision == _PARQUET_REVISION and subset else {}
    try:
        return load_dataset(name, None if options else subset, split=split, revision=revision, **options)
    except Exception as error:  # network, hub and reader errors have no common base
        if missing_part := _find_missing_part(error):
            raise _missing_part_error(name, subset, split, *missing_part) from error
        if _SCRIPT_ERROR in str(error):
            raise DataError(
                f"{name}: needs a loading script, which rlhf does not run; set `revision` to {_PARQUET_REVISION}, the "
                "hub's conversion of it"
            ) from error
        if revision and "revision" in str(error).lower():
            raise DataError(f"{name}: no revision {revision!r}; {_advise_key('revision')}") from error
        raise DataError(
            f"{name}: not loaded from the hub ({_first_line(error)}); check the network, or name a local copy"
        ) from error


def _missing_part_error(name: str, subset: str | None, split: str, key: str, available: str) -> DataError:
    """Return the error for a split or subset (`key`) that a data set lacks."""
    problem = f"no split {split!r}" if key == "split" else f"no subset {subset!r}" if subset else "has subsets"
    return DataError(f"{name}: {problem}; found: {available}; {_advise_key(key)}")


def _advise_key(key: str) -> str:
    return f"set `{key}`, or `heldout_{key}` for a held-out source"


def _find_missing_part(error: Exception) -> tuple[str, str] | None:
    """Return ("split" or "subset", the available ones) if a hub data set exists and its part does not, else None."""
    for key, pattern in _PART_ERRORS.items():
        if isinstance(error, ValueError) and (match := pattern.search(str(error))):
            return key, ", ".join(re.findall(r"'([^']+)'", match[1]))
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
