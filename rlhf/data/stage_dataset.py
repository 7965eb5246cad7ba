"""The data set of one stage: `load_stage` splits the rows of the sources among stages, tokenizes and blends them.

It takes a `DataConfig`, a tokenizer and the sources' rows, and returns token-id examples with a report per source.
`check_stage` tells in advance, from a sample, if it will succeed.

Rows with the same prompt stay together: within one source, no stage and no evaluation sees another's prompts. The
split depends on the seed and the rows alone.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.config.data import Weight
from rlhf.config.schema import STAGES, DataConfig, DatasetConfig, Stage, share_of
from rlhf.config.types import short_repr
from rlhf.data.examples import (
    REPLY_FIELDS,
    Example,
    TokenCounts,
    add_token_counts,
    drop_rows,
    encode_rows,
    filter_usable,
    length_quantiles,
    median_index,
)
from rlhf.data.load_sources import ParsedSource, SourceReader, SourceSpec, list_stage_datasets, read_sources
from rlhf.data.prompt_encoding import PromptFormat, detect_prompt_format, find_row_format, uses_chat_template
from rlhf.data.records import Row, format_plain_prompt
from rlhf.data.report import PROMPT_TRAINED_ON, TRAINED_ON, DataReport
from rlhf.data.spool import Selection
from rlhf.errors import DataError
from rlhf.runs.resume import Fingerprints

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

LENGTH_QUANTILES = (0.5, 0.9, 0.99, 1.0)
"""The report gives these quantiles of the rows' lengths."""
CHECK_SAMPLE = 256
"""Rows of each source that `check_stage` tokenizes first."""
_HASH_BYTES = 16


@dataclass(frozen=True)
class StageData:
    """The training and held-out examples of a stage, the report of each source, and the format of the prompts.

    Attributes:
        train, heldout: examples; of `select_examples`, their numbers, also in the reports.
        fingerprints: fingerprints of the sources, if they were stored with the examples.
    """

    train: Sequence[Any]
    heldout: Sequence[Any]
    reports: list[DataReport]
    prompt_format: PromptFormat = "plain"
    end_ids: tuple[int, ...] = ()
    fingerprints: Fingerprints = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        """The entries of `stage.json` with the format of prompts and the end of replies, for users of the model."""
        return {"prompt_format": self.prompt_format, "end_ids": list(self.end_ids)}


