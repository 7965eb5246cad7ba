"""The rows that finished models are measured on: all of a file's, or those that a recipe holds out.

A source and a configuration flow in; rows flow out, the same for all models, and for each model its examples of them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.config.schema import Config, DataConfig, Stage
from rlhf.data import readers
from rlhf.data.formats import ColumnMapping
from rlhf.data.load_sources import SourceReader, SourceSpec
from rlhf.data.records import Row, parse_record
from rlhf.data.report import DropCounts, add_drop
from rlhf.errors import DataError

if TYPE_CHECKING:
    from rlhf.data.examples import Example
    from rlhf.data.records import Row
    from rlhf.data.report import DataReport
    from rlhf.evaluation.models import EvaluatedModel


HELDOUT = "heldout"
"""What names the rows that a recipe holds out; a file of this name is `./heldout`."""
_TEXT = ".txt"
_LIMITS = ("max_prompt_length", "max_completion_length")


class Measurement(NamedTuple):
    """What a model made of rows: `numbers` that docs/metrics.md defines, those of `each` row, what is left out."""

    numbers: dict[str, Any]
    each: Sequence[Any]
    report: DataReport


@dataclass(frozen=True)
class EvaluationRows:
    """What was found in the sources, in their order; `report` says why other records are left out."""

    rows: list[Row]
    report: DataReport


def list_overrides(source: str, option: str) -> list[str]:
    """Settings, as `--set` takes them, that make `source` all of the data: a path, or what `data.datasets` may hold.

    Raises:
        DataError: `source` is a path, and nothing is there.
    """
    if source == HELDOUT or _is_text(source):
        if source != HELDOUT:
            readers.check_source_exists(source, option)
        return []
    written = source.lstrip().startswith("{") and not Path(source).exists()
    if not written:
        readers.check_source_exists(source, option)
    return [f"data.datasets=[{source if written else json.dumps({'path': source})}]", "data.stage_split=1:1:1"]


def read_rows(
    source: str, stage: Stage, config: Config, first: EvaluatedModel, *, show: bool = False
) -> EvaluationRows:
    """The rows of the sources of `config`, which `overrides` has set; or those that a stage holds out.

    Args:
        stage: what learns from such rows.
        first: the model whose tokenizer says which rows a recipe can use, and so which it holds out.

    Raises:
        DataError: a source cannot be read, or there is no row.
    """
    from rlhf.data.load_sources import SourceSpec, read_sources
    from rlhf.data.report import DataReport, add_drop
    from rlhf.data.stage_dataset import load_stage

    if source == HELDOUT:
        data = load_stage(
            _as_trained(config.data, first), stage, first.tokenizer, seed=config.seed, end_ids=first.end_ids
        )
        return EvaluationRows([example.row for example in data.heldout], DataReport(stage, HELDOUT))
    report = DataReport(stage, source)
    if _is_text(source):
        return EvaluationRows([_document(source)], report)
    rows: list[Row] = []
    read = read_sources(config.data, [stage], seed=config.seed, show=show)
    for found in (read[SourceSpec.for_training(dataset)] for dataset in config.data.datasets):
        rows += found.rows
        for reason, (number, where) in found.dropped.items():
            add_drop(report.dropped, reason, where, number)
    if not rows:
        why = f"{report.reasons()}; {report.remedies()}" if report.dropped else "it is empty"
        raise DataError(f"{source}: no usable row: {why}")
    return EvaluationRows(rows, report)


def encode_examples(
    found: EvaluationRows, config: DataConfig, model: EvaluatedModel, *, fits: bool, show: bool = False
) -> tuple[list[Any], DataReport]:
    """(the examples that `model` gets of the rows, a report on those that are left out).

    Prompts are written and replies end as in the model's training. Lengths that the settings name hold; without them
    the model's own room does.

    Args:
        fits: whether rows that exceed the model's room are left out.

    Raises:
        DataError: none is left.
    """
    from rlhf.data.report import LONG_COMPLETION, DataReport
    from rlhf.data.tokenize_rows import encode_rows, filter_usable

    report = DataReport(found.report.stage, found.report.source, dropped=dict(found.report.dropped))
    settings = _as_trained(config, model)
    free = {limit: model.room if fits else 10**9 for limit in _LIMITS if limit not in config.model_fields_set}
    settings = settings.model_copy(update=free)
    made = encode_rows(filter_usable(found.rows, report), settings, model.tokenizer, report, model.end_ids, show=show)
    kept: list[Example] = []
    for example in made:
        tokens = _longest(example)
        if fits and tokens > model.room:
            report.drop_long(LONG_COMPLETION, example.row.source, tokens, model.room)
        else:
            kept.append(example)
    report.heldout = len(kept)
    if not kept:
        raise DataError(f"{report.source}: no row that {model.name} can use: {report.reasons()}; {report.remedies()}")
    return kept, report


def read_text(path: str) -> str:
    """What a text file holds.

    Raises:
        DataError: it cannot be read, or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _longest(example: Example) -> int:
    from rlhf.data.examples import token_parts

    (_, prompt), *replies = token_parts(example)
    return len(prompt) + max((len(ids) for _, ids in replies), default=0)


