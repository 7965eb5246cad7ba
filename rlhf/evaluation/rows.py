"""The rows that finished models are measured on, and the prompts that they complete.

Rows come from a file, a data set, standard input, or the rows that a recipe holds out. They are the same for all
models; each model has its examples of them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.config.schema import Config, DataConfig, Stage
from rlhf.data import readers
from rlhf.data.formats import ColumnMapping
from rlhf.data.load_sources import SourceReader, SourceSpec, read_sources
from rlhf.data.records import Row, parse_record
from rlhf.data.report import LONG_COMPLETION, DataReport, DropCounts, add_drop
from rlhf.errors import DataError

if TYPE_CHECKING:
    from rlhf.data.examples import Example
    from rlhf.evaluation.models import EvaluatedModel


HELDOUT = "heldout"
"""Name of the rows that a recipe holds out; a file of this name is `./heldout`."""
STDIN = "-"
_TEXT = ".txt"
_LIMITS = ("max_prompt_length", "max_completion_length")


class Measurement(NamedTuple):
    """The results of a model: `numbers` that docs/metrics.md defines, the results of `each` row, dropped rows."""

    numbers: dict[str, Any]
    each: Sequence[Any]
    report: DataReport


@dataclass(frozen=True)
class EvaluationRows:
    """The rows of the sources, in order; `report` has the reasons for records that are left out."""

    rows: list[Row]
    report: DataReport


def list_overrides(source: str, option: str) -> list[str]:
    """Return `--set` overrides that make `source` the only data: a path, or an entry of `data.datasets`.

    Raises:
        DataError: `source` is a path that does not exist.
    """
    if source == HELDOUT:
        return []
    written = source.lstrip().startswith("{") and not Path(source).exists()
    if not written:
        readers.check_source_exists(source, option)
    if _is_text(source):
        return []
    dataset = source if written else json.dumps({"path": source})
    return [f"data.datasets=[{dataset}]", "data.stage_split=1:1:1"]


def read_rows(
    source: str, stage: Stage, config: Config, first: EvaluatedModel, *, show: bool = False
) -> EvaluationRows:
    """Return the rows of the sources of `config`, as set by `list_overrides`, or the rows that a stage holds out.

    Args:
        source: the source, or `heldout`.
        stage: the stage that learns from such rows.
        config: settings with the overrides.
        first: the model whose tokenizer determines which rows a recipe can use, and so which it holds out.
        show: show the progress of long reads.

    Raises:
        DataError: a source cannot be read, or has no row.
    """
    from rlhf.data.stage_dataset import load_stage

    if source == HELDOUT:
        data = load_stage(
            _as_trained(config.data, first), stage, first.tokenizer, seed=config.data_seed, end_ids=first.end_ids
        )
        return EvaluationRows([example.row for example in data.heldout], DataReport(stage, HELDOUT))
    report = DataReport(stage, source)
    if _is_text(source):
        return EvaluationRows([_document(source)], report)
    rows, report.dropped = _collect(config, read_sources(config.data, [stage], seed=config.data_seed, show=show))
    if not rows:
        why = f"{report.reasons()}; {report.remedies()}" if report.dropped else "it is empty"
        raise DataError(f"{source}: no usable row: {why}")
    return EvaluationRows(rows, report)


def encode_examples(
    source_rows: EvaluationRows, config: DataConfig, model: EvaluatedModel, *, fits: bool, show: bool = False
) -> tuple[list[Any], DataReport]:
    """Return (the examples of the rows for `model`, a report on rows that are left out).

    Prompts and ends of replies have the format of the model's training. Length limits of the settings apply; without
    them the model's maximum length does. With `fits`, rows that exceed that length in whole are left out.

    Raises:
        DataError: no row is usable.
    """
    from rlhf.data.examples import encode_rows, filter_usable, token_parts
    from rlhf.data.stage_dataset import check_templates

    report = DataReport(source_rows.report.stage, source_rows.report.source, dropped=dict(source_rows.report.dropped))
    settings = _as_trained(config, model)
    free = {limit: model.max_length if fits else 10**9 for limit in _LIMITS if limit not in config.model_fields_set}
    settings = settings.model_copy(update=free)
    rows: Sequence[Row] = source_rows.rows
    if report.source != HELDOUT:  # a recipe's rows have their formats
        check_templates(config, templated=model.prompt_format == "template")
        rows = [_as_prompted(row, model) for row in rows]
    rows = filter_usable(rows, report)
    examples: list[Example] = []
    for example in encode_rows(rows, settings, model.tokenizer, report, model.end_ids, show=show):
        (_, prompt), *replies = token_parts(example)
        tokens = len(prompt) + max((len(ids) for _, ids in replies), default=0)
        if fits and tokens > model.max_length:
            report.drop_long(LONG_COMPLETION, example.row.source, tokens, model.max_length)
        else:
            examples.append(example)
    report.heldout = len(examples)
    if not examples:
        raise DataError(f"{report.source}: no row that {model.name} can use: {report.reasons()}; {report.remedies()}")
    return examples, report


def read_text(path: str) -> str:
    """Return the content of a text file.

    Raises:
        DataError: the file cannot be read, or is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _as_trained(config: DataConfig, model: EvaluatedModel) -> DataConfig:
    return config.model_copy(update={"chat_template": model.prompt_format == "template"})


