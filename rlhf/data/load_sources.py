"""Load the sources of a run, each once: the parsed rows, the reasons for dropped rows, and fingerprints.

`read_sources` takes a `DataConfig` and the stages that need data; no tokenizer is needed. `rlhf.data.stage_dataset`
builds the stages' data sets from the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from rlhf.config.data import Cleaning, PreferenceLabelConfig
from rlhf.config.paths import is_path, make_absolute
from rlhf.config.schema import STAGES, ColumnsConfig, DataConfig, DatasetConfig, Stage, share_of
from rlhf.data.formats import (
    ColumnMapping,
    KnownDataset,
    Values,
    check_no_reply_label,
    find_known_dataset,
    find_nested_columns,
    flatten,
    list_named_columns,
    recognize_columns,
    resolve_preference_rule,
)
from rlhf.data.readers import SourceRecord, check_source_exists, has_splits, hash_source, read_records
from rlhf.data.records import RejectedRecordError, Row, parse_record, starts_with_speaker
from rlhf.data.reply_columns import check_reply_columns
from rlhf.data.report import EMPTY_PROMPT, DropCounts, add_drop
from rlhf.data.spool import Spool
from rlhf.errors import DataError
from rlhf.reporting.console import console
from rlhf.reporting.progress import progress

PROGRESS_MIN_ROWS = 20_000
"""Number of rows from which a pass over them shows a progress bar."""
_PROGRESS_INTERVAL = 1000  # rows between two updates of the bar
_LABEL = "label"  # the column of data sets for KTO that marks single replies as good or bad


@dataclass(frozen=True)
class SourceSpec:
    """A source and how it is read, as the settings say it: equal specifications have the same rows."""

    path: str
    subset: str | None
    split: str | None
    revision: str | None
    limit: int | None
    columns: ColumnsConfig
    prefer: PreferenceLabelConfig
    clean: tuple[Cleaning, ...] | None
    template: str | None

    @classmethod
    def for_training(cls, dataset: DatasetConfig) -> SourceSpec:
        """Return the source that stages train on."""
        settings = {name: getattr(dataset, name) for name in cls.__dataclass_fields__}
        return cls(**settings | {"split": dataset.split if has_splits(dataset.path) else None})

    @classmethod
    def for_evaluation(cls, dataset: DatasetConfig) -> SourceSpec:
        """Return the source that the data set names for evaluation: `heldout`, or `heldout_split` of `path`.

        Prompts of a file are written in the template of the rows that are trained on.

        Raises:
            DataError: the data set names a split, and its source has none.
        """
        training = cls.for_training(dataset)
        if dataset.heldout is None:
            if training.split is None:
                raise DataError(
                    f"{dataset.path}: has no splits, got heldout_split {dataset.heldout_split!r}; name a second source "
                    "in data.datasets.*.heldout, or remove heldout_split"
                )
            return replace(training, split=dataset.heldout_split, limit=None)
        path = dataset.heldout
        entry, trained_entry = find_known_dataset(path), find_known_dataset(dataset.path)
        split = dataset.heldout_split or (entry and entry.heldout_split) or "test"
        template = training.template if entry or not trained_entry else training.template or trained_entry.template
        return replace(
            training,
            path=path,
            subset=dataset.heldout_subset,
            split=split if has_splits(path) else None,
            revision=dataset.heldout_revision,
            limit=None,
            template=template,
        )

    def apply_known_dataset(self) -> tuple[SourceSpec, KnownDataset | None]:
        """Return the source, completed with its entry in `known.yaml`, and that entry; the settings have precedence."""
        entry = find_known_dataset(self.path)
        if entry is None:
            return self, None
        spec = self
        if not is_path(self.path):
            spec = replace(
                self,
                path=entry.path or self.path,
                subset=self.subset or entry.subset,
                revision=self.revision or entry.revision,
            )
        if not self.columns.named():  # the entry's preference label fits only the entry's columns
            prefer = entry.prefer if self.prefer == PreferenceLabelConfig() else self.prefer
            spec = replace(spec, columns=entry.columns, prefer=prefer)
        clean = entry.clean if self.clean is None else self.clean
        template = entry.template if self.template is None else self.template
        return replace(spec, clean=clean, template=template), entry

    def absolute_name(self) -> str:
        """Return the source's name, valid in any working directory."""
        return str(replace(self, path=make_absolute(self.path)))

    def content(self) -> str:
        """Return a digest of the source's content; see `rlhf.data.readers.hash_source`."""
        spec, _ = self.apply_known_dataset()
        return hash_source(spec.path, split=spec.split or "", subset=spec.subset, revision=spec.revision)

    def __str__(self) -> str:
        settings: dict[str, object] = {
            "subset": self.subset,
            "split": self.split,
            "revision": self.revision,
            "limit": self.limit,
            **self.columns.model_dump(),
            **{f"prefer.{key}": value for key, value in self.prefer.model_dump(exclude={"nothing"}).items()},
            "clean": self.clean,
            "template": self.template,
        }
        listed = [f"{key} {value}" for key, value in settings.items() if value]
        return f"{self.path} ({', '.join(listed)})" if listed else self.path


