"""What one stage trains on: `load_stage` reads the sources, shares and tokenizes their rows, and blends them.

A `DataConfig` and a tokenizer go in; examples of token ids and a report per source come out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhf.config import STAGES, ColumnsConfig, DataConfig, DatasetConfig, Stage
from rlhf.data.encoding import (
    PromptFormat,
    control_tokens,
    encode_prompts,
    encode_replies,
    has_control_tokens,
    has_template,
    prompt_format,
)
from rlhf.data.report import DataReport
from rlhf.data.rows import MALFORMED, Rejected, Row, parse, recognize
from rlhf.data.sources import Record, read
from rlhf.data.splits import blend, prompt_key, split
from rlhf.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the reply to imitate (stage sft)."""

    prompt_ids: list[int]
    completion_ids: list[int]
    row: Row


@dataclass(frozen=True)
class Pair:
    """A prompt with a preferred and a dispreferred reply (stage reward)."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    row: Row


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer (stage ppo)."""

    prompt_ids: list[int]
    row: Row


Example = Demonstration | Pair | Prompt

_EXAMPLE = {"sft": Demonstration, "reward": Pair, "ppo": Prompt}
_REPLIES: dict[Stage, tuple[str, ...]] = {"sft": ("response",), "reward": ("chosen", "rejected"), "ppo": ()}


@dataclass(frozen=True)
class StageData:
    """What one stage trains on and is evaluated on, what became of each source's rows, and how prompts are written."""

    train: list[Example]
    heldout: list[Example]
    reports: list[DataReport]
    prompt_format: PromptFormat = "plain"


@dataclass
class _Source:
    """One source on its way to a `StageData`."""

    examples: list[Example]
    report: DataReport
    weight: float


def load_stage(
    config: DataConfig,
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    end_ids: Sequence[int] | None = None,
) -> StageData:
    """Examples of one stage: `Demonstration` for sft, `Pair` for reward, `Prompt` for ppo.

    The same config and seed give the same examples, and of each source every stage has prompts of its own; a prompt
    that sources for different stages have in common may be in several. Held-out examples come in a seeded random
    order, each prompt once before any comes again: the first few are a fair sample.

    Args:
        end_ids: tokens that end a reply; default: the tokenizer's end-of-sequence token.

    Raises:
        DataError: a source cannot be read or has no usable row, or the training or held-out part would be empty.
    """
    shares = dict(zip(STAGES, config.stage_split, strict=True))
    datasets = [dataset for dataset in config.datasets if stage in dataset.stages]
    if not datasets:
        raise DataError(f"{stage}: no data set is for this stage; add {stage} to data.datasets.*.stages")
    if not shares[stage]:
        raise DataError(f"{stage}: data.stage_split {list(config.stage_split)} leaves it no rows; give it a share")

    reports = [DataReport(stage, dataset.path) for dataset in datasets]
    rows = [_train_rows(dataset, report, seed) for dataset, report in zip(datasets, reports, strict=True)]

    def share(rows: list[Row], dataset: DatasetConfig, report: DataReport) -> _Source:
        """What the stage gets of a source."""
        mine = split(rows, {name: shares[name] for name in dataset.stages}, seed=seed, key=prompt_key)[stage]
        return _Source(_examples(mine, config, tokenizer, report, end_ids), report, dataset.weight)

    def held_out(dataset: DatasetConfig, trained: set[tuple[str, ...]]) -> _Source:
        """The held-out source of a data set, without what this or another stage may train on."""
        report = DataReport(stage, str(dataset.heldout))
        records = read(report.source, split=dataset.heldout_split, subset=dataset.heldout_subset, seed=seed)
        found = _rows(records, dataset.columns, report)
        known = "trained on" if _REPLIES[stage] else "prompt trained on"
        new = [row for row in found if not _dropped(row, _lesson(row, stage) in trained and known, report)]
        return _Source(_examples(new, config, tokenizer, report, end_ids), report, dataset.weight)

    sources = [share(*parts) for parts in zip(rows, datasets, reports, strict=True)]
    named: list[_Source] = []
    if any(dataset.heldout is not None for dataset in datasets):
        others = [dataset for dataset in config.datasets if stage not in dataset.stages]
        rows += [_train_rows(dataset, DataReport(stage, dataset.path), seed) for dataset in others]
        trained = {_lesson(row, stage) for part in rows for row in part}
        named = [held_out(dataset, trained) for dataset in datasets if dataset.heldout is not None]
    for source in named:
        source.report.heldout = len(source.examples)
    heldout = [example for source in named for example in source.examples]
    undivided = [s for s, d in zip(sources, datasets, strict=True) if d.heldout is None]
    divided = [s for s, d in zip(sources, datasets, strict=True) if d.heldout is not None]
    elsewhere = {prompt_key(example.row) for source in divided for example in source.examples}
    heldout += _hold_out(undivided, config.heldout_fraction, seed, elsewhere)
    _blend(sources, seed)

    heldout = _varied(heldout, seed)
    train = [example for source in sources for example in source.examples]
    reports += [source.report for source in named]
    if not heldout or not train:
        listed = ", ".join(dataset.path for dataset in datasets)
        raise DataError(
            f"{stage}: {listed}: {len(train) + len(heldout)} usable rows, but too few prompts for a held-out part; "
            "name a second source in data.datasets.*.heldout"
        )
    form = prompt_format(tokenizer, [example.row for example in train], chat_template=config.chat_template)
    return StageData(train, heldout, reports, form)


