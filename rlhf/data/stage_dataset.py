"""What one stage trains on: `load_stage` shares and tokenizes the rows of the sources, and blends them.

A `DataConfig`, a tokenizer and the sources' rows go in; examples of token ids and a report per source come out.
`check_stage` tells beforehand, and cheaply, whether it will succeed.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlhf.config.data import Weight
from rlhf.config.schema import STAGES, DataConfig, DatasetConfig, Stage, share_of
from rlhf.data.examples import Example, TokenCounts, add_token_counts, length_quantiles, median_index
from rlhf.data.load_sources import ParsedSource, SourceReader, SourceSpec, list_stage_datasets, read_sources
from rlhf.data.prompt_encoding import PromptFormat, detect_prompt_format
from rlhf.data.records import Row
from rlhf.data.report import LEFT_OUT_BY_WEIGHT, PROMPT_TRAINED_ON, TRAINED_ON, DataReport
from rlhf.data.tokenize_rows import REPLY_FIELDS, encode_rows, filter_usable, record_drop
from rlhf.errors import DataError
from rlhf.runs.resume import Fingerprints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StageData:
    """What one stage trains on and is evaluated on, what became of each source's rows, and how they are written."""

    train: Sequence[Example]
    heldout: Sequence[Example]
    reports: list[DataReport]
    prompt_format: PromptFormat = "plain"
    end_ids: tuple[int, ...] = ()
    fingerprints: Fingerprints = field(default_factory=dict)
    """Of the sources, where the examples were stored with them."""

    @property
    def written(self) -> dict[str, Any]:
        """What `stage.json` says of how prompts are written and replies end, for those who use the model."""
        return {"prompt_format": self.prompt_format, "end_ids": list(self.end_ids)}


@dataclass(frozen=True)
class StageSelection:
    """Which of a stage's examples it gets, by the places in which they were made, and what `StageData` says of them.

    `typical` has for each report the place of its example.
    """

    train: list[int]
    heldout: list[int]
    reports: list[DataReport]
    typical: list[int]
    prompt_format: PromptFormat
    end_ids: tuple[int, ...]


class _ExampleRef(NamedTuple):
    """An example that was made, without its tokens."""

    place: int
    row: Row


@dataclass
class _SourceExamples:
    """One source's examples on their way to a stage."""

    examples: list[_ExampleRef]
    report: DataReport
    weight: Weight
    typical: int = 0


LENGTH_QUANTILES = (0.5, 0.9, 0.99, 1.0)
"""Of a source's rows: the lengths that so many of them do not exceed are reported."""
CHECK_SAMPLE = 256
"""Rows of each source that `check_stage` tokenizes at first."""


def load_stage(
    config: DataConfig,
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    end_ids: Sequence[int] | None = None,
    sources: SourceReader | None = None,
    sample: int | None = None,
) -> StageData:
    """Examples of one stage: `Demonstration` for sft, `Pair` for reward and dpo, `Prompt` for ppo.

    The same config and seed give the same examples, and of each source every stage has prompts of its own; a prompt
    that sources for different stages have in common may be in several. Held-out examples come in a seeded random
    order, each prompt once before any comes again: the first few are a fair sample.

    Args:
        end_ids: tokens that end a reply; default: the tokenizer's end-of-sequence token.
        sources: their rows, read before with the same `seed`; default: they are read, without a word.
        sample: tokenize no more than so many rows of each source, drawn by the seed; default: all of the stage's.

    Raises:
        DataError: a source cannot be read or has no usable row, or the training or held-out part would be empty.
    """
    made: list[Example] = []
    read = sources or read_sources(config, [stage], seed=seed)
    chosen = select_examples(
        config, stage, tokenizer, made.append, seed=seed, end_ids=end_ids, sources=read, sample=sample
    )
    for report, place in zip(chosen.reports, chosen.typical, strict=True):
        report.example = made[place]
    train, heldout = ([made[place] for place in places] for places in (chosen.train, chosen.heldout))
    return StageData(train, heldout, chosen.reports, chosen.prompt_format, chosen.end_ids)