def _as_trained(config: DataConfig, model: EvaluatedModel) -> DataConfig:
    return config.model_copy(update={"chat_template": model.prompt_format == "template"})


def _is_text(source: str) -> bool:
    return source.lower().endswith(_TEXT)


def _document(source: str) -> Row:
    """A text file, as one text without a prompt."""
    from rlhf.data.records import Row

    text = read_text(source)
    if not text.strip():
        raise DataError(f"{source}: holds no text; name another file")
    return Row((), "", text, None, None, Path(source).name)


STDIN = "-"


def is_line_source(name: str) -> bool:
    """Whether a name is of what holds a prompt on each line, and not of what `data.datasets` reads."""
    return name == STDIN or name.lower().endswith(".txt")


def read_lines(name: str) -> list[Row]:
    """The prompts of standard input (`-`) or of a text file, one on each line, in their order; never none.

    Raises:
        DataError: it cannot be read, or holds no prompt.
    """
    if name == STDIN:
        return _some(_lines("standard input", sys.stdin), "standard input")
    return _some(_lines(name, read_text(name).split("\n")), name)


def read_prompts(config: Config, *, show: bool = False) -> tuple[list[Row], DropCounts]:
    """The prompts of all rows of `config.data.datasets`, never none; and why rows are left out.

    Raises:
        DataError: a source cannot be read, or they hold no prompt.
    """
    read = SourceReader(config.seed, show)
    rows: list[Row] = []
    dropped: DropCounts = {}
    for found in (read[SourceSpec.for_training(dataset)] for dataset in config.data.datasets):
        for reason, (number, where) in found.dropped.items():
            add_drop(dropped, reason, where, number)
        for row in found.rows:
            if row.prompt:
                rows.append(row)
            else:
                add_drop(dropped, "text alone, without a prompt", row.source)
    return _some(rows, ", ".join(dataset.path for dataset in config.data.datasets)), dropped


def read_heldout_prompts(config: Config, tokenizer: Any) -> list[Row]:
    """The prompts that the PPO stage of a recipe holds out.

    Raises:
        DataError: a source cannot be read, or the stage has no rows.
    """
    from rlhf.data.stage_dataset import load_stage

    return [example.row for example in load_stage(config.data, "ppo", tokenizer, seed=config.seed).heldout]


def draw_rows(rows: list[Row], limit: int, seed: int) -> list[Row]:
    """At most `limit` rows, in their order, drawn from all of them."""
    if limit >= len(rows):
        return rows
    return [rows[place] for place in sorted(random.Random(f"limit {seed}").sample(range(len(rows)), limit))]


def _lines(name: str, lines: Iterable[str]) -> list[Row]:
    """Each line is a record of one column, `prompt`: one that is a transcript is a conversation."""
    columns = ColumnMapping(prompt="prompt")
    return [
        parse_record({"prompt": line.strip()}, columns, f"{name}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _some(rows: list[Row], name: str) -> list[Row]:
    if not rows:
        raise DataError(f"{name}: holds no prompts; name another file with --prompts")
    return rows
