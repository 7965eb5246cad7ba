"""Cache the examples of a stage, tokenized once, in a folder named by a digest of their inputs.

The key of a `StageCache` is a digest of the sources' content, the settings, the seed, the tokenizer and the code that
makes examples. One process of a machine builds the folder (`build`), all processes open it (`load`); a folder appears
complete or not at all, and a damaged one is rebuilt. It is next to the data sets that the `datasets` package caches
(HF_DATASETS_CACHE, or HF_HOME), and may be deleted while no run uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from rlhf.config.schema import Config, DataConfig, Stage
from rlhf.data.arrow_store import ExampleTable, ExampleWriter, StoredExamples, UnstorableRowError
from rlhf.data.load_sources import list_stage_sources, read_sources
from rlhf.data.report import DataReport
from rlhf.data.stage_dataset import StageData, select_examples
from rlhf.data.tokenize_rows import EXAMPLE_TYPES
from rlhf.errors import DataError
from rlhf.reporting.console import console
from rlhf.utils.atomic_io import atomic_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXAMPLES, _TRAIN, _HELDOUT, _STAGE = "examples.arrow", "train.npy", "heldout.npy", "stage.json"
_LIBRARIES = ("transformers", "tokenizers", "jinja2")  # their versions may change the tokens
_CHUNK = 2**20  # bytes
_DAMAGE_ERRORS = (OSError, ValueError, KeyError, TypeError)  # errors of reading a damaged folder


@dataclass(frozen=True)
class StageCache:
    """The cached examples of a stage: the result of `load_stage` with these arguments.

    Attributes:
        config: sources, splits and length limits.
        stage: the stage.
        tokenizer: the model's tokenizer.
        seed: determines splits and order.
        end_ids: tokens that end a reply.
        records: each row has its record, for reward functions.
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
        return cls(config.data, stage, tokenizer, config.seed, end_ids, records=needs_records)

    @cached_property
    def key(self) -> str:
        """A digest of all inputs of the examples; the sources are read as bytes.

        Raises:
            DataError: a source cannot be read, or the stage has none.
        """
        inputs = {
            "code": _code_version(),
            "settings": self.config.model_dump(mode="json", exclude={"pretraining"}),
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
        return find_cache_home() / f"{self.stage}-{self.key}"

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
        table = ExampleTable(self.folder / _EXAMPLES, EXAMPLE_TYPES[self.stage])
        train, heldout = (
            StoredExamples(table, np.load(self.folder / name, mmap_mode="r", allow_pickle=False))
            for name in (_TRAIN, _HELDOUT)
        )
        sources = list_stage_sources(self.config, self.stage)
        return StageData(
            train,
            heldout,
            [_restore_report(values, table) for values in metadata["reports"]],
            metadata["prompt_format"],
            tuple(metadata["end_ids"]),
            dict(zip((source.absolute_name() for source in sources), metadata["fingerprints"], strict=True)),
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
            "reports": [
                vars(report) | {"example": number}
                for report, number in zip(selection.reports, selection.typical, strict=True)
            ],
            "prompt_format": selection.prompt_format,
            "end_ids": selection.end_ids,
            "fingerprints": [sources[source].fingerprint() for source in list_stage_sources(config, stage)],
        }
        digests = {name: _hash_file(folder / name) for name in (_EXAMPLES, _TRAIN, _HELDOUT)}
        if replace(self).key != self.key:
            raise DataError(f"{stage}: a source of data.datasets changed while it was read; run the command again")
        content = {"metadata": metadata, "files": digests, "digest": _hash_json(metadata)}
        (folder / _STAGE).write_text(json.dumps(content), encoding="utf-8")

    def _is_complete(self) -> bool:
        """Return True if every byte is as it was written."""
        try:
            content = json.loads((self.folder / _STAGE).read_text(encoding="utf-8"))
            if content["digest"] != _hash_json(content["metadata"]):
                return False
            return all(_hash_file(self.folder / name) == digest for name, digest in content["files"].items())
        except _DAMAGE_ERRORS:
            return False


def find_cache_home() -> Path:
    """Return the folder of all cached examples, next to the data sets of the `datasets` package."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")).expanduser() / "rlhf"


@contextmanager
def _lock_build(folder: Path, waiting: str) -> Iterator[None]:
    """Run this block in one process at a time; another says that it waits. The lock ends with its process."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if waiting:
            console.print(waiting, markup=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


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
            return _hash_json([(path.name, _hash_file(path)) for path in files])
    except OSError as error:
        raise DataError(
            f"the tokenizer cannot be written to a temporary folder ({error}); set TMPDIR to a folder with free space"
        ) from error


def _restore_report(values: dict[str, Any], table: ExampleTable) -> DataReport:
    """Return a report from its JSON, which has lists for tuples."""
    tuples = {
        name: {key: tuple(items) for key, items in values[name].items()} for name in ("tokens", "dropped", "lengths")
    }
    return DataReport(**values | tuples | {"example": table[values["example"]]})


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
