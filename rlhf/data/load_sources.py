"""The sources of a run, each read once: `read_sources` gives the rows, what was left out of them, and fingerprints.

A `DataConfig` and the stages that need data go in; no tokenizer is needed. `rlhf.data.stage_dataset` takes it on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from rlhf.config.data import Cleaning, PreferenceLabelConfig
from rlhf.config.paths import is_path, make_absolute
from rlhf.config.schema import STAGES, ColumnsConfig, DataConfig, DatasetConfig, Stage, share_of
from rlhf.data.formats import (
    ColumnMapping,
    KnownDataset,
    Values,
    find_known_dataset,
    flatten_nested_columns,
    list_named_columns,
    recognize_columns,
)
from rlhf.data.preference_labels import check_no_reply_label, resolve_preference_rule
from rlhf.data.readers import check_source_exists, has_splits, hash_source, read_records
from rlhf.data.records import RejectedRecordError, Row, parse_record, starts_with_speaker
from rlhf.data.report import EMPTY_PROMPT, DropCounts, add_drop
from rlhf.errors import DataError
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress

PROGRESS_MIN_ROWS = 20_000
"""Rows from which on a pass over them takes long enough to show how far it is."""
_PACE = 1000  # rows between two counts
_LABEL = "label"  # of a single reply, as sets for KTO have it


@dataclass(frozen=True)
class SourceSpec:
    """What is read, and how, as the settings say it: two that are equal have the same rows."""

    path: str
    subset: str | None
    split: str | None
    revision: str | None
    limit: int | None
    columns: ColumnsConfig
    prefer: PreferenceLabelConfig
    clean: tuple[Cleaning, ...] | None

    @classmethod
    def trained(cls, dataset: DatasetConfig) -> SourceSpec:
        """The source that stages train on."""
        return cls._of(dataset, dataset.path, dataset.subset, dataset.split, dataset.revision, dataset.limit)

    @classmethod
    def held_out(cls, dataset: DatasetConfig) -> SourceSpec:
        """The source that is named for evaluation."""
        path = str(dataset.heldout)
        entry = find_known_dataset(path)
        split = dataset.heldout_split or (entry and entry.heldout_split) or "test"
        return cls._of(dataset, path, dataset.heldout_subset, split, dataset.heldout_revision, None)

    @classmethod
    def _of(
        cls, dataset: DatasetConfig, path: str, subset: str | None, split: str, revision: str | None, limit: int | None
    ) -> SourceSpec:
        part = split if has_splits(path) else None
        return cls(path, subset, part, revision, limit, dataset.columns, dataset.prefer, dataset.clean)

    def with_what_is_known(self) -> tuple[SourceSpec, KnownDataset | None]:
        """The source with what `known.yaml` says of its name where the settings say nothing, and that."""
        entry = find_known_dataset(self.path)
        if entry is None:
            return self, None
        found = self
        if not is_path(self.path):
            found = replace(
                self,
                path=entry.path or self.path,
                subset=self.subset or entry.subset,
                revision=self.revision or entry.revision,
            )
        if not self.columns.named():  # what decides belongs to the columns that it decides between
            prefer = entry.prefer if self.prefer == PreferenceLabelConfig() else self.prefer
            found = replace(found, columns=entry.columns, prefer=prefer)
        return (replace(found, clean=entry.clean) if self.clean is None else found), entry

    def from_anywhere(self) -> str:
        """Its name, from any working directory."""
        return str(replace(self, path=make_absolute(self.path)))

    def content(self) -> str:
        """A digest of what it holds, as `rlhf.data.readers.hash_source`."""
        found, _ = self.with_what_is_known()
        return hash_source(found.path, split=found.split or "", subset=found.subset, revision=found.revision)

    def __str__(self) -> str:
        named: dict[str, object] = {
            "subset": self.subset,
            "split": self.split,
            "revision": self.revision,
            "limit": self.limit,
            **self.columns.model_dump(),
            **{f"prefer.{key}": value for key, value in self.prefer.model_dump(exclude={"nothing"}).items()},
            "clean": self.clean,
        }
        parts = [f"{key} {value}" for key, value in named.items() if value]
        return f"{self.path} ({', '.join(parts)})" if parts else self.path


@dataclass(frozen=True)
class ParsedSource:
    """The rows of a source that are whole and have a prompt, why others are left out, and how they were read."""

    rows: list[Row]
    dropped: DropCounts
    how: str = ""

    def fingerprint(self) -> dict[str, object]:
        """`{"rows", "dropped", "digest"}`: counts, and a digest of the rows as training sees them, in their order.

        Where the source lies, and how a file ends its lines, does not count.
        """
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            turns = [(message.role, message.content) for message in row.prompt]
            values: list[object] = [turns, row.text, row.response, row.chosen, row.rejected]
            values += [row.margin] if row.margin else []
            digest.update(f"{json.dumps(values)}\n".encode())
        dropped = sum(rows for rows, _ in self.dropped.values())
        return {"rows": len(self.rows), "dropped": dropped, "digest": digest.hexdigest()}


@dataclass
class SourceReader:
    """The rows of sources; each is read when it is first asked for.

    Attributes:
        seed: decides the rows of the embedded world.
        show: tell of reading that takes long.
        records: keep with each row its record, as the source has it.
    """

    seed: int
    show: bool = False
    records: bool = False
    _read: dict[SourceSpec, ParsedSource] = field(default_factory=dict)

    def __getitem__(self, source: SourceSpec) -> ParsedSource:
        """The rows of a source.

        Raises:
            DataError: it cannot be read, or its columns are of no known format.
        """
        if source not in self._read:
            self._read[source] = _rows(source, self.seed, self.show, self.records)
        return self._read[source]

    def fingerprints(self) -> dict[str, dict[str, object]]:
        """The fingerprint of every source that was read, by its name and, where it has those, subset and split.

        Paths are absolute: a run may go on from another working directory.
        """
        return {source.from_anywhere(): rows.fingerprint() for source, rows in self._read.items()}


def read_sources(
    config: DataConfig, stages: Sequence[Stage], *, seed: int, show: bool = False, records: bool = False
) -> SourceReader:
    """Read what `stages` need, each source once.

    Args:
        seed: decides the rows of the embedded world.
        show: tell of reading that takes long; True on the one rank that talks.
        records: keep with each row its record, for reward functions.

    Raises:
        DataError: a stage has no source or no share, or a source cannot be read or is of no known format.
    """
    needed = dict.fromkeys(source for stage in stages for source in list_stage_sources(config, stage))
    for source in needed:  # before the first of them is read, which may take long
        check_source_exists(source.path)
    sources = SourceReader(seed, show, records)
    for source in needed:
        sources[source]
    return sources


def list_stage_datasets(config: DataConfig, stage: Stage) -> list[DatasetConfig]:
    """The data sets that a stage trains on; at least one.

    Raises:
        DataError: none is for this stage, or it has no share of them.
    """
    datasets = [dataset for dataset in config.datasets if share_of(stage) in dataset.stages]
    if not datasets:
        raise DataError(f"{stage}: no data set is for this stage; add {share_of(stage)} to data.datasets.*.stages")
    if not config.stage_split[STAGES.index(share_of(stage))]:
        raise DataError(f"{stage}: data.stage_split {list(config.stage_split)} leaves it no rows; give it a share")
    return datasets


def list_stage_sources(config: DataConfig, stage: Stage) -> list[SourceSpec]:
    """What a stage trains on, its held-out sources and, where it has such, all that these must not share with.

    Raises:
        DataError: the stage has no source, or no share of them.
    """
    datasets = list_stage_datasets(config, stage)
    named = [SourceSpec.held_out(dataset) for dataset in datasets if dataset.heldout is not None]
    others = [dataset for dataset in config.datasets if share_of(stage) not in dataset.stages] if named else []
    return list(dict.fromkeys([*map(SourceSpec.trained, datasets), *named, *map(SourceSpec.trained, others)]))


def _rows(asked: SourceSpec, seed: int, show: bool, keep: bool) -> ParsedSource:
    source, entry = asked.with_what_is_known()
    with console.status(f"reading {source.path}") if show else nullcontext():
        records = read_records(
            source.path,
            split=source.split or "",
            subset=source.subset,
            revision=source.revision,
            limit=source.limit,
            seed=seed,
        )
    values = [record.values for record in records]
    try:
        values, columns = _recognized(source, values)
    except DataError as error:
        if entry is None or asked.columns.named():
            raise
        raise DataError(f"{error}; {entry.name} is read so unless data.datasets.*.columns says otherwise") from error
    rows: list[Row] = []
    dropped: DropCounts = {}
    with progress(len(records), f"reading {source.path}", enabled=show and len(records) >= PROGRESS_MIN_ROWS) as bar:
        for number, (record, found) in enumerate(zip(records, values, strict=True), start=1):
            try:
                if columns is None or found is None:
                    raise RejectedRecordError(record.fault or EMPTY_PROMPT)
                row = parse_record(found, columns, record.source)
                rows.append(replace(row, record=record.values) if keep and record.values else row)
            except RejectedRecordError as error:
                add_drop(dropped, error.reason, record.source)
            if not number % _PACE:
                bar.advance(_PACE)
        bar.advance(len(records) % _PACE)
    by = f"as {entry.name} is known: " if entry and not asked.columns.named() else ""
    return ParsedSource(rows, dropped, f"{by}{columns}" if columns else "")


def _recognized(source: SourceSpec, records: list[Values | None]) -> tuple[list[Values | None], ColumnMapping | None]:
    """The records, nested columns laid flat, and what their columns are; None where there are none.

    Raises:
        DataError: the columns are of no known format, or not those that the settings name.
    """
    records = flatten_nested_columns(
        records, _names(records), list_named_columns(source.columns, source.prefer), source.path
    )
    whole = [record for record in records if record is not None]
    found = _names(records)
    if not found:
        return records, None
    columns = recognize_columns(found, source.columns, source.path, source.prefer)
    alone = columns.replies == (columns.response,) != (_LABEL,)
    if alone and _LABEL in found and not source.prefer.nothing:
        check_no_reply_label(whole, _LABEL, source.path)
    texts = (record[name] for record in whole for name in columns.replies if isinstance(record.get(name), str))
    replies = (text for text in texts if text.strip())
    some = next(replies, None)
    return records, replace(
        columns,
        decision=resolve_preference_rule(source.prefer, whole, source.path),
        clean=source.clean or (),
        led=some is not None and starts_with_speaker(some) and all(map(starts_with_speaker, replies)),
    )


def _names(records: list[Values | None]) -> list[str]:
    """The columns of all records, in the order in which they are first met."""
    return list(dict.fromkeys(name for record in records for name in record or ()))