def select_examples(
    config: DataConfig,
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    keep: Callable[[Example], object],
    *,
    seed: int,
    end_ids: Sequence[int] | None,
    sources: SourceReader,
    sample: int | None = None,
) -> StageSelection:
    """What `load_stage` gives, without the examples: each is given to `keep` when it is made, and not held.

    Raises:
        DataError: as `load_stage`.
    """
    datasets = list_stage_datasets(config, stage)
    shares = dict(zip(STAGES, config.stage_split, strict=True))
    places = itertools.count()

    def part_of(source: ParsedSource, rows: Sequence[Row], report: DataReport, weight: Weight) -> _SourceExamples:
        kept = filter_usable(rows, report)
        if sample is not None and sample < len(kept):
            report.unseen = len(kept) - sample
            drawn = random.Random(f"sample {seed}").sample(range(len(kept)), sample)
            kept = [kept[place] for place in sorted(drawn)]
        report.how, report.rows, report.share = source.how, len(source.rows), len(rows)
        part, counts = _SourceExamples([], report, weight), TokenCounts()
        for example in encode_rows(kept, config, tokenizer, report, end_ids, show=sources.show):
            keep(example)
            add_token_counts(counts, example)
            part.examples.append(_ExampleRef(next(places), example.row))
        _check_some(part, len(source.rows))
        report.tokens, part.typical = (
            length_quantiles(counts, *LENGTH_QUANTILES),
            part.examples[median_index(counts)].place,
        )
        return part

    def share(dataset: DatasetConfig) -> _SourceExamples:
        """What the stage gets of a source."""
        source = sources[SourceSpec.trained(dataset)]
        report = DataReport(stage, dataset.path, dropped=dict(source.dropped))
        parts = split_by_key(source.rows, {name: shares[name] for name in dataset.stages}, seed=seed, key=prompt_key)
        return part_of(source, parts[share_of(stage)], report, dataset.weight)

    def held_out(dataset: DatasetConfig, trained: set[tuple[str, ...]]) -> _SourceExamples:
        """The held-out source of a data set, without what this or another stage may train on."""
        source = sources[SourceSpec.held_out(dataset)]
        report = DataReport(stage, str(dataset.heldout), dropped=dict(source.dropped))
        known = TRAINED_ON if REPLY_FIELDS[stage] else PROMPT_TRAINED_ON
        new = [row for row in source.rows if not record_drop(row, _lesson(row, stage) in trained and known, report)]
        return part_of(source, new, report, dataset.weight)

    parts = [share(dataset) for dataset in datasets]
    named: list[_SourceExamples] = []
    if any(dataset.heldout is not None for dataset in datasets):
        everywhere = {SourceSpec.trained(dataset) for dataset in config.datasets}
        trained = {_lesson(row, stage) for source in everywhere for row in sources[source].rows}
        named = [held_out(dataset, trained) for dataset in datasets if dataset.heldout is not None]
    for part in named:
        part.report.heldout = len(part.examples)
    heldout = [example for part in named for example in part.examples]
    undivided = [part for part, dataset in zip(parts, datasets, strict=True) if dataset.heldout is None]
    divided = [part for part, dataset in zip(parts, datasets, strict=True) if dataset.heldout is not None]
    elsewhere = {prompt_key(example.row) for part in divided for example in part.examples}
    heldout += _hold_out(undivided, config.heldout_fraction, seed, elsewhere)
    _blend(parts, seed)

    heldout = shuffle_by_rounds(heldout, seed=seed, key=lambda example: prompt_key(example.row))
    train = [example for part in parts for example in part.examples]
    reports = [part.report for part in [*parts, *named]]
    if not heldout or not train:
        raise _too_few(reports, len(train) + len(heldout))
    form = detect_prompt_format(tokenizer, [example.row for example in train], chat_template=config.chat_template)
    return StageSelection(
        [example.place for example in train],
        [example.place for example in heldout],
        reports,
        [part.typical for part in [*parts, *named]],
        form,
        tuple(end_ids or [tokenizer.eos_token_id]),
    )


def check_stage(
    config: DataConfig,
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    end_ids: Sequence[int] | None = None,
    sources: SourceReader | None = None,
) -> StageData:
    """Find out whether `load_stage` will succeed; a sample nearly always shows it.

    Where the sample gives both parts, training and held-out, all rows do: usable rows are only added.

    Returns:
        the examples of the sample or, where that had too few, of all rows.

    Raises:
        DataError: what `load_stage` would raise.
    """
    sources = sources or read_sources(config, [stage], seed=seed)
    try:
        return load_stage(config, stage, tokenizer, seed=seed, end_ids=end_ids, sources=sources, sample=CHECK_SAMPLE)
    except DataError:
        return load_stage(config, stage, tokenizer, seed=seed, end_ids=end_ids, sources=sources)


def _check_some(part: _SourceExamples, rows: int) -> None:
    """Raise `DataError` where a source of so many rows that have a prompt gives no example."""
    report = part.report
    if part.examples:
        return
    if report.dropped:
        why = f"{report.reasons()}; {report.remedies()}"
    elif rows:
        why = "it has too few distinct prompts for data.stage_split; add rows, or name fewer data.datasets.*.stages"
    else:
        why = "it has no rows; add some, or leave it out of data.datasets"
    raise DataError(f"{report.stage}: {report.source}: no usable row: {why}")


def _too_few(reports: Sequence[DataReport], usable: int) -> DataError:
    """The error that the rows, all with the same prompt, give no held-out part."""
    listed = ", ".join(report.source for report in reports)
    worst = max(reports, key=lambda report: report.unfit)
    why = f"left out: {worst.reasons()}; {worst.remedies()}, or " if worst.unfit else ""
    return DataError(
        f"{reports[0].stage}: {listed}: {usable} usable row{'s' * (usable != 1)}, but too few prompts for a held-out "
        f"part; {why}name a second source in data.datasets.*.heldout"
    )


