"""The sources of a run, each read once: `read_sources` gives the rows, what was left out of them, and fingerprints.

A `DataConfig` and the stages that need data go in; no tokenizer is needed. `rlhf.data.tokenization` takes it on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from rlhf.config import STAGES, ColumnsConfig, DataConfig, DatasetConfig, Stage
from rlhf.data.reasons import EMPTY_PROMPT
from rlhf.data.report import Dropped, count
from rlhf.data.rows import Rejected, Row, parse, recognize
from rlhf.data.sources import check, has_parts, read
from rlhf.errors import DataError
from rlhf.metrics.progress import console, progress
from rlhf.names import absolute

LONG = 20_000
"""Rows from which on a pass over them takes long enough to show how far it is."""
_PACE = 1000  # rows between two counts


@dataclass(frozen=True)
class Source:
    """What is read, and how: two that are equal have the same rows."""

    path: str
    subset: str | None
    split: str | None
    columns: ColumnsConfig

    @classmethod
    def trained(cls, dataset: DatasetConfig) -> Source:
        """The source that stages train on."""
        return cls._of(dataset.path, dataset.subset, dataset.split, dataset.columns)

    @classmethod
    def held_out(cls, dataset: DatasetConfig) -> Source:
        """The source that is named for evaluation."""
        return cls._of(str(dataset.heldout), dataset.heldout_subset, dataset.heldout_split, dataset.columns)

    @classmethod
    def _of(cls, path: str, subset: str | None, split: str, columns: ColumnsConfig) -> Source:
        return cls(path, subset, split if has_parts(path) else None, columns)

    def __str__(self) -> str:
        named = {"subset": self.subset, "split": self.split, **self.columns.model_dump()}
        parts = [f"{key} {value}" for key, value in named.items() if value]
        return f"{self.path} ({', '.join(parts)})" if parts else self.path


@dataclass(frozen=True)
class Rows:
    """The rows of a source that are whole and have a prompt, and why others are left out."""

    rows: list[Row]
    dropped: Dropped

    def fingerprint(self) -> dict[str, object]:
        """`{"rows", "dropped", "digest"}`: counts, and a digest of the rows as training sees them, in their order.

        Where the source lies, and how a file ends its lines, does not count.
        """
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            turns = [(message.role, message.content) for message in row.prompt]
            digest.update(f"{json.dumps([turns, row.text, row.response, row.chosen, row.rejected])}\n".encode())
        dropped = sum(rows for rows, _ in self.dropped.values())
        return {"rows": len(self.rows), "dropped": dropped, "digest": digest.hexdigest()}


@dataclass
class SourceRows:
    """The rows of sources; each is read when it is first asked for.

    Attributes:
        seed: decides the rows of the embedded world.
        show: tell of reading that takes long.
    """

    seed: int
    show: bool = False
    _read: dict[Source, Rows] = field(default_factory=dict)

    def __getitem__(self, source: Source) -> Rows:
        """The rows of a source.

        Raises:
            DataError: it cannot be read, or its columns are of no known format.
        """
        if source not in self._read:
            self._read[source] = _rows(source, self.seed, self.show)
        return self._read[source]

    def fingerprints(self) -> dict[str, dict[str, object]]:
        """The fingerprint of every source that was read, by its name and, where it has those, subset and split.

        Paths are absolute: a run may go on from another working directory.
        """
        return {
            str(replace(source, path=absolute(source.path))): rows.fingerprint() for source, rows in self._read.items()
        }


def read_sources(config: DataConfig, stages: Sequence[Stage], *, seed: int, show: bool = False) -> SourceRows:
    """Read what `stages` need, each source once.

    Args:
        seed: decides the rows of the embedded world.
        show: tell of reading that takes long; True on the one rank that talks.

    Raises:
        DataError: a stage has no source or no share, or a source cannot be read or is of no known format.
    """
    needed = list(dict.fromkeys(source for stage in stages for source in _needed(config, stage)))
    for source in needed:  # before the first of them is read, which may take long
        check(source.path)
    sources = SourceRows(seed, show)
    for source in needed:
        sources[source]
    return sources


def datasets_of(config: DataConfig, stage: Stage) -> list[DatasetConfig]:
    """The data sets that a stage trains on; at least one.

    Raises:
        DataError: none is for this stage, or it has no share of them.
    """
    datasets = [dataset for dataset in config.datasets if stage in dataset.stages]
    if not datasets:
        raise DataError(f"{stage}: no data set is for this stage; add {stage} to data.datasets.*.stages")
    if not config.stage_split[STAGES.index(stage)]:
        raise DataError(f"{stage}: data.stage_split {list(config.stage_split)} leaves it no rows; give it a share")
    return datasets


def _needed(config: DataConfig, stage: Stage) -> list[Source]:
    """What a stage trains on, its held-out sources and, where it has such, all that these must not share with."""
    datasets = datasets_of(config, stage)
    named = [Source.held_out(dataset) for dataset in datasets if dataset.heldout is not None]
    others = [dataset for dataset in config.datasets if stage not in dataset.stages] if named else []
    return [*map(Source.trained, datasets), *named, *map(Source.trained, others)]


def _rows(source: Source, seed: int, show: bool) -> Rows:
    with console.status(f"reading {source.path}") if show else nullcontext():
        records = read(source.path, split=source.split or "", subset=source.subset, seed=seed)
    found = dict.fromkeys(column for record in records for column in record.values or ())
    columns = recognize(found, source.columns, source.path) if found else None
    rows: list[Row] = []
    dropped: Dropped = {}
    with progress(len(records), f"reading {source.path}", enabled=show and len(records) >= LONG) as bar:
        for number, record in enumerate(records, start=1):
            try:
                if columns is None or record.values is None:
                    raise Rejected(record.fault or EMPTY_PROMPT)
                rows.append(parse(record.values, columns, record.source))
            except Rejected as error:
                count(dropped, error.reason, record.source)
            if not number % _PACE:
                bar.advance(_PACE)
        bar.advance(len(records) % _PACE)
    return Rows(rows, dropped)