@dataclass
class _SourceExamples:
    """The examples of one source in a stage, by their numbers in the order of creation."""

    examples: np.ndarray
    report: DataReport
    weight: Weight


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
    """Return the examples of one stage: `Demonstration` for sft, `Pair` for reward and dpo, `Prompt` for ppo.

    The same config and seed give the same examples. Within each source, stages have disjoint prompts; a prompt that
    sources for different stages have in common may be in several. Held-out examples come in a seeded random order,
    each prompt once before any is repeated: the first few are a fair sample.

    Args:
        config: sources, splits and length limits.
        stage: the stage.
        tokenizer: the model's tokenizer.
        seed: determines splits and order.
        end_ids: tokens that end a reply; None: the tokenizer's end-of-sequence token.
        sources: the sources' rows, read with the same `seed`; None: they are read without progress bars.
        sample: maximum number of rows to tokenize per source, sampled by the seed; None: all of the stage's.

    Raises:
        DataError: a source cannot be read or has no usable row, or the training or held-out part would be empty.
    """
    examples: list[Example] = []
    rows = sources or read_sources(config, [stage], seed=seed)
    data = select_examples(
        config, stage, tokenizer, examples.append, seed=seed, end_ids=end_ids, sources=rows, sample=sample
    )
    for report in data.reports:
        report.example = examples[report.example]
    train, heldout = ([examples[number] for number in numbers] for numbers in (data.train, data.heldout))
    return replace(data, train=train, heldout=heldout)


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
) -> StageData:
    """Make the examples of `load_stage` without holding them: `keep` receives each one, the result has their numbers.

    Raises:
        DataError: as `load_stage`.
    """
    import numpy as np

    datasets = list_stage_datasets(config, stage)
    templated = uses_chat_template(tokenizer, config.chat_template)
    check_templates(config, templated=templated)
    shares = dict(zip(STAGES, config.stage_split, strict=True))
    prompts, formats = bytearray(), list[PromptFormat]()  # of each example, by its number

    def encode_source(source: ParsedSource, rows: Sequence[Row], report: DataReport, weight: Weight) -> _SourceExamples:
        usable = filter_usable(rows, report)
        if sample is not None and sample < len(usable):
            report.unseen = len(usable) - sample
            sampled = random.Random(f"sample {seed}").sample(range(len(usable)), sample)
            usable = Selection(usable, sorted(sampled))
        template = "" if templated or not source.template else f", template: {source.template!r}"
        report.how, report.rows, report.share = f"{source.how}{template}", len(source.rows), len(rows)
        first, counts = len(formats), TokenCounts()
        for example in encode_rows(usable, config, tokenizer, report, end_ids, show=sources.show):
            keep(example)
            add_token_counts(counts, example)
            prompts.extend(_hash(seed, prompt_key(example.row)))
            formats.append(sys.intern(find_row_format(example.row)) if example.row.prompt else "")
        if len(formats) == first:
            raise _no_usable_row_error(report)
        report.tokens = length_quantiles(counts, *LENGTH_QUANTILES)
        report.example = first + median_index(counts)
        return _SourceExamples(np.arange(first, len(formats)), report, weight)

    def encode_share(dataset: DatasetConfig) -> _SourceExamples:
        """Encode the stage's share of a source."""
        source = sources[SourceSpec.for_training(dataset)]
        report = DataReport(stage, dataset.path, dropped=dict(source.dropped))
        parts = split_by_key(map(prompt_key, source.rows), {name: shares[name] for name in dataset.stages}, seed=seed)
        return encode_source(source, Selection(source.rows, parts[share_of(stage)]), report, dataset.weight)

    def encode_heldout(dataset: DatasetConfig, trained: set[bytes]) -> _SourceExamples:
        """Encode the held-out source of a data set, without the rows that this or another stage may train on."""
        source = sources[SourceSpec.for_evaluation(dataset)]
        report = DataReport(stage, str(dataset.heldout_name), dropped=dict(source.dropped))
        reason = TRAINED_ON if REPLY_FIELDS[stage] else PROMPT_TRAINED_ON
        unseen = drop_rows(source.rows, lambda row: _training_key(row, stage) in trained and reason, report)
        part = encode_source(source, unseen, report, dataset.weight)
        report.heldout = len(part.examples)
        return part

    parts = [encode_share(dataset) for dataset in datasets]
    with_heldout = [dataset for dataset in datasets if dataset.heldout_name is not None]
    heldout_parts: list[_SourceExamples] = []
    if with_heldout:
        train_sources = {SourceSpec.for_training(dataset) for dataset in config.datasets}
        trained = {_training_key(row, stage) for source in train_sources for row in sources[source].rows}
        heldout_parts = [encode_heldout(dataset, trained) for dataset in with_heldout]
    hashes = _as_array(prompts)
    undivided = [part for part, dataset in zip(parts, datasets, strict=True) if dataset.heldout_name is None]
    divided = [part for part, dataset in zip(parts, datasets, strict=True) if dataset.heldout_name is not None]
    trained_prompts = hashes[_join([part.examples for part in divided])]
    held_out = [_hold_out(undivided, config.heldout_fraction, hashes, trained_prompts)] if undivided else []
    _apply_weights(parts, seed)

    heldout = _join([*(part.examples for part in heldout_parts), *held_out]).tolist()
    heldout = shuffle_by_rounds(heldout, seed=seed, key=hashes.__getitem__)
    train = _join([part.examples for part in parts]).tolist()
    reports = [part.report for part in [*parts, *heldout_parts]]
    if not heldout or not train:
        raise _too_few_prompts_error(reports, len(train) + len(heldout))
    prompt_format = detect_prompt_format(
        tokenizer, (formats[number] for number in train), chat_template=config.chat_template
    )
    return StageData(
        train,
        heldout,
        reports,
        prompt_format,
        tuple(end_ids or [tokenizer.eos_token_id]),
    )