def _lesson(row: Row, stage: Stage) -> tuple[str, ...]:
    """What a stage learns from, in a row: its prompt and the replies that it is shown; in PPO the prompt alone.

    Many rows of a held-out source may share a few prompts with those that are trained on (one instruction for all).
    """
    return (prompt_key(row), *sorted(str(getattr(row, name)) for name in REPLY_FIELDS[stage]))


def _hold_out(parts: Sequence[_SourceExamples], fraction: float, seed: int, trained: set[str]) -> list[_ExampleRef]:
    """Move a part of the examples out of the sources, but no prompt that another source has in `trained`.

    A prompt that several of the sources have stays on one side.
    """
    examples = [example for part in parts for example in part.examples]
    free = [example for example in examples if prompt_key(example.row) not in trained]
    sides = {"train": 1 - fraction, "heldout": fraction}
    chosen = split_by_key(free, sides, seed=seed, key=lambda example: prompt_key(example.row))["heldout"]
    keys = {prompt_key(example.row) for example in chosen}
    for part in parts:
        before = len(part.examples)
        part.examples = [example for example in part.examples if prompt_key(example.row) not in keys]
        part.report.heldout = before - len(part.examples)
    return chosen


def _blend(parts: Sequence[_SourceExamples], seed: int) -> None:
    """Leave out what the weights leave no room for."""
    kept = select_by_weight([len(part.examples) for part in parts], [part.weight for part in parts], seed=seed)
    for part, indices in zip(parts, kept, strict=True):
        for index in sorted(set(range(len(part.examples))) - set(indices)):
            part.report.drop(LEFT_OUT_BY_WEIGHT, part.examples[index].row.source)
        part.examples = [part.examples[index] for index in indices]
        part.report.train = len(part.examples)


T = TypeVar("T")


def prompt_key(row: Row) -> str:
    """Identity of a row's prompt, of a text without one that of the text; letter case and white space do not count."""
    text = row.text or row.response or ""
    return " ".join(text.split()).casefold()


def split_by_key(
    items: Sequence[T], shares: Mapping[str, float], *, seed: int, key: Callable[[T], str]
) -> dict[str, list[T]]:
    """Cut `items` into disjoint parts of about the given shares.

    Items of one key form a group; groups are ordered by a seeded hash and cut where the count of items comes
    nearest to each share. Every part gets at least one group while there are enough of them. Within a part,
    items keep their order. Parts with a share of 0 are empty.
    """
    keys = [key(item) for item in items]
    order = {name: _hash(seed, name) for name in set(keys)}
    sizes: dict[str, int] = dict.fromkeys(sorted(order, key=order.__getitem__), 0)
    for name in keys:
        sizes[name] += 1
    filled = [0, *accumulate(sizes.values())]  # items in the first n groups
    named = [name for name, share in shares.items() if share > 0]
    total = sum(shares.values())
    part_of: dict[str, str] = {}
    start, reached = 0, 0.0
    for position, name in enumerate(named):
        reached += shares[name] / total * len(items)
        later = len(named) - position - 1
        nearest = min(range(len(filled)), key=lambda cut: abs(filled[cut] - reached)) if later else len(sizes)
        end = max(min(nearest, len(sizes) - later), min(start + 1, len(sizes)))
        part_of.update(dict.fromkeys(list(sizes)[start:end], name))
        start = end
    parts: dict[str, list[T]] = {name: [] for name in shares}
    for name, item in zip(keys, items, strict=True):
        parts[part_of[name]].append(item)
    return parts


def select_by_weight(counts: Sequence[int], weights: Sequence[Weight], *, seed: int) -> list[list[int]]:
    """Indices of the rows to keep of each source, so that the sources are in proportion to their weights.

    No row is repeated: the source that is scarcest for its weight is kept whole, of the others a seeded sample. Those
    of weight `all` are kept whole, and say nothing of the others.
    """
    pairs = [*zip(counts, weights, strict=True)]
    scale = min((count / weight for count, weight in pairs if count and weight != "all"), default=0.0)
    sizes = [count if weight == "all" else min(count, max(1, round(scale * weight))) for count, weight in pairs]
    return [
        sorted(random.Random(f"blend {seed} {number}").sample(range(count), size))
        for number, (count, size) in enumerate(zip(counts, sizes, strict=True))
    ]


def shuffle_by_rounds(items: Sequence[T], *, seed: int, key: Callable[[T], str]) -> list[T]:
    """The items in random order, one of each key before any comes again."""
    shuffled = random.Random(f"heldout {seed}").sample(items, len(items))
    seen: Counter[str] = Counter()
    rounds = []
    for item in shuffled:
        rounds.append(seen[key(item)])
        seen[key(item)] += 1
    return [item for _, item in sorted(zip(rounds, shuffled, strict=True), key=lambda pair: pair[0])]


def _hash(seed: int, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