def _as_prompted(row: Row, model: EvaluatedModel) -> Row:
    """Return a row with its prompt in the format of the model's training, if its source has only the bare prompt."""
    from rlhf.data.prompt_encoding import find_row_format, make_conversation_row

    if not row.prompt or find_row_format(row) != "plain" or model.prompt_format == "template":
        return row
    prompted = make_conversation_row(row.prompt, model.prompt_format)
    return replace(row, text=prompted.text, template=prompted.template)


def _is_text(source: str) -> bool:
    return source.lower().endswith(_TEXT)


def _document(source: str) -> Row:
    """Return a text file as one text without a prompt."""
    text = read_text(source)
    if not text.strip():
        raise DataError(f"{source}: has no text; name another file")
    return Row((), "", text, None, None, Path(source).name)


def is_line_source(name: str) -> bool:
    """Return True if a source has one prompt per line, unlike the sources of `data.datasets`."""
    return name == STDIN or _is_text(name)


def read_lines(name: str) -> list[Row]:
    """Return the prompts of standard input (`-`) or of a text file, one per line, in order; at least one.

    Raises:
        DataError: the source cannot be read, or has no prompt.
    """
    name, lines = ("standard input", sys.stdin) if name == STDIN else (name, read_text(name).split("\n"))
    columns = ColumnMapping(prompt="prompt")  # a transcript becomes a conversation
    rows = [
        parse_record({"prompt": line.strip()}, columns, f"{name}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    return _require_prompts(rows, name)


def read_prompts(config: Config, *, show: bool = False, records: bool = False) -> tuple[list[Row], DropCounts]:
    """Return the prompts of all rows of `config.data.datasets`, at least one, and the reasons for dropped rows.

    With `records`, rows keep their record, with the columns of the source.

    Raises:
        DataError: a source cannot be read, or no row has a prompt.
    """
    rows, dropped = _collect(config, SourceReader(config.data_seed, show, records))
    for row in (row for row in rows if not row.prompt):
        add_drop(dropped, "text alone, without a prompt", row.source)
    prompts = [row for row in rows if row.prompt]
    return _require_prompts(prompts, ", ".join(dataset.path for dataset in config.data.datasets)), dropped


def _collect(config: Config, sources: SourceReader) -> tuple[list[Row], DropCounts]:
    """Return the rows of all data sets, and the reasons for dropped ones."""
    rows: list[Row] = []
    dropped: DropCounts = {}
    for source in (sources[SourceSpec.for_training(dataset)] for dataset in config.data.datasets):
        rows += source.rows
        for reason, (number, where) in source.dropped.items():
            add_drop(dropped, reason, where, number)
    return rows, dropped


def read_heldout_prompts(config: Config, tokenizer: Any, *, records: bool = False) -> list[Row]:
    """Return the prompts that the PPO stage of a recipe holds out, with their records if `records`.

    Raises:
        DataError: a source cannot be read, or the stage has no rows.
    """
    from rlhf.data.stage_dataset import load_stage

    sources = read_sources(config.data, ["ppo"], seed=config.data_seed, records=records)
    data = load_stage(config.data, "ppo", tokenizer, seed=config.data_seed, sources=sources)
    return [example.row for example in data.heldout]


def draw_rows(rows: list[Row], limit: int, seed: int) -> list[Row]:
    """Return at most `limit` rows, sampled from all of them, in order."""
    if limit >= len(rows):
        return rows
    return [rows[place] for place in sorted(random.Random(f"limit {seed}").sample(range(len(rows)), limit))]


def _require_prompts(rows: list[Row], name: str) -> list[Row]:
    if not rows:
        raise DataError(f"{name}: has no prompts; name another file with --prompts")
    return rows