def _train_rows(dataset: DatasetConfig, report: DataReport, seed: int) -> list[Row]:
    """All rows of a data set but those of its held-out source, for whichever stage."""
    return _rows(read(dataset.path, split=dataset.split, subset=dataset.subset, seed=seed), dataset.columns, report)


def _rows(records: Sequence[Record], names: ColumnsConfig, report: DataReport) -> list[Row]:
    """Rows of the records that have a prompt and are whole."""
    found = dict.fromkeys(column for record in records for column in record.values or ())
    columns = recognize(found, names, report.source) if found else None
    rows = []
    for record in records:
        try:
            if columns is None or record.values is None:
                raise Rejected(MALFORMED)
            rows.append(parse(record.values, columns, record.source))
        except Rejected as error:
            report.drop(error.reason, record.source)
    return rows


def _examples(
    rows: Sequence[Row],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: DataReport,
    end_ids: Sequence[int] | None,
) -> list[Example]:
    """Examples of the rows that the stage can use and that are short enough; at least one."""
    rows = [row for row in rows if not _dropped(row, _unusable(row, report.stage), report)]
    control, templated = control_tokens(tokenizer), has_template(tokenizer, config.chat_template)

    def forged(row: Row) -> bool:
        replies = [getattr(row, name) for name in _REPLIES[report.stage]]
        return has_control_tokens(replies, control, templated=templated)

    rows = [row for row in rows if not _dropped(row, forged(row) and "contains control tokens", report)]
    prompts = encode_prompts(tokenizer, rows, chat_template=config.chat_template)
    replies = []
    for name in _REPLIES[report.stage]:
        texts = [getattr(row, name) for row in rows]
        replies.append(
            encode_replies(tokenizer, rows, texts, prompts, chat_template=config.chat_template, end_ids=end_ids)
        )
    examples = []
    for row, prompt_ids, *completions in zip(rows, prompts, *replies, strict=True):
        if not _dropped(row, _unfit(prompt_ids, completions, config), report):
            examples.append(_EXAMPLE[report.stage](prompt_ids, *completions, row))
    if not examples:
        why = report.reasons() or "it has no rows, or too few distinct prompts for data.stage_split"
        raise DataError(f"{report.stage}: {report.source}: no usable row: {why}; see data.datasets.*.stages, .columns")
    return examples


def _lesson(row: Row, stage: Stage) -> tuple[str, ...]:
    """What a stage learns from, in a row: its prompt and the replies that it is shown; in PPO the prompt alone.

    Many rows of a held-out source may share a few prompts with those that are trained on (one instruction for all).
    """
    return (prompt_key(row), *sorted(str(getattr(row, name)) for name in _REPLIES[stage]))


def _unusable(row: Row, stage: Stage) -> str | None:
    """Why the stage cannot use a row."""
    replies = [getattr(row, name) for name in _REPLIES[stage]]
    if None in replies:
        return "no demonstration" if stage == "sft" else "no preference"
    if "" in replies:
        return "empty response"
    if stage == "reward" and row.chosen == row.rejected:
        return "chosen equals rejected"
    return None


def _unfit(prompt: list[int] | None, completions: Sequence[list[int] | None], config: DataConfig) -> str | None:
    """Why the tokens of a row cannot be used."""
    if prompt is None or None in completions:
        return "refused by the chat template"
    if len(prompt) > config.max_prompt_length:
        return "prompt too long"
    if any(len(ids) > config.max_completion_length for ids in completions if ids):
        return "completion too long"
    if len(completions) == 2 and completions[0] == completions[1]:  # they differed in white space, or after the end
        return "chosen equals rejected"
    return None


def _dropped(row: Row, reason: str | Literal[False] | None, report: DataReport) -> bool:
    if reason:
        report.drop(reason, row.source)
    return bool(reason)


def _hold_out(sources: Sequence[_Source], fraction: float, seed: int, trained: set[str]) -> list[Example]:
    """Move a part of the examples out of the sources, but no prompt that another source has in `trained`.

    A prompt that several of the sources have stays on one side.
    """
    examples = [example for source in sources for example in source.examples]
    free = [example for example in examples if prompt_key(example.row) not in trained]
    parts = {"train": 1 - fraction, "heldout": fraction}
    chosen = split(free, parts, seed=seed, key=lambda example: prompt_key(example.row))["heldout"]
    keys = {prompt_key(example.row) for example in chosen}
    for source in sources:
        before = len(source.examples)
        source.examples = [example for example in source.examples if prompt_key(example.row) not in keys]
        source.report.heldout = before - len(source.examples)
    return chosen


def _varied(examples: list[Example], seed: int) -> list[Example]:
    """The examples in random order, each prompt once before any comes again."""
    shuffled = random.Random(f"heldout {seed}").sample(examples, len(examples))
    seen: Counter[str] = Counter()
    rounds = []
    for example in shuffled:
        key = prompt_key(example.row)
        rounds.append(seen[key])
        seen[key] += 1
    return [example for _, example in sorted(zip(rounds, shuffled, strict=True), key=lambda item: item[0])]


def _blend(sources: Sequence[_Source], seed: int) -> None:
    """Leave out what the weights leave no room for."""
    kept = blend([len(source.examples) for source in sources], [source.weight for source in sources], seed=seed)
    for source, indices in zip(sources, kept, strict=True):
        for index in sorted(set(range(len(source.examples))) - set(indices)):
            source.report.drop("left out by weight", source.examples[index].row.source)
        source.examples = [source.examples[index] for index in indices]
        source.report.train = len(source.examples)