def check_templates(config: DataConfig, *, templated: bool) -> None:
    """Raise `DataError` if a chat template writes the prompts and a data set names another template.

    The templates of known data sets are for models without a chat template.
    """
    for index, dataset in enumerate(config.datasets):
        if templated and dataset.template is not None:
            raise DataError(
                f"data.datasets.{index}.template: the tokenizer's chat template writes the prompts, got "
                f"{short_repr(dataset.template)}; set data.chat_template=false, or remove the template"
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
    """Check that `load_stage` will succeed; a sample nearly always suffices.

    If the sample gives both a training and a held-out part, all rows do: more rows only add usable ones.

    Returns:
        The examples of the sample or, if it had too few, of all rows.

    Raises:
        DataError: as `load_stage`.
    """
    sources = sources or read_sources(config, [stage], seed=seed)
    try:
        return load_stage(config, stage, tokenizer, seed=seed, end_ids=end_ids, sources=sources, sample=CHECK_SAMPLE)
    except DataError:
        return load_stage(config, stage, tokenizer, seed=seed, end_ids=end_ids, sources=sources)


def _no_usable_row_error(report: DataReport) -> DataError:
    """Return the error for a source that gives no example."""
    if report.dropped:
        reason = f"{report.reasons()}; {report.remedies()}"
    elif report.rows:
        reason = "it has too few distinct prompts for data.stage_split; add rows, or name fewer data.datasets.*.stages"
    else:
        reason = "it has no rows; add some, or remove it from data.datasets"
    return DataError(f"{report.stage}: {report.source}: no usable row: {reason}")


def _too_few_prompts_error(reports: Sequence[DataReport], usable: int) -> DataError:
    """Return the error for rows that all have the same prompt, which leaves no held-out part."""
    listed = ", ".join(report.source for report in reports)
    worst = max(reports, key=lambda report: report.unusable)
    reason = f"left out: {worst.reasons()}; {worst.remedies()}, or " if worst.unusable else ""
    return DataError(
        f"{reports[0].stage}: {listed}: {usable} usable row{'s' * (usable != 1)}, but too few prompts for a held-out "
        f"part; {reason}name a second source in data.datasets.*.heldout"
    )


def _training_key(row: Row, stage: Stage) -> bytes:
    """Return a hash of what a stage learns from a row: its prompt and replies; in PPO the prompt alone.

    Many rows of a held-out source may share a few prompts with training rows (one instruction for all of them).
    """
    return _hash(0, repr((prompt_key(row), *sorted(str(getattr(row, name)) for name in REPLY_FIELDS[stage]))))


def _hold_out(
    parts: Sequence[_SourceExamples], fraction: float, prompts: np.ndarray, trained_prompts: np.ndarray
) -> np.ndarray:
    """Move a fraction of the examples out of the sources, except prompts that another source trains on.

    A prompt that several of the sources have stays on one side.
    """
    import numpy as np

    examples = _join([part.examples for part in parts])
    candidates = examples[~np.isin(prompts[examples], trained_prompts)]
    fractions = {"train": 1 - fraction, "heldout": fraction}
    places = _places_in_sources([prompts[part.examples] for part in parts])
    heldout: np.ndarray = candidates[split_by_hash(prompts[candidates], fractions, places)["heldout"]]
    for part in parts:
        remains = ~np.isin(prompts[part.examples], prompts[heldout])
        part.report.heldout = int((~remains).sum())
        part.examples = part.examples[remains]
    return heldout


def _places_in_sources(sources: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts of the sources, and where each stands in its source's seeded order, from 0 to 1.

    A prompt in several sources has its first place. Prompts of different sources cannot be ordered by hash alone.
    `split_by_key` gives a stage the prompts of one range of hashes, so the prompts with the highest hashes would all
    come from the sources that serve this stage alone, and only those sources would be held out.
    """
    import numpy as np

    ordered = [np.unique(prompts) for prompts in sources]
    prompts = _join(ordered)
    places = _join([(np.arange(len(ranked)) + 0.5) / len(ranked) for ranked in ordered])
    order = np.lexsort((places, prompts))
    distinct, first = np.unique(prompts[order], return_index=True)
    return distinct, places[order][first]


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    import numpy as np

    return np.concatenate(parts) if parts else np.empty(0, int)


def _apply_weights(parts: Sequence[_SourceExamples], seed: int) -> None:
    """Leave out the examples that exceed the weights of their sources."""
    selected = select_by_weight([len(part.examples) for part in parts], [part.weight for part in parts], seed=seed)
    for part, indices in zip(parts, selected, strict=True):
        part.report.by_weight = len(part.examples) - len(indices)
        part.examples = part.examples[indices]
        part.report.train = len(part.examples)


def prompt_key(row: Row) -> str:
    """Return the identity of a row's prompt, or of a text without one.

    Letter case, white space and the source's template do not matter.
    """
    text = (format_plain_prompt(row.prompt) if row.template else row.text) or row.response or ""
    return " ".join(text.split()).casefold()


def split_by_key(keys: Iterable[str], shares: Mapping[str, float], *, seed: int) -> dict[str, np.ndarray]:
    """Cut items into disjoint parts of about the given shares; return the indices of the items in each part.

    Items with one key form a group; groups are ordered by a seeded hash, and cut where the count of items comes nearest
    to each share. Every part gets at least one group while there are enough of them. Within a part, items keep their
    order. Parts with a share of 0 are empty.

    Args:
        keys: the key of each item.
        shares: part -> its share.
        seed: determines the order of the groups.
    """
    hashes = bytearray()
    for key in keys:
        hashes += _hash(seed, key)
    return split_by_hash(_as_array(hashes), shares)


def split_by_hash(
    hashes: np.ndarray, shares: Mapping[str, float], places: tuple[np.ndarray, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Cut items into parts as `split_by_key`, from the hashes of their keys.

    Args:
        hashes: the hash of each item's key.
        shares: part -> its share.
        places: (all hashes, sorted; a number for each), if these numbers order the groups before their hashes do.
    """
    import numpy as np

    groups, group_of, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    order = np.arange(len(groups))
    if places is not None:
        order = np.argsort(places[1][np.searchsorted(places[0], groups)], kind="stable")
    cumulative = np.concatenate([[0], np.cumsum(sizes[order])])  # items in the first n groups
    nonempty = [name for name, share in shares.items() if share > 0]
    total = sum(shares.values())
    parts = {name: np.empty(0, int) for name in shares}
    start, target = 0, 0.0
    for position, name in enumerate(nonempty):
        target += shares[name] / total * len(hashes)
        later = len(nonempty) - position - 1
        nearest = int(np.abs(cumulative - target).argmin()) if later else len(groups)
        end = max(min(nearest, len(groups) - later), min(start + 1, len(groups)))
        parts[name] = np.flatnonzero(np.isin(group_of, order[start:end]))
        start = end
    return parts


def _as_array(hashes: bytearray) -> np.ndarray:
    """Return an array of hashes, which NumPy sorts as `sorted` sorts their bytes."""
    import numpy as np

    return np.frombuffer(hashes, f"S{_HASH_BYTES}")


def select_by_weight(counts: Sequence[int], weights: Sequence[Weight], *, seed: int) -> list[list[int]]:
    """Return the indices of the rows to use from each source, so that the sources are in proportion to their weights.

    No row is repeated: the source that is scarcest for its weight is used whole, the others are sampled. Sources of
    weight `all` are used whole and do not affect the others.
    """
    weighted = [*zip(counts, weights, strict=True)]
    scale = min((count / weight for count, weight in weighted if count and weight != "all"), default=0.0)
    sizes = [count if weight == "all" else min(count, max(1, round(scale * weight))) for count, weight in weighted]
    return [
        sorted(random.Random(f"blend {seed} {number}").sample(range(count), size))
        for number, (count, size) in enumerate(zip(counts, sizes, strict=True))
    ]


def shuffle_by_rounds(items: Sequence[T], *, seed: int, key: Callable[[T], Hashable]) -> list[T]:
    """Return the items in random order, one of each key before any key is repeated."""
    shuffled = random.Random(f"heldout {seed}").sample(items, len(items))
    seen: Counter[Hashable] = Counter()
    rounds = []
    for item in shuffled:
        rounds.append(seen[key(item)])
        seen[key(item)] += 1
    return [item for _, item in sorted(zip(rounds, shuffled, strict=True), key=lambda pair: pair[0])]


def _hash(seed: int, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{key}".encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
