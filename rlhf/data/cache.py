"""The examples of a stage, tokenized once and kept: in a folder that is named by what they are made of.

`StageCache` has a key: a digest of what the sources hold, the settings, the seed, the tokenizer and the code that makes
examples. One process of a machine builds the folder (`build`), all open it (`load`); a folder appears whole, and one
that is damaged is built anew. It lies beside the data sets that the `datasets` package keeps (HF_DATASETS_CACHE, or
HF_HOME), and may be deleted whenever no run uses it.
"""

from __future__ import annotations

import fcntl
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
_LIBRARIES = ("transformers", "tokenizers", "jinja2")  # which have a part in what the tokens are
_AT_ONCE = 2**20  # bytes
_DAMAGED = (OSError, ValueError, KeyError, TypeError)  # what reading a damaged folder raises


@dataclass(frozen=True)
class StageCache:
    """Where the examples of a stage are kept: those that `load_stage` gives with these arguments.

    Attributes:
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
        """That of a stage of a run; `end_ids` end a reply."""
        judged = stage == "ppo" and bool(config.ppo.reward_functions)
        return cls(config.data, stage, tokenizer, config.seed, end_ids, records=judged)

    @cached_property
    def key(self) -> str:
        """A digest of all that the examples are made of; the sources are read as bytes.

        Raises:
            DataError: a source cannot be read, or the stage has none.
        """
        made_of = {
            "code": _code(),
            "settings": self.config.model_dump(mode="json", exclude={"pretraining"}),
            "sources": [source.content() for source in list_stage_sources(self.config, self.stage)],
            "stage": self.stage,
            "seed": self.seed,
            "tokenizer": _saved(self.tokenizer),
            "end_ids": list(self.end_ids),
            "records": self.records,
        }
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]

    @cached_property
    def folder(self) -> Path:
        """Where they are kept, or will be."""
        return find_cache_home() / f"{self.stage}-{self.key}"

    def find(self) -> StageData | None:
        """The examples, where they are kept and whole.

        Raises:
            DataError: as `key`.
        """
        return self.load() if self._is_whole() else None

    def build(self, *, show: bool = False) -> str | None:
        """Keep the examples, unless they are.

        A process that is building the same is waited for.

        Returns:
            Why they are not kept, where they cannot be: the folder cannot be written, or rows hold what it cannot.

        Raises:
            DataError: as `load_stage`.
        """
        waiting = f"{self.stage}: waiting for another run that tokenizes the same rows" if show else ""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.folder, waiting):
                if not self._is_whole():
                    with atomic_directory(self.folder) as folder:
                        self._write(folder, show)
        except OSError as error:
            if self._is_whole():  # in a cache that others fill, which this process may only read
                return None
            return f"{self.folder.parent} cannot be written ({error.strerror or error}); HF_DATASETS_CACHE moves it"
        except UnstorableRowError as error:
            return str(error)
        return None

    def load(self) -> StageData:
        """The examples of the folder, which `build` has left whole; nothing is read before it is asked for."""
        import numpy as np

        said = json.loads((self.folder / _STAGE).read_text(encoding="utf-8"))["said"]
        table = ExampleTable(self.folder / _EXAMPLES, EXAMPLE_TYPES[self.stage])
        train, heldout = (
            StoredExamples(table, np.load(self.folder / name, mmap_mode="r", allow_pickle=False))
            for name in (_TRAIN, _HELDOUT)
        )
        sources = list_stage_sources(self.config, self.stage)
        return StageData(
            train,
            heldout,
            [_report(values, table) for values in said["reports"]],
            said["prompt_format"],
            tuple(said["end_ids"]),
            dict(zip((source.absolute_name() for source in sources), said["fingerprints"], strict=True)),
        )

    def _write(self, folder: Path, show: bool) -> None:
        import numpy as np

        config, stage = self.config, self.stage
        sources = read_sources(config, [stage], seed=self.seed, show=show, records=self.records)
        writer = ExampleWriter(folder / _EXAMPLES, EXAMPLE_TYPES[stage])
        options: dict[str, Any] = {"seed": self.seed, "end_ids": self.end_ids, "sources": sources}
        chosen = select_examples(config, stage, self.tokenizer, writer.add, **options)
        writer.close()
        for name, places in ((_TRAIN, chosen.train), (_HELDOUT, chosen.heldout)):
            np.save(folder / name, np.array(places, np.int64))
        said = {
            "reports": [
                vars(report) | {"example": place} for report, place in zip(chosen.reports, chosen.typical, strict=True)
            ],
            "prompt_format": chosen.prompt_format,
            "end_ids": chosen.end_ids,
            "fingerprints": [sources[source].fingerprint() for source in list_stage_sources(config, stage)],
        }
        digests = {name: _digest(folder / name) for name in (_EXAMPLES, _TRAIN, _HELDOUT)}
        if replace(self).key != self.key:
            raise DataError(f"{stage}: a source of data.datasets was changed while it was read; give the command again")
        whole = {"said": said, "files": digests, "digest": _digest_of(said)}
        (folder / _STAGE).write_text(json.dumps(whole), encoding="utf-8")

    def _is_whole(self) -> bool:
        """Whether every byte is there that was written."""
        try:
            found = json.loads((self.folder / _STAGE).read_text(encoding="utf-8"))
            if found["digest"] != _digest_of(found["said"]):
                return False
            return all(_digest(self.folder / name) == digest for name, digest in found["files"].items())
        except _DAMAGED:
            return False


def find_cache_home() -> Path:
    """The folder in which examples are kept: beside the data sets of the `datasets` package."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")).expanduser() / "rlhf"


@contextmanager
def _alone(folder: Path, waiting: str) -> Iterator[None]:
    """Only one process at a time is in this block, another says that it waits; the lock ends with its process."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                console.print(waiting, markup=False)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _code() -> list[str]:
    """Versions of the libraries, and a digest of this package: another way to make examples makes others."""
    here = Path(__file__).parent
    files = sorted(path for path in here.iterdir() if path.suffix in (".py", ".yaml"))
    own = hashlib.sha256(b"\n".join(path.read_bytes() for path in files)).hexdigest()
    return [own, *(f"{name} {version(name)}" for name in _LIBRARIES)]


def _saved(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of a tokenizer as it would be saved, chat template included."""
    try:
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            return _digest_of([(path.name, _digest(path)) for path in files])
    except OSError as error:
        raise DataError(
            f"the tokenizer cannot be written to a temporary folder ({error}); let TMPDIR name one with room"
        ) from error


def _report(values: dict[str, Any], table: ExampleTable) -> DataReport:
    """A report as it was before it was written as JSON, which has no tuples."""
    pairs = {
        name: {key: tuple(found) for key, found in values[name].items()} for name in ("tokens", "dropped", "lengths")
    }
    return DataReport(**values | pairs | {"example": table[values["example"]]})


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while some := file.read(_AT_ONCE):
            digest.update(some)
    return digest.hexdigest()