@dataclass(frozen=True)
class ParsedSource:
    """The valid rows of a source that have a prompt, the reasons for the others, and how the columns were read.

    `template` is the text around prompts, unless a chat template writes them.
    """

    rows: Sequence[Row]
    dropped: DropCounts
    how: str = ""
    template: str = ""

    def fingerprint(self) -> dict[str, object]:
        """Return `{"rows", "dropped", "digest"}`: counts, and a digest of the rows as training sees them, in order.

        The location of the source and the line endings of a file do not matter.
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
    """The rows of sources; each source is read at its first use.

    Attributes:
        seed: selects the rows of the embedded world.
        show: show the progress of long reads; True on the rank that prints.
        records: keep each row's record, with the columns of the source, for reward functions.
    """

    seed: int
    show: bool = False
    records: bool = False
    _read: dict[SourceSpec, ParsedSource] = field(default_factory=dict)

    def __getitem__(self, source: SourceSpec) -> ParsedSource:
        """Return the rows of a source.

        Raises:
            DataError: the source cannot be read, or its columns have no known format.
        """
        if source not in self._read:
            self._read[source] = _parse_source(source, self.seed, self.show, self.records)
        return self._read[source]

    def fingerprints(self) -> dict[str, dict[str, object]]:
        """Return the fingerprint of every source that was read, by its name with subset and split.

        Paths are absolute, because a run may be resumed from another working directory.
        """
        return {source.absolute_name(): parsed.fingerprint() for source, parsed in self._read.items()}


def read_sources(
    config: DataConfig, stages: Sequence[Stage], *, seed: int, show: bool = False, records: bool = False
) -> SourceReader:
    """Read the sources that `stages` need, each once; the options are those of `SourceReader`.

    Raises:
        DataError: a stage has no source or no share, or a source cannot be read or has no known format.
    """
    needed = dict.fromkeys(source for stage in stages for source in list_stage_sources(config, stage))
    for source in needed:  # before the first read, which may take long
        check_source_exists(source.path)
    sources = SourceReader(seed, show, records)
    for source in needed:
        sources[source]
    return sources


def list_stage_datasets(config: DataConfig, stage: Stage) -> list[DatasetConfig]:
    """Return the data sets that a stage trains on, at least one.

    Raises:
        DataError: no data set is for this stage, or the stage has no share of the rows.
    """
    datasets = [dataset for dataset in config.datasets if share_of(stage) in dataset.stages]
    if not datasets:
        raise DataError(f"{stage}: no data set is for this stage; add {share_of(stage)} to data.datasets.*.stages")
    if not config.stage_split[STAGES.index(share_of(stage))]:
        raise DataError(f"{stage}: data.stage_split {list(config.stage_split)} leaves it no rows; give it a share")
    return datasets


def list_stage_sources(config: DataConfig, stage: Stage) -> list[SourceSpec]:
    """Return a stage's training sources, its held-out sources and, with those, the sources they must not overlap.

    Raises:
        DataError: the stage has no source, or no share of the rows.
    """
    datasets = list_stage_datasets(config, stage)
    heldout = [SourceSpec.for_evaluation(dataset) for dataset in datasets if dataset.heldout_name is not None]
    others = [dataset for dataset in config.datasets if share_of(stage) not in dataset.stages] if heldout else []
    train, other_train = map(SourceSpec.for_training, datasets), map(SourceSpec.for_training, others)
    return list(dict.fromkeys([*train, *heldout, *other_train]))


def _parse_source(spec: SourceSpec, seed: int, show: bool, keep_records: bool) -> ParsedSource:
    source, entry = spec.apply_known_dataset()
    with console.status(f"reading {source.path}") if show else nullcontext():
        records = read_records(
            source.path,
            split=source.split or "",
            subset=source.subset,
            revision=source.revision,
            limit=source.limit,
            seed=seed,
        )
    try:
        columns, nested = _map_columns(source, records)
    except DataError as error:
        if entry is None or spec.columns.named():
            raise
        raise DataError(
            f"{error}; known.yaml gives the columns of {entry.name}; set data.datasets.*.columns to override it"
        ) from error
    rows: Spool[Row] = Spool()
    dropped: DropCounts = {}
    shows_bar = show and len(records) >= PROGRESS_MIN_ROWS
    with progress(len(records), f"reading {source.path}", enabled=shows_bar) as bar:
        for number, record in enumerate(records, start=1):
            try:
                if columns is None or record.values is None:
                    raise RejectedRecordError(record.fault or EMPTY_PROMPT)
                row = parse_record(flatten(record.values, nested), columns, record.source)
                rows.append(replace(row, record=record.values) if keep_records and record.values else row)
            except RejectedRecordError as error:
                add_drop(dropped, str(error), record.source)
            if not number % _PROGRESS_INTERVAL:
                bar.advance(_PROGRESS_INTERVAL)
        bar.advance(len(records) % _PROGRESS_INTERVAL)
    origin = f"like the known data set {entry.name}: " if entry and not spec.columns.named() else ""
    return ParsedSource(rows, dropped, f"{origin}{columns}" if columns else "", source.template or "")


def _map_columns(
    source: SourceSpec, records: Sequence[SourceRecord]
) -> tuple[ColumnMapping | None, dict[str, list[str]]]:
    """Return the column mapping of the records (None if there are no columns), and the paths of nested columns.

    Raises:
        DataError: the columns have no known format, or lack one that the settings name.
    """
    names = list_named_columns(source.columns, source.prefer)
    present = list(dict.fromkeys(name for record in records for name in record.values or ()))
    nested = find_nested_columns((record.values for record in records if record.values), present, names, source.path)

    def readable() -> Iterator[Values]:
        return (flatten(record.values, nested) for record in records if record.values is not None)

    if nested:
        present = list(dict.fromkeys(name for values in readable() for name in values))
    if not present:
        return None, nested
    columns = recognize_columns(present, source.columns, source.path, source.prefer)
    has_single_replies = columns.replies == (columns.response,) != (_LABEL,)
    if has_single_replies and _LABEL in present and not source.prefer.nothing:
        check_no_reply_label(readable(), _LABEL, source.path)
    has_pairs = columns.chosen or columns.first or columns.messages or columns.text
    if not has_pairs and not source.prefer.nothing:
        check_reply_columns(columns, present, readable(), source.path)
    texts = (record[name] for record in readable() for name in columns.replies if isinstance(record.get(name), str))
    replies = (text for text in texts if text.strip())
    first = next(replies, None)
    mapping = replace(
        columns,
        preference=resolve_preference_rule(source.prefer, readable(), source.path),
        clean=source.clean or (),
        template=source.template or "",
        speaker_in_replies=first is not None and starts_with_speaker(first) and all(map(starts_with_speaker, replies)),
    )
    return mapping, nested
